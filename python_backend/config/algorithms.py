"""Tables of the algorithms, losses and KL estimators: where each function is, and what an algorithm needs of a run.

The functions are imported by `actor.algorithms.method`, like a user's own: these tables never import torch.
"""

import difflib
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from python_backend.rewards.function import check_spec


@dataclass(frozen=True)
class Algorithm:
    """An advantage function, what it needs, and the published defaults of settings left at `auto` or unset."""

    advantage: str  # `package.module:name`
    loss: str = "clipped"  # one of LOSSES
    needs_critic: bool = False
    needs_groups: bool = False  # several responses to each prompt
    takes_process_rewards: bool = True
    whitens: bool = False
    kl_in: Literal["reward", "loss"] = "reward"
    loss_mean: Literal["token", "sequence"] = "token"


ALGORITHMS = {
    "ppo": Algorithm("actor.algorithms.ppo:advantage", needs_critic=True, whitens=True),
    "reinforce++": Algorithm("actor.algorithms.reinforce_plus_plus:advantage", whitens=True),
    "rloo": Algorithm(
        "actor.algorithms.rloo:advantage", loss="reinforce", needs_groups=True, takes_process_rewards=False
    ),
    "grpo": Algorithm("actor.algorithms.grpo:advantage", needs_groups=True, kl_in="loss", loss_mean="sequence"),
}
LOSSES = {"clipped": "actor.algorithms.losses:clipped", "reinforce": "actor.algorithms.losses:reinforce"}
ON_POLICY_LOSSES = ("reinforce",)  # without probability ratios
KL_ESTIMATORS = {
    "k1": "actor.algorithms.losses:k1",
    "abs": "actor.algorithms.losses:absolute",
    "k2": "actor.algorithms.losses:k2",
    "k3": "actor.algorithms.losses:k3",
}
FILE = "path/to/file.py:name"


def _one_of(*names: str, or_file: bool = False) -> AfterValidator:
    """Return a validator of a built-in name or, with `or_file`, of the name of a user's function."""

    def check(value: str) -> str:
        if value in names:
            return value
        if or_file and ":" in value:
            return check_spec(value)
        near = difflib.get_close_matches(value, names, n=1)
        valid = ", ".join(map(repr, names)) + (f", or {FILE}" if or_file else "")
        raise ValueError(f"Input should be one of {valid}" + (f"; did you mean {near[0]}?" if near else ""))

    return AfterValidator(check)


def _documented(*names: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": [*names]})


AlgorithmName: TypeAlias = Annotated[str, _one_of(*ALGORITHMS), _documented(*ALGORITHMS)]
AdvantageName: TypeAlias = Annotated[str, _one_of("auto", or_file=True), _documented("auto", FILE)]
LossName: TypeAlias = Annotated[str, _one_of("auto", *LOSSES, or_file=True), _documented("auto", *LOSSES, FILE)]
EstimatorName: TypeAlias = Annotated[str, _one_of("auto", *KL_ESTIMATORS), _documented("auto", *KL_ESTIMATORS)]
