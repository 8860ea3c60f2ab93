"""Renders the parts of a model repository that depend on its rewards: ensembles, components and parameters."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_weights
from rlhf_triton.config import ConfigError, RewardSection, RunConfig
from rlhf_triton.config.live_models import reward_is_live
from rlhf_triton.config.required_files import tokenizer_folder
from rlhf_triton.config.rewards import MODEL_TERM, RewardTerm, client_parameters, text_parameters
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.python_backend.serving.templates import RowTemplate
from rlhf_triton.rewards.function import with_absolute_path
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import (
    BANNED_TOKEN_IDS,
    CHECKPOINT_FINGERPRINT,
    GROUPWISE,
    REWARD_CHECKPOINT,
    REWARD_COMPONENTS,
    REWARD_MIXTURE,
    REWARD_MODEL,
    REWARD_WEIGHTS,
    STORE,
    TEMPERATURE,
    TEXT_PAIRS,
    outputs_of,
)


def process_of(config: RunConfig) -> str | None:
    """Return the granularity of the served process reward, or None."""
    section = config.reward.process
    return section.granularity if section is not None and config.uses_reward_model else None


def checked_parameters(reward: RewardSection) -> dict[str, str]:
    """Return `text_parameters`. Raises ConfigError if the template is not valid."""
    try:
        found = text_parameters(reward)
        if "template" in found:
            RowTemplate(found["template"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found


# The steps of the ensembles `critic_infer` and, if the YAML has `rewards`, `reward_model`.
#
# Each step takes an output of the step before it, so that Triton runs them in sequence: tritonserver 2.51 can crash
# when two steps of one request fail at the same time.


SCORED = (contract.TOKENS, contract.SEQUENCE_LENGTHS, contract.SENTENCES, contract.METADATA)


@dataclass(frozen=True)
class Step:
    """A step of an ensemble: a model, and its tensors as {name in the model: name in the ensemble}."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def critic_infer_steps(rewards: Collection[str] | None, traits: Collection[str] = ()) -> list[Step]:
    """Return the steps of `critic_infer`: the critic, then the reward model or the models of the named `rewards`.

    Args:
        rewards: None if no rewards are served; the critic is the only step then.
        traits: of the reward model; see `reward_traits`.
    """
    critic = Step(contract.CRITIC, _same(*SCORED, contract.PROMPT_LENGTHS), _same(*_passed_on(contract.CRITIC)))
    if rewards is None:
        return [critic]
    critic.outputs[contract.AFTER_CRITIC] = contract.AFTER_CRITIC
    if rewards:
        return [critic, *mixture_steps(rewards, traits, after=_same(contract.AFTER_CRITIC))]
    inputs = _same(*SCORED, *_more_inputs(traits), contract.AFTER_CRITIC)
    return [critic, Step(contract.REWARD_MODEL, inputs, _same(*_passed_on("reward", traits=traits)))]


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
        after: additional inputs of the first step: outputs of an earlier step, for which it must wait.
    """
    steps, sums = [], dict[str, str]()
    for name in sorted(rewards, key=lambda name: name != MODEL_TERM):
        component, error = f"component_{name}", f"error_{name}"
        own = {contract.REWARD_COMPONENT: component, contract.REWARD_ERROR: error}
        taken, given = _same(*inputs), own
        if name == MODEL_TERM:
            own = {contract.REWARDS: component}
            taken |= _same(*_more_inputs(traits))
            given = _same(*_passed_on("reward", traits=traits)) | own
        steps.append(Step(model_of(name), taken | (after or {}), given))
        after = {contract.AFTER_COMPONENT: component}
        sums |= _same(*own.values())
    return [*steps, Step(contract.REWARD_MIXTURE, sums, _same(*_passed_on("mixture")))]


def reward_traits(config: RunConfig, *, is_stored: bool) -> tuple[str, ...]:
    """Return the traits of the reward model on which its outputs depend."""
    kind = contract.WHOLE if process_of(config) is None else contract.PROCESS
    return (kind, contract.STORED) if is_stored else (kind,)


def ensemble_outputs(*models: str, traits: Collection[str]) -> list[contract.Output]:
    """Return the outputs of an ensemble of these kinds of models."""
    found = contract.outputs_of(*models, traits=traits)
    return [output for output in found if not output.is_optional and output.name != contract.AFTER_CRITIC]


def _passed_on(model: str, traits: Collection[str] = ()) -> list[str]:
    return [output.name for output in ensemble_outputs(model, traits=traits)]


def _more_inputs(traits: Collection[str]) -> tuple[str, ...]:
    return (contract.PROMPT_LENGTHS,) if contract.PROCESS in traits else ()


def model_of(name: str) -> str:
    """Return the name of the model that computes the reward called `name`."""
    return contract.REWARD_CHECKPOINT if name == MODEL_TERM else contract.REWARD_FUNCTION_PREFIX + name


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


# Renders the reward models of a YAML with `rewards`: components, their sum, and the ensemble `reward_model`.


MAX_WAITING_ROWS = 100_000  # backlog of a reward function; beyond it requests are refused, to bound the memory
Render = Callable[..., str]


def render_rewards(
    config: RunConfig,
    place: Callable[[Path], Path],
    *,
    render: Render,
    checkpoint: Callable[[str], str],
    meaning: Mapping[str, str],
    fingerprints: Callable[[Path], dict[str, str]],
) -> dict[str, str]:
    """Return `{model: config.pbtxt}` of the reward models of a configuration whose `rewards` are set.

    Args:
        place: converts a path to the form to write: absolute, or as in the YAML.
        render: renders the named template with the given values.
        checkpoint: returns the config.pbtxt that serves the model under the given name.
        meaning: parameters of that model which decide its scores.
        fingerprints: returns the parameters that tell the tokenizer in a checkpoint folder from others.
    """
    assert config.rewards
    tokenizer = tokenizer_folder(config)
    declared = {
        **{name: value for name, value in meaning.items() if name != contract.LABELS},  # of the model alone
        "functions_fingerprint": _functions_fingerprint(config),
        **{name: value for name, value in reward_parameters(config).items() if value is not None},
    }
    sums = {name: declared[name] for name in (REWARD_COMPONENTS, REWARD_WEIGHTS)}
    live = reward_is_live(config)
    traits = reward_traits(config, is_stored=live)
    whole = declared
    if tokenizer is not None:
        whole |= {"model": str(place(tokenizer)), **fingerprints(tokenizer)}
    if live:
        whole[STORE] = str(place(config.run.reward_weights_dir))
    texts = {}
    for name, term in config.functions.items():
        model, parameters = model_of(name), _function_parameters(term, config, place)
        texts[model] = render(
            "reward_function.pbtxt.j2",
            name=model,
            outputs=outputs_of("function"),
            parameters=parameters,
        )
    if MODEL_TERM in config.rewards:
        texts[REWARD_CHECKPOINT] = checkpoint(REWARD_CHECKPOINT)
    terms = [{"name": name, "function": name != MODEL_TERM} for name in config.rewards]
    texts[REWARD_MIXTURE] = render(
        "reward_mixture.pbtxt.j2",
        name=REWARD_MIXTURE,
        terms=terms,
        outputs=outputs_of("mixture"),
        num_components=len(terms),
        parameters=sums,
    )
    texts[REWARD_MODEL] = render(
        "ensemble.pbtxt.j2",
        name=REWARD_MODEL,
        purpose="The weighted sum of several rewards.",
        has_values=False,
        has_prompts=process_of(config) is not None,
        outputs=ensemble_outputs("reward", "mixture", traits=traits),
        num_components=len(config.rewards),
        parameters=whole,
        steps=mixture_steps(config.rewards, traits, (*SCORED, TEXT_PAIRS)),
    )
    return texts


def reward_parameters(config: RunConfig) -> dict[str, str | None]:
    """Return the parameters of reward_model that say which rewards it serves; None: it has no such parameter."""
    terms = config.rewards or {}
    return {
        REWARD_COMPONENTS: json.dumps(list(terms)) if terms else None,
        REWARD_WEIGHTS: json.dumps([term.weight for term in terms.values()]) if terms else None,
        "text": config.reward.text,
        GROUPWISE: "true" if any(term.groupwise for term in config.functions.values()) else None,
        **(client_parameters(config.reward) if config.uses_reward_model else {}),
    }


def _function_parameters(term: RewardTerm, config: RunConfig, place: Callable[[Path], Path]) -> dict[str, str]:
    tokenizer = tokenizer_folder(config)
    return {
        "function": with_absolute_path(str(term.function), place),
        **({"options": json.dumps(term.options)} if term.options else {}),
        **({GROUPWISE: "true"} if term.groupwise else {}),
        "hidden_variables": json.dumps(config.hidden_variables(term.options)),
        "timeout_s": f"{term.timeout_s:g}",
        "workers": str(term.workers),
        "memory_mib": str(term.memory_mib),
        "max_waiting_rows": str(MAX_WAITING_ROWS),
        **limit_parameters(config.server),
        **({} if tokenizer is None else {"tokenizer": str(place(tokenizer))}),
    }


def _functions_fingerprint(config: RunConfig) -> str:
    """Return a hash of the reward functions: their files' content, names and options."""
    digest = hashlib.sha256()
    for name, term in config.functions.items():
        file = Path(str(term.function).rpartition(":")[0])
        content = file.read_bytes() if file.is_file() else str(term.function).encode()
        digest.update(json.dumps([name, str(term.function).rpartition(":")[2], term.options]).encode() + content)
    return digest.hexdigest()


