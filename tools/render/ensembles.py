"""The steps of the ensembles `critic_infer` and, if the YAML has `rewards`, `reward_model`.

Each step takes an output of the step before it, so that Triton runs them in sequence: tritonserver 2.51 can crash when
two steps of one request fail at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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


def critic_infer_steps(
    rewards: Collection[str] | None, *, live: bool = False, process: str | None = None
) -> list[Step]:
    """Return the steps of `critic_infer`: the critic, then the reward model or the models of the named `rewards`.

    Args:
        rewards: None if no rewards are served; the critic is the only step then.
        live: the reward model names its version.
        process: granularity of a process reward; None: the reward is another.
    """
    critic = Step(
        contract.CRITIC,
        _same(*SCORED, contract.PROMPT_LENGTHS),
        _same(contract.VALUES, contract.RESPONSE_VALUES, contract.WEIGHTS_VERSION),
    )
    if rewards is None:
        return [critic]
    critic.outputs[contract.AFTER_CRITIC] = contract.AFTER_CRITIC
    if rewards:
        return [critic, *mixture_steps(rewards, after=_same(contract.AFTER_CRITIC), live=live, process=process)]
    inputs, more = process_tensors(process)
    scored = _same(*SCORED, *inputs, contract.AFTER_CRITIC)
    return [critic, Step(contract.REWARD_MODEL, scored, _same(contract.REWARDS, *_version(live), *more))]


def process_tensors(process: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the further inputs and outputs of a process reward of granularity `process`; none for any other reward."""
    if process is None:
        return (), ()
    return (contract.PROMPT_LENGTHS,), (contract.TOKEN_REWARDS, contract.STEP_REWARDS, contract.STEP_ENDS)


def mixture_steps(
    rewards: Iterable[str],
    inputs: Sequence[str] = SCORED,
    *,
    after: dict[str, str] | None = None,
    live: bool = False,
    process: str | None = None,
) -> list[Step]:
    """Return a step for each reward, the checkpoint first, and a last step for their weighted sum.

    Args:
        inputs: inputs of the ensemble that every reward takes.
        after: additional inputs of the first step: outputs of an earlier step, for which it must wait.
        live: the checkpoint names its version.
        process: granularity of the checkpoint's process reward, which the sum passes on; None: it has none.
    """
    steps, sums = [], dict[str, str]()
    own_inputs, own_outputs = process_tensors(process)
    for name in sorted(rewards, key=lambda name: name != MODEL_TERM):
        component, error = f"component_{name}", f"error_{name}"
        outputs = {contract.REWARD_COMPONENT: component, contract.REWARD_ERROR: error}
        if name == MODEL_TERM:
            outputs = {contract.REWARDS: component}
        further, passed_on = ((), ()) if name != MODEL_TERM else (own_inputs, (*_version(live), *own_outputs))
        taken = _same(*inputs, *further) | (after or {})
        steps.append(Step(model_of(name), taken, outputs | _same(*passed_on)))
        after = {contract.AFTER_COMPONENT: component}
        sums |= _same(*outputs.values())
    mixed = _same(contract.REWARDS, contract.REWARD_COMPONENTS, contract.REWARD_ERRORS)
    return [*steps, Step(contract.REWARD_MIXTURE, sums, mixed)]


def model_of(name: str) -> str:
    """Return the name of the model that computes the reward called `name`."""
    return contract.REWARD_CHECKPOINT if name == MODEL_TERM else contract.REWARD_FUNCTION_PREFIX + name


def _version(live: bool) -> tuple[str, ...]:
    return (contract.REWARD_VERSION,) if live else ()


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}
