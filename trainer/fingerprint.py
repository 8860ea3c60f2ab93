"""Fingerprint of the settings that determine the weights which result from a journal, and changes of these settings.

The settings that a checkpoint was trained with are compared with those that it is resumed with. All settings of the
update are included; `token_budget`, `threads` and `device`, too, although they only change rounding, because replayed
steps would differ in the last bits from the versions that were served. The times at which versions and checkpoints are
written, and how many are kept, are not included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from python_backend.config import TrainerSection

DECIDING = (
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.warmup_steps",
    "optimizer.constant_steps",
    "optimizer.max_steps",
    "optimizer.betas",
    "optimizer.weight_decay",
    "optimizer.grad_clip",
    "clip_value",
    "global_batch_size",
    "epochs",
    "optimizer.kind",
    "precision",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
)
ROUNDING = ("token_budget", "threads", "device", "gradient_checkpointing", "attention", "ranks")
UNLESS_DEFAULT = {  # included only if they differ from these values, which older checkpoints were trained with
    "optimizer.kind": "adamw",
    "precision": "float32",
    "lora_rank": 0,
    "lora_alpha": 16,
    "lora_targets": "all-linear",
    "gradient_checkpointing": False,
    "attention": "auto",
    "ranks": 1,
}


def deciding_settings(section: TrainerSection) -> dict[str, Any]:
    """Return the settings that determine the weights, by name, as JSON values."""
    values = section.model_dump(mode="json")
    flat = {**values, **{f"optimizer.{name}": value for name, value in values["optimizer"].items()}}
    return {
        name: flat[name]
        for name in (*DECIDING, *ROUNDING)
        if name not in UNLESS_DEFAULT or flat[name] != UNLESS_DEFAULT[name]
    }


def deciding(settings: Mapping[str, Any], name: str) -> Any:
    """Return one of the settings that `deciding_settings` returned."""
    return settings.get(name, UNLESS_DEFAULT.get(name))


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return the sha256 of the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a text such as `trainer.optimizer.lr: was 0.1, now 0.2` for each setting that differs."""
    pairs = {name: (deciding(old, name), deciding(new, name)) for name in (*DECIDING, *ROUNDING)}
    return [
        f"trainer.{name}: was {before}, now {after}{' (rounding only)' if name in ROUNDING else ''}"
        for name, (before, after) in pairs.items()
        if before != after
    ]
