"""The YAML configuration as typed sections. Unknown keys are rejected; the command line can override values.

Each process uses `run` and its own section. Models inside tritonserver do not read the YAML: their settings are
rendered into config.pbtxt.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, PrivateAttr, ValidationError, model_validator

from rlhf_triton.config.actor import (
    ActorSection,
    AlgorithmSection,
    ClientSection,
    GenerationSection,
    KLSection,
    PolicySection,
    PromptFileSection,
    PromptsSection,
    RewardsSection,
    check_actor,
)
from rlhf_triton.config.algorithms import ALGORITHMS
from rlhf_triton.config.deterministic import with_fixed_values
from rlhf_triton.config.environment import EnvironmentSection, check_environment
from rlhf_triton.config.other_names import GENERIC, closest, has_keys, hint_at, hint_at_value, hint_near
from rlhf_triton.config.rewards import (
    MODEL_TERM,
    FunctionSpec,
    RewardTerm,
    Terms,
    check_components,
    check_terms,
    check_token_rewards,
    check_weights,
)
from rlhf_triton.config.sections import (
    CriticSection,
    GatewaySection,
    ModelSection,
    MonitoringSection,
    ReferenceSection,
    RewardSection,
    RunSection,
    Section,
    ServerSection,
    TrainerSection,
    check_ranks,
)
from rlhf_triton.config.training_checks import check_training
from rlhf_triton.config.yaml_file import read_yaml
from rlhf_triton.errors import RlhfError, reason_of, reason_of_item
from rlhf_triton.models.placement import Place, check_gpus, devices_of, ranks_here
from rlhf_triton.rewards.function import KEY_OPTION
from rlhf_triton.store import control_key

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "ClientSection",
    "ConfigError",
    "CriticSection",
    "EnvironmentSection",
    "GatewaySection",
    "GenerationSection",
    "KLSection",
    "ModelSection",
    "PolicySection",
    "PromptFileSection",
    "PromptsSection",
    "RewardSection",
    "RewardTerm",
    "RewardsSection",
    "RunConfig",
    "RunSection",
    "ServerSection",
    "TrainerSection",
    "load_config",
]


class ConfigError(RlhfError, ValueError):
    """The YAML or an override is invalid; the message names the key, the value and what to do."""


@dataclass(frozen=True)
class _UserKeys:
    """Keys that the user has set. They do not count when configurations are compared: only the values do."""

    keys: frozenset[str] = field(default=frozenset(), compare=False)


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = RunSection()
    """Settings shared by all processes."""
    server: ServerSection = ServerSection()
    """The tritonserver process. A port of 0 selects a free one (`rlhf-triton run`, `rlhf-triton serve`)."""
    reward: RewardSection = RewardSection()
    """The reward model; `model` is not needed if `rewards` contains only functions."""
    rewards: Terms | None = None
    """Terms of a weighted sum of rewards, by name; default: only the reward model, or, with an `environment`, only its
    own rewards."""
    critic: CriticSection = CriticSection()
    """The critic; needs a `model` if `actor.algorithm.name` is `ppo`, otherwise no critic is served. A YAML without
    `actor`, or with only `actor.client`, serves the models that it names for another trainer: `reward` or `rewards`,
    `critic`, or both."""
    reference: ReferenceSection = ReferenceSection()
    """The reference model, served if `actor.kl.reference` is `triton`."""
    trainer: TrainerSection = TrainerSection()
    """The critic sidecar."""
    actor: ActorSection = ActorSection()
    """The training loop of the policy."""
    environment: EnvironmentSection | None = None
    """The environment that answers an agent's turns; default: each response is one turn."""
    gateway: GatewaySection = GatewaySection()
    """The HTTP gateway for other trainers."""
    monitoring: MonitoringSection = MonitoringSection()
    """Prometheus metrics of actor and sidecar."""
    report: FunctionSpec | None = None
    """`path/to/file.py:name` or `package.module:name` of a function that adds sections to the run's report."""

    _roles: frozenset[str] = PrivateAttr(frozenset())  # models that a YAML without `actor` serves
    _written: _UserKeys = PrivateAttr(_UserKeys())

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Set keys without a value to the values that the algorithm was published with."""
        name = value_at(data, "actor.algorithm.name")
        if isinstance(name, str) and name in ALGORITHMS:
            for key, value in ALGORITHMS[name].recipe.items():
                section, _, last = key.rpartition(".")
                found = value_at(data, section)
                if found is None or (isinstance(found, dict) and last not in found):
                    data = with_value(data, key, value)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if "actor" not in self.model_fields_set or self.actor.model_fields_set == {"client"}:
            self._roles = frozenset({"reward", "rewards", "critic"} & self.model_fields_set)
        check_terms(self.rewards or {})
        check_weights(self.rewards, self.environment)
        slow = [name for name, term in self.functions.items() if term.timeout_s >= self.actor.client.deadline_s]
        if slow:
            raise ValueError(
                f"rewards.{slow[0]}.timeout_s ({self.functions[slow[0]].timeout_s:g}) must be below "
                f"actor.client.deadline_s ({self.actor.client.deadline_s:g}), or the actor times out first"
            )
        for key, section in (("reward", self.reward), ("critic", self.critic), ("reference", self.reference)):
            check_ranks(key, section)
        check_token_rewards(self.reward)
        algorithm = self.actor.algorithm
        if self.uses_reward_model and self.reward.process and not algorithm.defaults.takes_process_rewards:
            others = [name for name, other in ALGORITHMS.items() if other.takes_process_rewards]
            raise ValueError(
                f"actor.algorithm.name is {algorithm.name}, which has no published form for process rewards "
                f"(reward.process); choose {', '.join(others)}, or remove reward.process"
            )
        if algorithm.defaults.needs_components and algorithm.advantage == "auto":
            check_components(algorithm.name, self.rewards, self.environment)
        check_actor(self.actor)
        if self.environment is not None:
            check_environment(self.environment, self.actor)
            if self.run.deterministic and self.actor.generation.engine == "vllm":
                raise ValueError(
                    "run.deterministic: with an environment, vLLM's turns differ from run to run; set "
                    "actor.generation.engine: slots, or remove run.deterministic"
                )
        actor = self.actor
        trainer = self.trainer
        steps = actor.optimizer_steps
        check_training("actor.policy", actor.policy, actor.optimizer, ranks=actor.ranks, total_steps=steps)
        steps = trainer.optimizer.max_steps
        check_training("trainer", trainer, trainer.optimizer, ranks=trainer.ranks, total_steps=steps)
        if trainer.publish.format == "adapter" and not trainer.lora_rank:
            raise ValueError("trainer.publish.format: adapter needs trainer.lora_rank above 0; set it, or set merged")
        check_gpus(self.places)
        return self

    @property
    def written(self) -> frozenset[str]:
        """Keys (`section.key`) that the YAML or the command line sets, except to 0, false, null or `auto`."""
        return self._written.keys

    @property
    def longest_row(self) -> tuple[int, str]:
        """Maximum tokens of a row in this run, and a text that names the keys behind it."""
        if self.environment is None:
            return self.actor.longest_row
        most = self.environment.max_tokens
        return most, f"environment.max_tokens is {most}; lower it"

    @property
    def truncated(self) -> str:
        """`environment.truncated`; `score` without an environment, whose rows no other limit ends."""
        return "score" if self.environment is None else self.environment.truncated

    @property
    def published_choices(self) -> str:
        """The algorithm's settings as text for a log line, with the published values where they differ."""
        algorithm = self.actor.algorithm
        found = [f"actor.algorithm.loss {algorithm.loss_name} (clip {', '.join(f'{x:g}' for x in algorithm.clip)})"]
        for key, value in algorithm.defaults.recipe.items():
            chosen = functools.reduce(getattr, key.split("."), cast(Any, self))
            found.append(f"{key} {chosen}" if chosen == value else f"{key} {chosen} (published: {value})")
        return ", ".join(found)

    @property
    def server_dir(self) -> Path:
        """Folder of the server's own files."""
        return self.server.dir or self.run.dir

    @property
    def has_actor(self) -> bool:
        """Whether this project's actor trains; False if the YAML serves models for another trainer."""
        return not self._roles

    @property
    def functions(self) -> dict[str, RewardTerm]:
        """The reward terms that are Python functions, by name."""
        return {name: term for name, term in (self.rewards or {}).items() if name != MODEL_TERM}

    def hidden_variables(self, options: Mapping[str, Any]) -> list[str]:
        """Return the environment variables to hide from processes that run the user's code with these options.

        These are all keys of the run except the one that the options name.
        """
        keys = [
            control_key.VARIABLE,
            control_key.TRAINING_VARIABLE,
            self.server.training_key_env,
            self.gateway.key_env,
            *(each.options.get(KEY_OPTION) for each in self.functions.values()),
        ]
        return sorted({key for key in keys if isinstance(key, str)} - {options.get(KEY_OPTION)})

    @property
    def serves_critic(self) -> bool:
        """Whether the critic is served and trained: the algorithm uses it or, without an actor, the YAML has one."""
        return "critic" in self._roles if self._roles else self.actor.algorithm.uses_critic

    @property
    def serves_rewards(self) -> bool:
        """Whether rewards are served; False for a critic alone, and for an environment without `rewards`."""
        return self._roles != {"critic"} and (self.environment is None or self.rewards is not None)

    @property
    def needs_server(self) -> bool:
        """Whether any model is served; an environment's own rewards need no server."""
        return self.serves_rewards or self.serves_critic or self.actor.kl.serves_reference

    @property
    def uses_reward_model(self) -> bool:
        """Whether the reward model is served; False if `rewards` contains only functions."""
        return self.serves_rewards and (self.rewards is None or MODEL_TERM in self.rewards)

    @property
    def served_sections(self) -> dict[str, ModelSection]:
        """Sections of the models that tritonserver loads, by section name."""
        sections: dict[str, tuple[bool, ModelSection]] = {
            "reward": (self.uses_reward_model, self.reward),
            "critic": (self.serves_critic, self.critic),
            "reference": (self.actor.kl.serves_reference, self.reference),
        }
        return {name: section for name, (is_served, section) in sections.items() if is_served}

    @property
    def places(self) -> list[Place]:
        """The devices of every model, and of a vLLM server that `rlhf-triton run` starts on named GPUs.

        Server, trainer and actor are on one machine unless `actor.client.servers` names the servers.
        """
        vllm = self.actor.generation.vllm
        apart = bool(self.actor.client.servers)
        server, trainer, actor = ("server", "trainer", "actor") if apart else ("", "", "")
        found = [
            Place(
                f"{key}.device",
                devices_of(section.device, section.tensor_parallel),
                server,
                every=section.device == "cuda" and section.tensor_parallel == 1,
            )
            for key, section in self.served_sections.items()
        ]
        if self.serves_critic:
            ranks = ranks_here(self.trainer.ranks)
            found.append(Place("trainer.device", devices_of(self.trainer.device, ranks), trainer))
        if self.has_actor:
            ranks = ranks_here(self.actor.ranks)
            found.append(Place("actor.policy.device", devices_of(self.actor.policy.device, ranks), actor))
            if self.actor.generation.engine == "vllm" and not vllm.servers:
                named = (vllm.cuda_devices or "").split(",")
                gpus = tuple(f"cuda:{index.strip()}" for index in named if index.strip().isdigit())
                found.append(Place("actor.generation.vllm.cuda_devices", gpus, actor))
        return found

    @property
    def gpu_precisions(self) -> str:
        """Device and precision of every model on a GPU, as text for a log line; "" if all models are on the CPU."""
        used = {key: (section.device, section.dtype) for key, section in self.served_sections.items()}
        if self.serves_critic:
            used["trainer"] = (self.trainer.device, self.trainer.precision)
        if self.has_actor:
            used["actor.policy"] = (self.actor.policy.device, self.actor.policy.precision)
        return ", ".join(f"{key} {device} in {how}" for key, (device, how) in used.items() if device != "cpu")


