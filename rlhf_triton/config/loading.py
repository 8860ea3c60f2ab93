"""Reads a YAML file, applies overrides and validates the result."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_triton.config.deterministic import with_fixed_values
from rlhf_triton.config.keys import with_value
from rlhf_triton.config.run_config import ConfigError, RunConfig, UserKeys
from rlhf_triton.config.validation_errors import problems_of
from rlhf_triton.config.yaml_file import read_yaml
from rlhf_triton.errors import reason_of


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply `section.key=value` overrides (values are YAML) and validate.

    Raises:
        ConfigError: the message has one line per problem, with the file or override, the key, the value and, for an
            unknown key, the nearest valid key.
    """
    path = Path(path)
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {reason_of(error)}") from error
    data = {} if data is None else data  # an empty file: all defaults
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must contain sections ({', '.join(RunConfig.model_fields)}), not a {type(data).__name__}"
        )
    return parse_config(data, path, overrides)


def parse_config(data: Mapping[str, Any], source: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Apply overrides to the sections `data` and validate them; `source` names them in messages.

    Raises:
        ConfigError: as `load_config`.
    """
    data = with_overrides(data, overrides)
    try:
        config = RunConfig.model_validate(data)
        config._written = UserKeys(frozenset(_leaves(data)))
        config = _with_reference(config)
        _check_reward_model(config)
        return with_fixed_values(config) if config.run.deterministic else config
    except ValidationError as error:
        problems = [*problems_of(error.errors())]
    except ValueError as error:
        problems = [("", str(error))]
    raise ConfigError("\n".join(f"{_source(source, overrides, *problem)}: {problem[1]}" for problem in problems))


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested dictionaries, except keys with an empty value, 0, false or `auto`."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value and value != "auto":
            yield f"{prefix}{key}"


def _check_reward_model(config: RunConfig) -> None:
    """Raise ValueError if `reward.model` is set, but the reward model does not count as a reward."""
    if config.uses_reward_model or "reward.model" not in config.written:
        return
    why = (
        "`rewards` lists the terms that count"
        if config.rewards
        else "with an environment, only its own rewards and the terms in `rewards` count"
    )
    raise ValueError(
        f"reward.model ({config.reward.model}) has no effect: {why}, and `rewards` has no term `model`; add "
        "rewards.model: {weight: 1.0}, or remove reward.model"
    )


def _with_reference(config: RunConfig) -> RunConfig:
    """Return `config` with the policy's model and dtype as the reference's defaults.

    Raises ValueError if the reference is served and its dtype differs from the policy's.
    """
    fields_set = config.reference.model_fields_set
    actor = config.actor
    defaults = {"model": actor.policy.model, "dtype": actor.policy.precision}
    update = {name: value for name, value in defaults.items() if name not in fields_set}
    reference = config.reference.model_copy(update=update)
    if actor.kl.serves_reference and reference.dtype != actor.policy.precision:
        raise ValueError(
            f"reference.dtype ({reference.dtype}) differs from actor.policy.precision ({actor.policy.precision}), so "
            "the KL would not start at 0; remove reference.dtype"
        )
    return config.model_copy(update={"reference": reference})


def with_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return the sections `data` with the values of the overrides. Raises ConfigError if one is malformed."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} must have the form section.key=value, for example actor.steps=3")
        try:
            value = read_yaml(text)
        except ValueError as error:
            raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
        try:
            data = with_value(data, key, value)
        except ValueError as error:
            raise ConfigError(f"override {override!r}: {error}") from error
    return data


def _source(path: Path | str, overrides: Sequence[str], location: str, text: str) -> str:
    """Return the source of a problem: the file, overrides, or, for a problem between keys, both."""
    keys = {override: override.partition("=")[0] for override in overrides}
    if location:
        wrong = [o for o, key in keys.items() if f"{location}.".startswith(f"{key}.") or key.startswith(f"{location}.")]
    else:  # constraints between keys have no location; their text names the keys
        wrong = [o for o, key in keys.items() if re.search(rf"{re.escape(key)}(?![\w.]\w)", text)]
    named = ", ".join(f"override {override!r}" for override in wrong)
    if named and not location:  # the other keys may come from the file
        return f"{path} with {named}"
    return named or str(path)