def limit_parameters(server: ServerSection) -> dict[str, str]:
    """Return the parameters that limit the size of a request."""
    return {
        "max_request_tokens": str(server.max_request_tokens),
        "max_request_bytes": str(server.max_request_bytes),
    }


# The reference model's own parameters in config.pbtxt, which the actor compares with its settings when it starts.


def reference_parameters(config: RunConfig) -> dict[str, str]:
    """Return temperature and banned token ids of the actor's sampling, and the fingerprint of the reference's weights.

    If a checkpoint does not exist yet, its parameter is empty, with which the model refuses to load.

    Raises:
        ConfigError: a checkpoint exists but cannot be read, or has no end-of-sequence token.
    """
    return {
        TEMPERATURE: repr(config.actor.generation.temperature),
        BANNED_TOKEN_IDS: _banned_token_ids(config.actor.policy.model),
        CHECKPOINT_FINGERPRINT: weights_fingerprint("reference", config.reference.model),
    }


def _banned_token_ids(policy: Path) -> str:
    if not (policy / "config.json").is_file():
        return ""
    from rlhf_triton.checkpoints.tokenization import special_tokens_in

    try:
        return contract.id_ranges(special_tokens_in(policy.absolute()).banned_ids)
    except ValueError as error:
        raise ConfigError(f"actor.policy.model: {error}") from error


def weights_fingerprint(section: str, folder: Path) -> str:
    """Return the fingerprint of the weights in `folder`, of `<section>.model`; "" if there are none yet."""
    if not (folder / "config.json").is_file():
        return ""
    try:
        return fingerprint_weights(folder)
    except CheckpointError as error:
        raise ConfigError(f"{section}.model: {error}") from error
