"""Renders the reward models of a YAML with `rewards`: components, their sum, and the ensemble `reward_model`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from python_backend.config import RunConfig
from python_backend.config.live_models import reward_is_live
from python_backend.config.required_files import tokenizer_folder
from python_backend.config.reward_terms import MODEL_TERM, RewardTerm
from python_backend.rewards.function import KEY_OPTION, with_absolute_path
from python_backend.store import control_key
from python_backend.wire.contract import (
    GROUPWISE,
    REWARD_CHECKPOINT,
    REWARD_COMPONENTS,
    REWARD_MIXTURE,
    REWARD_MODEL,
    REWARD_WEIGHTS,
    STORE,
    TEXT_PAIRS,
    outputs_of,
)
from tools.render.ensembles import SCORED, ensemble_outputs, mixture_steps, model_of, reward_traits
from tools.render.token_rewards import client_parameters, process_of

MAX_WAITING_ROWS = 100_000  # backlog of a reward function; beyond it requests are refused, to bound the memory
Render = Callable[..., str]


def render_rewards(
    config: RunConfig,
    place: Callable[[Path], Path],
    *,
    render: Render,
    checkpoint: Callable[[str], str],
    fingerprint: Callable[[Path], str],
) -> dict[str, str]:
    """Return `{model: config.pbtxt}` of the reward models of a configuration whose `rewards` are set.

    Args:
        place: converts a path to the form to write: absolute, or as in the YAML.
        render: renders the named template with the given values.
        checkpoint: returns the config.pbtxt that serves the reward checkpoint under the given name.
        fingerprint: returns the fingerprint of the tokenizer in a checkpoint folder.
    """
    assert config.rewards
    tokenizer = tokenizer_folder(config)
    declared = {name: value for name, value in reward_parameters(config).items() if value is not None}
    sums = {name: declared[name] for name in (REWARD_COMPONENTS, REWARD_WEIGHTS)}
    live = reward_is_live(config)
    traits = reward_traits(config, is_stored=live)
    whole = {
        **declared,
        "checkpoint": str(place(tokenizer)),
        "tokenizer_fingerprint": fingerprint(tokenizer),
    }
    if live:
        whole[STORE] = str(place(config.run.reward_weights_dir))
    batch = config.reward.max_batch_size
    texts = {}
    for name, term in config.functions.items():
        model, parameters = model_of(name), _function_parameters(term, config, place)
        texts[model] = render(
            "reward_function.pbtxt.j2",
            name=model,
            outputs=outputs_of("function"),
            max_batch_size=batch,
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
        max_batch_size=batch,
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
        max_batch_size=batch,
        parameters=whole,
        steps=mixture_steps(config.rewards, traits, (*SCORED, TEXT_PAIRS)),
    )
    return texts


def hidden_variables(term: RewardTerm, config: RunConfig) -> list[str]:
    """Return the environment variables with keys that are no business of this term: a judge sees only its own key."""
    judges = [each.options.get(KEY_OPTION) for each in config.functions.values()]
    keys = [
        control_key.VARIABLE,
        control_key.TRAINING_VARIABLE,
        config.server.training_key_env,
        config.gateway.key_env,
        *judges,
    ]
    return sorted({key for key in keys if isinstance(key, str)} - {term.options.get(KEY_OPTION)})


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
    return {
        "function": with_absolute_path(str(term.function), place),
        **({"options": json.dumps(term.options)} if term.options else {}),
        **({GROUPWISE: "true"} if term.groupwise else {}),
        "hidden_variables": json.dumps(hidden_variables(term, config)),
        "timeout_s": f"{term.timeout_s:g}",
        "workers": str(term.workers),
        "memory_mib": str(term.memory_mib),
        "max_waiting_rows": str(MAX_WAITING_ROWS),
        "max_sentence_bytes": str(config.reward.max_sentence_bytes),
        "max_request_tokens": str(config.reward.max_request_tokens),
        "max_request_bytes": str(config.reward.max_request_bytes),
        "tokenizer": str(place(tokenizer_folder(config))),
    }
