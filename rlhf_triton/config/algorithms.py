"""Tables of algorithms, losses, gates and KL estimators: their functions, and what an algorithm requires of a run.

`actor.algorithms.method` imports the functions by name, like a user's own, so that this module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from rlhf_triton.config.other_names import hint_at_choice
from rlhf_triton.user_code import check_spec


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An advantage function, its requirements, and the published choices for settings that are `auto` or unset."""

    source: str
    meaning: str  # formula of the advantage, for the documentation
    advantage: str  # `package.module:name`
    loss: str = "clipped"  # one of LOSSES
    needs_critic: bool = False
    needs_groups: bool = False  # several responses to each prompt
    needs_components: bool = False  # a sum of several rewards, whose terms it standardises one by one
    divides_by_mean: bool = False  # of a prompt's scores, which must not be negative
    takes_process_rewards: bool = True
    whitens: bool = False
    lam_values: float | None = None  # GAE's lambda in the critic's returns; None: `actor.algorithm.lam`
    lam_length: float | None = None  # alpha of the policy's lambda, 1 - 1 / (alpha * length); None: `lam`
    positive_nll: float = 0.0  # coefficient of the mean negative log-likelihood of responses with a positive score
    kl_in: Literal["reward", "loss"] = "reward"
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    recipe: Mapping[str, Any] = field(default_factory=dict)  # further configuration keys -> published value


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and the published range of its ratio."""

    meaning: str  # for the documentation
    function: str  # `package.module:name`
    low: float = 0.2
    high: float = 0.2
    is_on_policy: bool = False  # without probability ratios
    is_gate: bool = False  # `high` bounds a divergence, and there is no `low`


@dataclass(frozen=True)
class Gate:
    """A divergence between sampler and policy, and its published upper bounds."""

    function: str  # `package.module:name`
    token: float
    sequence: float  # mean over a response


_PPO = Algorithm(
    source="Schulman et al. 2017 (arXiv 1707.06347)",
    meaning="GAE over the critic's values",
    advantage="rlhf_triton.actor.algorithms.ppo:advantage",
    needs_critic=True,
    whitens=True,
)
_GRPO = Algorithm(
    source="Shao et al. 2024 (arXiv 2402.03300)",
    meaning="total, standardised within the responses to the prompt",
    advantage="rlhf_triton.actor.algorithms.grpo:advantage",
    needs_groups=True,
    kl_in="loss",
    loss_mean="sequence",
)
_CENTRED = replace(
    _GRPO,
    meaning="total minus the mean of the responses to the prompt",
    advantage="rlhf_triton.actor.algorithms.grpo:centred",
    takes_process_rewards=False,
)
_NO_KL = {"actor.kl.coef": 0.0}
ALGORITHMS = {
    "ppo": _PPO,
    "vapo": replace(
        _PPO,
        source="Yue et al. 2025 (arXiv 2504.05118)",
        meaning="GAE, with a lambda of its own for the critic's returns",
        lam_values=1.0,
        lam_length=0.05,
        positive_nll=0.1,
        recipe={
            **_NO_KL,
            "actor.algorithm.clip_ratio_high": 0.28,
            "actor.algorithm.critic_warmup_steps": 50,
        },
    ),
    "sao": replace(
        _PPO,
        source="Hou et al. 2026 (arXiv 2607.07508)",
        meaning="GAE, with a lambda of its own for the critic's returns",
        loss="dis",
        lam_values=1.0,
        lam_length=1.5,  # as its implementers quote section 4.1
        recipe={
            **_NO_KL,
            "actor.algorithm.old_logprobs": "sampler",
            "actor.algorithm.critic_warmup_steps": 10,
            "trainer.epochs": 2,
            "trainer.freeze": (r"attn\.|attention\.",),
        },
    ),
    "reinforce++": Algorithm(
        source="Hu et al. 2025 (arXiv 2501.03262)",
        meaning="return-to-go of the token rewards",
        advantage="rlhf_triton.actor.algorithms.reinforce_plus_plus:advantage",
        whitens=True,
    ),
    "reinforce++-baseline": replace(
        _CENTRED,
        source="Hu et al. 2025 (arXiv 2501.03262)",
        whitens=True,
        loss_mean="token",
        recipe={"actor.kl.estimator": "k2"},
    ),
    "rloo": Algorithm(
        source="Ahmadian et al. 2024 (arXiv 2402.14740)",
        meaning="total minus the mean of the other responses to the prompt",
        advantage="rlhf_triton.actor.algorithms.rloo:advantage",
        loss="reinforce",
        needs_groups=True,
        takes_process_rewards=False,
    ),
    "grpo": _GRPO,
    "dapo": replace(  # its overlong penalty is in `actor.rewards`, because it depends on the length
        _GRPO,
        source="Yu et al. 2025 (arXiv 2503.14476)",
        loss_mean="token",
        recipe={**_NO_KL, "actor.algorithm.clip_ratio_high": 0.28, "actor.algorithm.max_resampled": 10},
    ),
    "dr_grpo": replace(_CENTRED, source="Liu et al. 2025 (arXiv 2503.20783)", loss_mean="constant", recipe=_NO_KL),
    "gspo": replace(_GRPO, source="Zheng et al. 2025 (arXiv 2507.18071)", loss="gspo", recipe=_NO_KL),
    "cispo": replace(_GRPO, source="MiniMax 2025 (arXiv 2506.13585)", loss="cispo", loss_mean="token", recipe=_NO_KL),
    "maxrl": replace(
        _CENTRED,
        source="arXiv 2602.02710",
        meaning="total minus the mean of the responses to the prompt, divided by it",
        advantage="rlhf_triton.actor.algorithms.grpo:relative",
        divides_by_mean=True,
        loss_mean="token",
        recipe=_NO_KL,
    ),
    "gdpo": replace(
        _GRPO,
        source="Liu et al. 2026 (arXiv 2601.05242)",
        meaning="each reward standardised within the responses to the prompt, then their weighted sum",
        advantage="rlhf_triton.actor.algorithms.grpo:decoupled",
        needs_components=True,
        takes_process_rewards=False,
        whitens=True,
        loss_mean="token",
    ),
    "flash_reinforce": Algorithm(
        source="FlashREINFORCE 2026 (github.com/yifanzhang-pro/FlashREINFORCE)",
        meaning="total minus the mean of all responses of the step",
        advantage="rlhf_triton.actor.algorithms.flash_reinforce:advantage",
        loss="flash_reinforce",
        takes_process_rewards=False,
        kl_in="loss",
        loss_mean="sequence",
        recipe={
            **_NO_KL,
            "actor.algorithm.old_logprobs": "sampler",
            "actor.algorithm.mask_unfinished": False,
            "actor.update.minibatch_size": 128,
        },
    ),
}
_LOSSES = "rlhf_triton.actor.algorithms.losses:"
LOSSES = {
    "clipped": PolicyLoss("PPO's: the ratio of each token, clipped where it gains", _LOSSES + "clipped"),
    "reinforce": PolicyLoss("no ratio; for responses of the policy in training", _LOSSES + "reinforce", 0, 0, True),
    "gspo": PolicyLoss("as PPO's, with the geometric mean of a response's ratios", _LOSSES + "gspo", 3e-4, 4e-4),
    "cispo": PolicyLoss("every token keeps its gradient, weighted by the clipped ratio", _LOSSES + "cispo", 1.0, 4.0),
    "dppo": PolicyLoss(
        "leaves out tokens whose probability moved further than the range", _LOSSES + "dppo", 0.15, 0.15
    ),
    "dis": PolicyLoss("leaves out tokens with a ratio outside the range, weighs the others", _LOSSES + "dis", 0.8, 3.0),
    "flash_reinforce": PolicyLoss(
        "leaves out responses whose mean binary KL exceeds the bound, weighs the others by their ratios",
        _LOSSES + "flash_reinforce",
        0,
        3e-3,
        is_gate=True,
    ),
}
DIVERGENCES = {  # mode of a correction -> its divergence
    "binary_kl": Gate("rlhf_triton.actor.algorithms.importance:binary_kl", token=0.05, sequence=3e-3),
    "binary_tv": Gate(
        "rlhf_triton.actor.algorithms.importance:binary_tv", token=0.2, sequence=0.2
    ),  # none is published for responses
}
KL_ESTIMATORS = {
    "k1": "rlhf_triton.actor.algorithms.kl:k1",
    "abs": "rlhf_triton.actor.algorithms.kl:absolute",
    "k2": "rlhf_triton.actor.algorithms.kl:k2",
    "k3": "rlhf_triton.actor.algorithms.kl:k3",
    "unbiased": "rlhf_triton.actor.algorithms.kl:k3",  # in the loss times the probability ratio, see `kl_loss`
}
FILE_FORM = "path/to/file.py:name"


OFFLINE = ("bco", "cpo", "dpo", "ipo", "kto", "orpo", "rft", "sft", "simpo")  # methods without sampling, for a message


def _one_of(*names: str, or_file: bool = False) -> AfterValidator:
    """Return a validator that accepts the given names and, with `or_file`, a user's function."""

    def check(value: str) -> str:
        if value in names:
            return value
        if or_file and ":" in value:
            return check_spec(value)
        if value.lower() in OFFLINE:
            raise ValueError(
                f"{value} trains on given answers, but this project on answers that the policy samples; use TRL for "
                f"{value}, or choose one of {', '.join(names)}"
            )
        valid = ", ".join(map(repr, names)) + (f", or {FILE_FORM}" if or_file else "")
        raise ValueError(f"must be one of {valid}{hint_at_choice(value, names)}")

    return AfterValidator(check)


def _documented(*names: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": [*names]})


AlgorithmName: TypeAlias = Annotated[str, _one_of(*ALGORITHMS), _documented(*ALGORITHMS)]
AdvantageName: TypeAlias = Annotated[str, _one_of("auto", or_file=True), _documented("auto", FILE_FORM)]
LossName: TypeAlias = Annotated[str, _one_of("auto", *LOSSES, or_file=True), _documented("auto", *LOSSES, FILE_FORM)]
EstimatorName: TypeAlias = Annotated[str, _one_of("auto", *KL_ESTIMATORS), _documented("auto", *KL_ESTIMATORS)]
