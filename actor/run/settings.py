"""The settings that a run was started with: written into its folder, and compared when the run resumes."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_model, is_same_model
from rlhf_triton.config.rewards import read_template
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import ModelSection
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import numbers_in, read_json, write_json
from rlhf_triton.store.jsonl import append_jsonl
from rlhf_triton.user_code import source_digest

SETTINGS_FILE = "settings.json"
CHANGES_FILE = "changes.jsonl"  # a line for each resume with other settings: {"step": …, "changed": {key: [old, new]}}
CONTENTS_FILE = "contents.json"  # {setting: hash of the file or folder that it names}
GUARDED = (
    "reward",
    "environment.",
    "actor.algorithm.",
    "actor.rewards.",
    "actor.policy.model",
    "actor.policy.lora_",
    "actor.policy.freeze",
)
# Settings of a guarded section that change how fast a reward is computed, or which one later, but not its value.
MECHANICS = {*ModelSection.model_fields, "timeout_s", "workers", "store", "max_failed_fraction"}
MECHANICS -= {"model", "dtype", "max_length"}
REWARDING = ("reward", "environment.")  # prefixes of guarded settings that decide the value of a reward
PROCESSES = ("run.", "server.", "monitoring.", "gateway.")
OPENENV = "rlhf_triton.actor.environments.openenv:OpenEnv"
OPERATION = (*PROCESSES, "actor.generation.vllm.servers", "actor.steps", "actor.max_minutes", "actor.client.")
RESULTS = ("run.seed", "run.deterministic")  # settings of the processes that change what the run computes
FIXED_KEYS = ("critic.model", "critic.standardization")
DAMAGED_FILE = "{} is damaged: {}; delete it to go on without the settings of the earlier start"
CONTENT = "its content"  # in the place of a value, where the file that a setting names has changed


def find_changes(config: RunConfig, *, accepted: bool) -> dict[str, list[Any]]:
    """Return what changed since the earlier start of a run that resumes, as {`section.key`: [old, new]}.

    A run without a checkpoint has no earlier start. Settings of its operation, such as ports, are not compared, nor is
    `actor.steps`, unless the learning rate falls over these steps. A setting in whose place the run's own state is
    resumed is marked as without effect.

    Args:
        accepted: whether reward, environment, algorithm and policy may change.

    Raises:
        ConfigError: one of these changed, and this was not accepted; or the settings of the earlier start are damaged.
    """
    folder = config.run.dir
    now = flat_settings(config)
    step = last_step(folder)
    earlier = started_with(folder) if step else None
    if earlier is None:
        return {}
    try:
        earlier_contents = read_json(folder / CONTENTS_FILE) or {}
    except ValueError as error:
        raise ConfigError(DAMAGED_FILE.format(folder / CONTENTS_FILE, error)) from error
    before = flat_settings(earlier)
    changed = {
        key: [before.get(key), now.get(key)]
        for key in {**before, **now}
        if _from_here(before.get(key)) != _from_here(now.get(key))
        and (key in RESULTS or not _is_operation(key, config))
    }
    has_critic = (config.run.weights_dir / "CURRENT").exists()  # its version 0 has been written
    fixed = (*(FIXED_KEYS if has_critic else ()), *adapted_keys(earlier, config))
    changed = {f"{key} (without effect)" if key.startswith(fixed) else key: values for key, values in changed.items()}
    optimizer = config.actor.optimizer
    was = earlier.actor.steps
    new = config.actor.steps
    if optimizer.min_lr not in (None, optimizer.lr) and was != new:
        changed["actor.steps"] = [was, new]
    contents = read_contents(config)
    differing = [
        key for key in contents if key in earlier_contents and not is_same_model(earlier_contents[key], contents[key])
    ]
    changed |= {key: ["", CONTENT] for key in differing if key not in changed}  # else its path has changed
    guarded = describe_changes({key: values for key, values in changed.items() if _is_guarded(key)})
    if guarded and not accepted:
        raise ConfigError(
            f"{folder} would resume after step {step} with other settings than it was trained with:\n  "
            + "\n  ".join(guarded)
            + "\npass --accept-changes to go on with these, or set them back; `rlhf-triton run --fresh` starts over"
        )
    return changed


def adapted_keys(earlier: RunConfig, now: RunConfig) -> tuple[str, ...]:
    """Return the settings in whose place a checkpoint of `earlier` has an adapted value, which `now` resumes."""
    return () if None in (earlier.actor.kl.target, now.actor.kl.target) else ("actor.kl.coef",)


def describe_changes(changed: Mapping[str, list[Any]]) -> list[str]:
    """Return one line per setting that changed."""
    return [
        f"{key}: the file's content" if new == CONTENT else f"{key}: {was} -> {new}"
        for key, (was, new) in changed.items()
    ]


def write_settings(config: RunConfig, changed: Mapping[str, list[Any]]) -> None:
    """Write the settings of a run, and hashes of the files that they name, into its folder; record what changed."""
    folder = config.run.dir
    if changed:
        append_jsonl(folder / CHANGES_FILE, [{"step": last_step(folder), "changed": changed}])
    write_json(folder / SETTINGS_FILE, config.model_dump(mode="json"), durable=False)
    write_json(folder / CONTENTS_FILE, read_contents(config), durable=False)


def read_contents(config: RunConfig) -> dict[str, str]:
    """Return a hash of each file of the user's functions and environment, of the reward model and template, by setting.

    What this machine does not have, because the server runs on another, is left out.
    """
    specs = {f"rewards.{name}.function": term.function for name, term in config.functions.items()}
    if (own := config.environment) is not None:
        specs |= {"environment.class": own.class_, "environment.agent": own.agent, "environment.reward": own.reward}
    contents: dict[str, str] = {}
    for key, spec in {**specs, **config.actor.algorithm.own_functions}.items():
        if spec and (digest := source_digest(spec)):
            contents[key] = digest
    if config.uses_reward_model:
        with contextlib.suppress(OSError, CheckpointError):
            contents["reward.model"] = fingerprint_model(config.reward.model)
        if config.reward.template is not None:
            with contextlib.suppress(ValueError):
                contents["reward.template"] = hashlib.sha256(read_template(config.reward.template).encode()).hexdigest()
    return contents


def reward_fingerprint(config: RunConfig) -> str:
    """Return a hash of the settings that decide a response's reward, and of the contents that `write_settings` found.

    Settings at their defaults are left out, so that a release that adds one has the same fingerprint.
    """
    used = flat_settings(config)
    given = flattened(config.model_dump(mode="json", exclude_defaults=True))
    settings = {key: given[key] for key in given if key in used and _is_guarded(key) and not _is_operation(key, config)}
    parts = (settings, read_json(config.run.dir / CONTENTS_FILE) or {})
    rewarding = [{key: part[key] for key in part if key.startswith(REWARDING)} for part in parts]
    return hashlib.sha256(json.dumps(rewarding, sort_keys=True).encode()).hexdigest()[:16]


def actor_checkpoints(run_dir: Path) -> Path:
    """Return the folder of the actor's checkpoints."""
    return run_dir / "checkpoints" / "actor"


