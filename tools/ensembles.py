"""The steps of the ensembles `critic_infer` and, where the YAML has `rewards`, `reward_model`.

Each step takes an output of the one before it, so that they run one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from python_backend.contract import (
    AFTER_COMPONENT,
    AFTER_CRITIC,
    CRITIC,
    METADATA,
    PROMPT_LENGTHS,
    RESPONSE_VALUES,
    REWARD_CHECKPOINT,
    REWARD_COMPONENT,
    REWARD_COMPONENTS,
    REWARD_ERROR,
    REWARD_ERRORS,
    REWARD_FUNCTION_PREFIX,
    REWARD_MIXTURE,
    REWARD_MODEL,
    REWARDS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TOKENS,
    VALUES,
    WEIGHTS_VERSION,
)
from python_backend.reward_terms import MODEL_TERM

SCORED = (TOKENS, SEQUENCE_LENGTHS, SENTENCES, METADATA)


@dataclass(frozen=True)
class Step:
    """A model of an ensemble; its tensors' names in the model, and in the ensemble."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def critic_infer_steps(rewards: Collection[str]) -> list[Step]:
    """The critic, then the reward model or the parts of the mixture with these names."""
    outputs = (VALUES, RESPONSE_VALUES, WEIGHTS_VERSION, AFTER_CRITIC)
    critic = Step(CRITIC, _same(*SCORED, PROMPT_LENGTHS), _same(*outputs))
    if rewards:
        return [critic, *mixture_steps(rewards, after=_same(AFTER_CRITIC))]
    return [critic, Step(REWARD_MODEL, _same(*SCORED, AFTER_CRITIC), _same(REWARDS))]


def mixture_steps(rewards: Iterable[str], *, after: dict[str, str] | None = None) -> list[Step]:
    """The rewards with these names, the checkpoint first, and their sum; `after`: what the first of them waits for."""
    steps, sums = [], dict[str, str]()
    for name in sorted(rewards, key=lambda name: name != MODEL_TERM):
        component, error = f"component_{name}", f"error_{name}"
        outputs = {REWARDS: component} if name == MODEL_TERM else {REWARD_COMPONENT: component, REWARD_ERROR: error}
        steps.append(Step(model_of(name), _same(*SCORED) | (after or {}), outputs))
        after = {AFTER_COMPONENT: component}
        sums |= _same(*outputs.values())
    return [*steps, Step(REWARD_MIXTURE, sums, _same(REWARDS, REWARD_COMPONENTS, REWARD_ERRORS))]


def model_of(name: str) -> str:
    """The model that gives the reward of this name."""
    return REWARD_CHECKPOINT if name == MODEL_TERM else REWARD_FUNCTION_PREFIX + name


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}
