"""Compares the settings of a run that resumes with those that it was trained with, and records what changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import fingerprint_weights
from python_backend.config import ConfigError, RunConfig
from python_backend.config.sections import ModelSection
from python_backend.rewards.function import FILE_SPEC
from python_backend.store.durable import numbers_in, read_json, write_json
from python_backend.store.jsonl import append_jsonl
from tools.report.data import CHANGES_FILE, SETTINGS_FILE, flat_settings, read_settings

CONTENTS_FILE = "contents.json"  # {setting: hash of the file or folder that it names}
GUARDED = ("reward", "actor.algorithm.", "actor.rewards.", "actor.policy.checkpoint", "actor.policy.lora_")
# Settings of a guarded section that change how fast a reward is computed, or which one later, but not its value.
MECHANICS = set(ModelSection.model_fields) - {"checkpoint", "dtype", "max_length"}
MECHANICS |= {"timeout_s", "workers", "memory_mib", "store", "reload"}
OPERATION = ("run.", "server.", "monitoring.", "gateway.", "actor.steps", "actor.max_minutes", "actor.client.")


def check_changes(config: RunConfig, *, accepted: bool) -> list[str]:
    """Record what changed since the earlier start in changes.jsonl; return it as one line per setting.

    A run without a checkpoint has no earlier start. Settings of its operation, such as ports, are not compared.

    Args:
        accepted: whether reward, algorithm and policy may change.

    Raises:
        ConfigError: one of these changed, and this was not accepted; nothing is recorded.
    """
    folder, now = config.run.dir, flat_settings(config)
    step = max(numbers_in(folder / "checkpoints" / "actor"), default=0)
    before = read_settings(folder / SETTINGS_FILE) if step else {}
    if not before:
        return []
    contents, known = contents_of(config), read_json(folder / CONTENTS_FILE) or {}
    changed: dict[str, Any] = {
        key: [before.get(key), now.get(key)]
        for key in {**before, **now}
        if _differs(key, before.get(key), now.get(key))
    }
    changed |= {key: ["", "its content"] for key in contents if key in known and known[key] != contents[key]}
    lines = [
        f"{key}: {was} -> {new}" if was != "" else f"{key}: the file's content" for key, (was, new) in changed.items()
    ]
    guarded = [line for key, line in zip(changed, lines, strict=True) if _is_guarded(key)]
    if guarded and not accepted:
        raise ConfigError(
            f"{folder} would resume after step {step} with other settings than it was trained with:\n  "
            + "\n  ".join(guarded)
            + "\npass --accept-changes to go on with these, --fresh to start over, or set them back"
        )
    if changed:
        append_jsonl(folder / CHANGES_FILE, [{"step": step, "changed": changed}])
    return lines


def write_settings(config: RunConfig) -> None:
    """Write the settings of a run, and hashes of the reward that they name, into its folder."""
    write_json(config.run.dir / SETTINGS_FILE, config.model_dump(mode="json"), durable=False)
    write_json(config.run.dir / CONTENTS_FILE, contents_of(config), durable=False)


def contents_of(config: RunConfig) -> dict[str, str]:
    """Return a hash of each file of reward functions and of the reward model, by setting."""
    specs = {f"rewards.{name}.function": FILE_SPEC.fullmatch(str(t.function)) for name, t in config.functions.items()}
    files = {key: Path(found["file"]) for key, found in specs.items() if found}
    contents = {key: hashlib.sha256(file.read_bytes()).hexdigest() for key, file in files.items()}
    if config.uses_reward_model:
        contents["reward.checkpoint"] = fingerprint_weights(config.reward.checkpoint)
    return contents


def _differs(key: str, was: Any, new: Any) -> bool:
    return was != new and new != "auto" and not key.startswith(OPERATION)


def _is_guarded(key: str) -> bool:
    return key.startswith(GUARDED) and key.rpartition(".")[2] not in MECHANICS
