"""The sidecar with LoRA in bfloat16: killed, stopped and rewound, it serves the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sidecar_rig import Killed, Rig, kill_at

from python_backend.models.modeling import load_critic
from python_backend.store.journal import Journal
from python_backend.store.weights import WeightsStore
from trainer.checkpoint import CheckpointFolder
from trainer.publish import Publisher

pytest_plugins = ["sidecar_fixtures"]
SETTINGS: dict[str, Any] = {"lora_rank": 2, "precision": "bfloat16", "gradient_checkpointing": True}
FORMATS = ["merged", "adapter"]
KILLS = [
    (WeightsStore, "add", "after"),
    (Publisher, "verify", "after"),
    (WeightsStore, "set_current", "after"),
    (Journal, "finish", "before"),
    (CheckpointFolder, "save", "after"),
]


def lora_rig(make: Callable[..., Rig], name: str, **settings: Any) -> Rig:
    rig = make(name, **{**SETTINGS, **settings})
    rig.serve()
    return rig.start()


@pytest.fixture
def calm(make: Callable[..., Rig]) -> Rig:
    """Five undisturbed steps; every version is kept, with all weights."""
    rig = lora_rig(make, "calm", publish={"keep": 100})
    rig.train(1, 2, 3, 4, 5)
    return rig


def served(rig: Rig, version: int) -> dict[str, torch.Tensor]:
    """Return the weights that an instance computes with."""
    return load_critic(rig.store.folder(version)).model.state_dict()


def assert_same(rig: Rig, version: int, calm: Rig, step: int) -> None:
    found, expected = served(rig, version), served(calm, step)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("owner", "name", "when"), KILLS, ids=lambda value: getattr(value, "__name__", value))
def test_a_killed_sidecar_trains_each_step_once(
    make: Callable[..., Rig], calm: Rig, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: str, format: str
):
    rig = make("run", **SETTINGS, publish={"format": format, "keep": 100}, checkpoint_every=2)
    rig.serve()
    entries = [rig.send(step) for step in range(1, 6)]
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, when, call=1 if owner is CheckpointFolder else 4)
        assert isinstance(rig.start().ended(), Killed)
    rig.start()
    assert [rig.answer(entry).weights_version for entry in entries] == [1, 2, 3, 4, 5]
    assert_same(rig, 5, calm, 5)
    assert rig.store.versions() == [0, 1, 2, 3, 4, 5]
    assert rig.store.manifest(5).base == (0 if format == "adapter" else None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("restart", [False, True])
def test_a_rewind_serves_the_old_weights_under_a_new_number(
    make: Callable[..., Rig], calm: Rig, format: str, restart: bool
):
    rig = lora_rig(make, "run", publish={"format": format, "keep": 1})
    rig.train(1, 2)
    rig.save()
    rig.train(3)
    if restart:
        rig.stop()
        rig.start()
    assert rig.rewind(2).weights_version == 4
    assert_same(rig, 4, calm, 2)
    assert [result.weights_version for result in rig.train(3, 4)] == [5, 6]
    assert_same(rig, 6, calm, 4)
    assert rig.store.versions() == [0, 6]  # the base stays


def test_other_adapters_need_another_run(make: Callable[..., Rig]):
    rig = lora_rig(make, "run")
    rig.train(1)
    assert rig.stop() is None
    other = make("run", **{**SETTINGS, "lora_rank": 3})
    error = other.start().ended()
    assert "do not match trainer.lora_rank and trainer.lora_targets" in str(error)
