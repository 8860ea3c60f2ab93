"""The steps of the ensembles `critic_infer` and, if the YAML has `rewards`, `reward_model`.

Each step takes an output of the step before it, so that Triton runs them in sequence: tritonserver 2.51 can crash when
two steps of one request fail at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from python_backend.config.reward_terms import MODEL_TERM
from python_backend.wire import contract

SCORED = (contract.TOKENS, contract.SEQUENCE_LENGTHS, contract.SENTENCES, contract.METADATA)


@dataclass(frozen=True)
class Step:
    """A step of an ensemble: a model, and its tensors as {name in the model: name in the ensemble}."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def critic_infer_steps(rewards: Collection[str]) -> list[Step]:
    """Return the steps of `critic_infer`: the critic, then the reward model or the models of the named `rewards`."""
    outputs = (contract.VALUES, contract.RESPONSE_VALUES, contract.WEIGHTS_VERSION, contract.AFTER_CRITIC)
    critic = Step(contract.CRITIC, _same(*SCORED, contract.PROMPT_LENGTHS), _same(*outputs))
    if rewards:
        return [critic, *mixture_steps(rewards, after=_same(contract.AFTER_CRITIC))]
    return [critic, Step(contract.REWARD_MODEL, _same(*SCORED, contract.AFTER_CRITIC), _same(contract.REWARDS))]


def mixture_steps(rewards: Iterable[str], *, after: dict[str, str] | None = None) -> list[Step]:
    """Return a step for each reward, the checkpoint first, and a last step for their weighted sum.

    Args:
        after: additional inputs of the first step: outputs of an earlier step, for which it must wait.
    """
    steps, sums = [], dict[str, str]()
    for name in sorted(rewards, key=lambda name: name != MODEL_TERM):
        component, error = f"component_{name}", f"error_{name}"
        outputs = {contract.REWARD_COMPONENT: component, contract.REWARD_ERROR: error}
        if name == MODEL_TERM:
            outputs = {contract.REWARDS: component}
        steps.append(Step(model_of(name), _same(*SCORED) | (after or {}), outputs))
        after = {contract.AFTER_COMPONENT: component}
        sums |= _same(*outputs.values())
    mixed = _same(contract.REWARDS, contract.REWARD_COMPONENTS, contract.REWARD_ERRORS)
    return [*steps, Step(contract.REWARD_MIXTURE, sums, mixed)]


def model_of(name: str) -> str:
    """Return the name of the model that computes the reward called `name`."""
    return contract.REWARD_CHECKPOINT if name == MODEL_TERM else contract.REWARD_FUNCTION_PREFIX + name


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}
