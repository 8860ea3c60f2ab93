"""The settings that decide the weights which a journal leads to, and how two sets of them differ.

What a checkpoint was trained under is compared with what it is resumed under. All settings of the update count.
`token_budget`, `threads` and `device` too, though they change no more than rounding: replayed steps then give other
last bits than the versions that were served. When versions and checkpoints are written, and how many are kept, does not
count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from python_backend.config import TrainerSection

DECIDING = (
    "lr", "min_lr", "warmup_steps", "constant_steps", "max_steps", "betas", "weight_decay", "grad_clip", "clip_value",
    "global_batch_size", "epochs",
)  # fmt: skip
ROUNDING = ("token_budget", "threads", "device")


def deciding_settings(section: TrainerSection) -> dict[str, Any]:
    """The settings that count, by name, as JSON has them."""
    return section.model_dump(mode="json", include={*DECIDING, *ROUNDING})


def fingerprint(settings: Mapping[str, Any]) -> str:
    """sha256 over settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`trainer.lr: was 0.1, now 0.2` for each setting that differs."""
    names = [name for name in (*DECIDING, *ROUNDING) if old.get(name) != new.get(name)]
    return [
        f"trainer.{name}: was {old.get(name)}, now {new.get(name)}{' (rounding only)' if name in ROUNDING else ''}"
        for name in names
    ]
