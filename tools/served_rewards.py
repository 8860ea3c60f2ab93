"""The rewards that a repository serves: the parameters that declare them, and the steps of the ensembles.

The ensembles are `critic_infer` and, if the YAML has `rewards`, `reward_model`. Each step takes an output of the step
before it, so that Triton runs them in sequence: tritonserver 2.51 can crash when two steps of one request fail at the
same time.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rlhf_triton.config.rewards import MODEL_TERM, client_parameters
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.wire import contract

SCORED = (contract.TOKENS, contract.SEQUENCE_LENGTHS, contract.SENTENCES, contract.METADATA)


def reward_parameters(config: RunConfig) -> dict[str, str | None]:
    """Return the parameters of reward_model that say which rewards it serves; None: it has no such parameter."""
    terms = config.rewards or {}
    return {
        contract.REWARD_COMPONENTS: json.dumps(list(terms)) if terms else None,
        contract.REWARD_WEIGHTS: json.dumps([term.weight for term in terms.values()]) if terms else None,
        "text": config.reward.text,
        contract.GROUPWISE: "true" if any(term.groupwise for term in config.functions.values()) else None,
        **(client_parameters(config.reward) if config.uses_reward_model else {}),
    }


def process_of(config: RunConfig) -> str | None:
    """Return the granularity of the served process reward, or None."""
    section = config.reward.process
    return section.granularity if section is not None and config.uses_reward_model else None


@dataclass(frozen=True)
class Step:
    """A step of an ensemble: a model, and its tensors as {name in the model: name in the ensemble}."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def critic_infer_steps(rewards: Collection[str] | None, traits: Collection[str] = ()) -> list[Step]:
    """Return the ensemble's steps of `critic_infer`: the critic, then `reward_model` or the models of `rewards`.

    Args:
        rewards: None if no rewards are served; the critic is the only step then.
        traits: of the reward model; see `reward_traits`.
    """
    critic = Step(
        contract.CRITIC, _identity_map(*SCORED, contract.PROMPT_LENGTHS), _identity_map(*_output_names(contract.CRITIC))
    )
    if rewards is None:
        return [critic]
    critic.outputs[contract.AFTER_CRITIC] = contract.AFTER_CRITIC
    if rewards:
        return [critic, *mixture_steps(rewards, traits, after=_identity_map(contract.AFTER_CRITIC))]
    inputs = _identity_map(*SCORED, *_more_inputs(traits), contract.AFTER_CRITIC)
    return [critic, Step(contract.REWARD_MODEL, inputs, _identity_map(*_output_names("reward", traits=traits)))]


def mixture_steps(
    rewards: Iterable[str],
    traits: Collection[str],
    inputs: Sequence[str] = SCORED,
    *,
    after: dict[str, str] | None = None,
) -> list[Step]:
    """Return a step for each reward, the checkpoint first, and a last step for their weighted sum.

    Args:
        traits: of the checkpoint's reward, whose outputs are passed on; see `reward_traits`.
        inputs: inputs of the ensemble that every reward takes.
        after: additional inputs of the first step: outputs of an earlier step, which make it wait for that step.
    """
    steps = []
    sums = dict[str, str]()
    for name in sorted(rewards, key=lambda name: name != MODEL_TERM):
        component = f"component_{name}"
        error = f"error_{name}"
        own = {contract.REWARD_COMPONENT: component, contract.REWARD_ERROR: error}
        input_map = _identity_map(*inputs)
        output_map = own
        if name == MODEL_TERM:
            own = {contract.REWARDS: component}
            input_map |= _identity_map(*_more_inputs(traits))
            output_map = _identity_map(*_output_names("reward", traits=traits)) | own
        steps.append(Step(model_of(name), input_map | (after or {}), output_map))
        after = {contract.AFTER_COMPONENT: component}
        sums |= _identity_map(*own.values())
    return [*steps, Step(contract.REWARD_MIXTURE, sums, _identity_map(*_output_names("mixture")))]


def reward_traits(config: RunConfig, *, is_stored: bool) -> tuple[str, ...]:
    """Return the traits of the reward model on which its outputs depend."""
    kind = contract.WHOLE if process_of(config) is None else contract.PROCESS
    return (kind, contract.STORED) if is_stored else (kind,)


def ensemble_outputs(*models: str, traits: Collection[str]) -> list[contract.Output]:
    """Return the outputs of an ensemble of these kinds of models."""
    declared = contract.outputs_of(*models, traits=traits)
    return [output for output in declared if not output.is_optional and output.name != contract.AFTER_CRITIC]


def _output_names(model: str, traits: Collection[str] = ()) -> list[str]:
    return [output.name for output in ensemble_outputs(model, traits=traits)]


def _more_inputs(traits: Collection[str]) -> tuple[str, ...]:
    return (contract.PROMPT_LENGTHS,) if contract.PROCESS in traits else ()


def model_of(name: str) -> str:
    """Return the name of the model that computes the reward called `name`."""
    return contract.REWARD_CHECKPOINT if name == MODEL_TERM else contract.REWARD_FUNCTION_PREFIX + name


def _identity_map(*names: str) -> dict[str, str]:
    return {name: name for name in names}
