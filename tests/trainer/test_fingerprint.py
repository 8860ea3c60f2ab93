"""`trainer.fingerprint`: each trainer setting either decides the weights or is known not to."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest

from python_backend.config import OptimizerSection, TrainerSection
from tests.support.settings import changed, trainer_section
from trainer.fingerprint import DECIDING, ROUNDING, UNLESS_DEFAULT, changes, deciding, deciding_settings, fingerprint

WITHOUT_EFFECT = {
    "checkpoint_every",
    "keep_checkpoints",
    "keep_entries",
    "keep_set_aside",
    "reload_on_save",
    "serve_timeout_s",
    "heartbeat_timeout_s",
    "publish",
    "servers",
    "nice",
}
OTHER_VALUES: dict[str, Any] = {
    "optimizer.betas": (0.5, 0.6),
    "device": "cuda",
    "optimizer.lr": 0.5,
    "optimizer.grad_clip": 2.0,
    "optimizer.kind": "adamw_8bit",
    "precision": "bfloat16",
    "lora_targets": ["q_proj"],
    "attention": "eager",
    "gradient_checkpointing": True,
}


def test_no_setting_is_forgotten():
    """A new setting must be put on one of the lists."""
    names = {*TrainerSection.model_fields, *(f"optimizer.{name}" for name in OptimizerSection.model_fields)}
    assert {*DECIDING, *ROUNDING} | WITHOUT_EFFECT == names - {"optimizer"}
    assert not {*DECIDING, *ROUNDING} & WITHOUT_EFFECT


@pytest.mark.parametrize("name", [*DECIDING, *ROUNDING])
def test_each_change_is_seen_and_named(name: str):
    old = trainer_section(device="cpu", precision="float32")
    value = OTHER_VALUES[name] if name in OTHER_VALUES else operator.attrgetter(name)(old) + 1
    new = changed(old, **{name.replace(".", "_"): value})
    before, after = deciding_settings(old), deciding_settings(new)
    assert fingerprint(before) != fingerprint(after)
    (line,) = changes(before, after)
    assert line.startswith(f"trainer.{name}: was {deciding(before, name)}, now {deciding(after, name)}")
    assert line.endswith("(rounding only)") == (name in ROUNDING)


def test_newer_settings_are_recorded_only_if_they_are_used():
    """A checkpoint of an earlier release has none of them, and was trained with their defaults."""
    flat = deciding_settings(trainer_section(device="cpu", precision="float32"))
    assert not set(flat) & set(UNLESS_DEFAULT)
    for name, default in UNLESS_DEFAULT.items():
        assert operator.attrgetter(name)(trainer_section(device="cpu", precision="float32")) == default


def test_what_was_read_back_is_the_same():
    settings = deciding_settings(trainer_section())
    again = json.loads(json.dumps(settings))
    assert fingerprint(again) == fingerprint(settings)
    assert changes(again, settings) == []
    assert fingerprint(deciding_settings(trainer_section(keep_checkpoints=9))) == fingerprint(settings)