def last_step(run_dir: Path) -> int:
    """Return the step of the actor's newest checkpoint; 0 if there is none."""
    return max(numbers_in(actor_checkpoints(run_dir)), default=0)


def started_with(run_dir: Path) -> RunConfig | None:
    """Return the settings that a run was started with; None before its start.

    Raises ConfigError if settings.json is damaged.
    """
    path = run_dir / SETTINGS_FILE
    try:
        sections = read_json(path)
        return None if sections is None else RunConfig.model_validate(sections)
    except (ValueError, RlhfError) as error:
        raise ConfigError(DAMAGED_FILE.format(path, reason_of(error))) from error


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as {`section.key`: value}, without the sections that the run does not use."""
    sections = config.model_dump(mode="json")
    used = {
        "reward": config.uses_reward_model,
        "critic": config.serves_critic,
        "trainer": config.serves_critic,
        "reference": config.actor.kl.uses_reference,
    }
    return flattened({name: section for name, section in sections.items() if used.get(name, True)})


def flattened(sections: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested objects as one flat object, with keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in sections.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _from_here(setting: Any) -> Any:
    """Return a setting with paths relative to the working directory if they are below it, however they were given."""
    if isinstance(setting, str):
        return setting.removeprefix(f"{Path.cwd()}/")
    return [_from_here(each) for each in setting] if isinstance(setting, list) else setting


def _is_guarded(key: str) -> bool:
    return key.startswith(GUARDED) and (
        ".options." in key or key == "environment.timeout_s" or key.rpartition(".")[2] not in MECHANICS
    )


def _is_operation(key: str, config: RunConfig) -> bool:
    """Return whether a setting says where and how the run's processes work, such as the address of an OpenEnv server.

    To a class of the user's own, an option of this name may mean anything.
    """
    own = config.environment
    is_address = key == "environment.options.url" and own is not None and own.class_ == OPENENV
    return is_address or key.startswith(OPERATION)
