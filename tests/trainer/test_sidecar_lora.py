"""The sidecar with LoRA in bfloat16: stopped and rewound, it serves the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sidecar_rig import Rig

from python_backend.models.modeling import load_critic

pytest_plugins = ["sidecar_fixtures"]
SETTINGS: dict[str, Any] = {"lora_rank": 2, "precision": "bfloat16", "gradient_checkpointing": True}
FORMATS = ["merged", "adapter"]


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