def value_at(data: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dictionaries; None if there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def with_value(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return nested dictionaries with the value of a dotted key. Raises ValueError if a part of it is no section."""
    first, _, rest = key.partition(".")
    section = data.get(first)
    if rest and not isinstance(section, dict | None):
        raise ValueError(f"{first!r} is a value, not a section")
    return {**data, first: with_value(section or {}, rest, value) if rest else value}


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
        config._written = _UserKeys(frozenset(_leaves(data)))
        config = _with_reference(config)
        _check_reward_model(config)
        return with_fixed_values(config) if config.run.deterministic else config
    except ValidationError as error:
        problems = [*_problems(error.errors())]
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
    given = config.reference.model_fields_set
    actor = config.actor
    defaults = {"model": actor.policy.model, "dtype": actor.policy.precision}
    update = {name: value for name, value in defaults.items() if name not in given}
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


def _problems(errors: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield location and description of pydantic's errors; a union's errors, one per type, become one."""
    found: dict[str, list[Any]] = {}
    for item in errors:
        found.setdefault(_location(item), []).append(item)
    for location, items in found.items():
        if any(other.startswith(f"{location}.") for other in found):  # reported there, more precisely
            continue
        if len(items) == 1:
            yield from _describe(items[0], location)
        else:
            wanted = " or ".join(map(_expected_type, items))
            yield location, f"{location} must be {wanted}{_boolean_hint(items[0])} (got {items[0]['input']!r})"


def _location(item: Any) -> str:
    """Return the key of a pydantic error, without the names of union members that pydantic adds."""
    *parents, last = [part for part in item["loc"] if part != "[key]"] or [""]
    is_name = item["type"] in ("extra_forbidden", "missing")
    parts = [part for part in parents if not _TYPE.fullmatch(str(part))]
    return ".".join(map(str, [*parts, *([last] if is_name or not _TYPE.fullmatch(str(last)) else [])]))


_TYPE = re.compile(r"[A-Z]\w*|.*[\[-].*|int|float|str|bool")  # matches type names in a location, but no key


def _expected_type(item: Any) -> str:
    if item["type"] == "model_type":
        return f"a section with keys of {', '.join(_keys_in(_location(item), keys_of(RunConfig, '')))}"
    if item["type"] in ("tuple_type", "list_type"):
        return "a list"
    return reason_of_item(item).removeprefix("must be ").partition(", unable")[0]


def _boolean_hint(item: Any) -> str:
    is_text = isinstance(item["input"], bool) and item["type"] in ("string_type", "literal_error")
    return "; YAML reads yes, no, on and off as true and false, so put such a text in quotes" if is_text else ""


def _describe(item: Any, location: str) -> Iterator[tuple[str, str]]:
    """Yield location and description of a pydantic error; of a section of another trainer, one for each key."""
    valid = [*keys_of(RunConfig, ""), *_term_keys(item["loc"])]
    if item["type"] in ("extra_forbidden", "path_type"):
        paths = [*_unknown_paths(location, item["input"], valid)]
        if item["type"] == "extra_forbidden" or paths != [location]:
            yield from ((path, _unknown(path, valid)) for path in paths)
            return
    yield location, _invalid(item, location, valid)


def _unknown_paths(path: str, value: Any, valid: list[str]) -> Iterator[str]:
    if isinstance(value, dict) and value and has_keys(path, valid):
        for name, inner in value.items():
            yield from _unknown_paths(f"{path}.{name}", inner, valid)
    else:
        yield path


def _invalid(item: Any, location: str, valid: list[str]) -> str:
    if item["type"] == "model_type":
        hint = hint_at_value(location, item["input"], _keys_in(location, valid))
        return f"{location} is a section, not a value (got {item['input']!r}); {hint}"
    if item["type"] == "dict_type" and location == "rewards":
        return (
            f"rewards names its terms (got {item['input']!r}): rewards: {{my_reward: {{function: FILE.py:NAME}}}}; a "
            "model is reward.model"
        )
    if item["type"] == "missing":
        return f"{location} is missing; set it"
    if item["type"] in ("tuple_type", "list_type"):
        return f"{location} must be a list (got {item['input']!r})"
    reason = reason_of_item(item) + _boolean_hint(item)
    return f"{location}: {reason} (got {item['input']!r})" if location else reason


def _unknown(location: str, valid: list[str]) -> str:
    path = re.sub(r"\.\d+", "", location)
    section, _, name = path.rpartition(".")
    known = _keys_in(section, valid)
    hint = hint_at(path, valid)
    if hint is None and name not in GENERIC:
        near = closest(name, known)
        ours = known[near] if near else _elsewhere(path, valid)
        hint = f"did you mean {ours}?" if ours else hint_near(path)
    return f"unknown key {location}; {hint or 'known: ' + ', '.join(known.values())}"


def _elsewhere(path: str, valid: list[str]) -> str | None:
    """Return our key of this name in another section; None if there is none."""
    section, _, name = path.rpartition(".")
    root = section.partition(".")[0] or "actor"
    same = [key for key in valid if f".{key}".endswith(f".{name}")]
    inside = [key for key in same if key.startswith(section)]
    if not inside and "_" not in name and len(name) < 6:  # such as `coef` or `every`, which says little
        return None
    return min(inside or same, key=lambda key: not key.startswith(f"{root}."), default=None)


def _term_keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the valid keys of the reward term at `location`, [] elsewhere: `keys_of` does not know terms' names."""
    if len(location) < 2 or location[0] != "rewards":
        return []
    return [f"rewards.{location[1]}.{key}" for key in RewardTerm.model_fields]


def keys_of(section: type[BaseModel], prefix: str) -> list[str]:
    """Return the names of a section's keys and subsections, recursively, each with `prefix`."""
    keys = []
    for attribute, info in section.model_fields.items():
        name = info.alias or attribute
        keys.append(prefix + name)
        for part in (info.annotation, *get_args(info.annotation)):  # union members, as in `Section | None`
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys += keys_of(part, f"{prefix}{name}.")
    return keys


def _keys_in(section: str, valid: list[str]) -> dict[str, str]:
    """Return the names and full keys of a section's keys and subsections; list entries have no number in `valid`."""
    prefix = re.sub(r"\.\d+\.", ".", f"{section}.") if section else ""
    keys = [key for key in valid if key.startswith(prefix)]
    return {key.removeprefix(prefix): key for key in keys if "." not in key.removeprefix(prefix)}
