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
    "optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.constant_steps", "optimizer.max_steps",
    "optimizer.betas", "optimizer.weight_decay", "optimizer.grad_clip", "clip_value", "global_batch_size", "epochs",
)  # fmt: skip
ROUNDING = ("token_budget", "threads", "device")


def deciding_settings(section: TrainerSection) -> dict[str, Any]:
    """Return the settings that determine the weights, by name, as JSON values."""
    values = section.model_dump(mode="json")
    flat = {**values, **{f"optimizer.{name}": value for name, value in values["optimizer"].items()}}
    return {name: flat[name] for name in (*DECIDING, *ROUNDING)}


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return the sha256 of the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a text such as `trainer.optimizer.lr: was 0.1, now 0.2` for each setting that differs."""
    names = [name for name in (*DECIDING, *ROUNDING) if old.get(name) != new.get(name)]
    return [
        f"trainer.{name}: was {old.get(name)}, now {new.get(name)}{' (rounding only)' if name in ROUNDING else ''}"
        for name in names
    ]
