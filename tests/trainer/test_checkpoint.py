"""Tests of `trainer.checkpoint`: a partial checkpoint is none, and it contains all that determines the weights."""

import json

import pytest
import torch
from loaders import load_trained
from test_critic_update import checkpoint as checkpoint  # a fixture
from test_critic_update import settings, weights

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.store.sealed_folder import DamagedCheckpoint
from rlhf_triton.trainer.checkpoint import CheckpointFolder, CheckpointState
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.trained_critic import build_critic


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


def fresh(folder):
    return CriticUpdate(load_trained(folder), settings(warmup_steps=3))


def state(step, update, *, asked=False):
    return CheckpointState(
        run_id="run",
        step=step,
        optimizer_step=update.trained.optimizer_step,
        version=step,
        epoch=1,
        asked=asked,
        settings=update.trained.settings,
        base_digest="a hash",
        results=[{"entry": "x"}],
    )


def optimizer_bits(update):
    return update.trained.state()


def test_damaged_checkpoint_file_is_detected_by_its_digest(checkpoint, tmp_path):
    folder = CheckpointFolder(tmp_path)
    update = fresh(checkpoint)
    place = folder.save(update, state(1, update)) / "state.json"
    content = json.loads(place.read_text())
    named = {content["digest"], *content["files"].values()}
    assert {digest.partition(":")[0] for digest in named} == {"xxh3"}
    assert CheckpointFolder(tmp_path).load(1, update) == state(1, update)
    CheckpointFolder(tmp_path).mark_asked(1)
    assert folder.load(1, update) == state(1, update, asked=True)
    for path, old, new in ((next(place.parent.glob("*.safetensors")), b"dtype", b"dtypo"), (place, b'"run"', b'"fun"')):
        path.write_bytes(path.read_bytes().replace(old, new))
        with pytest.raises(DamagedCheckpoint, match=f"{path.name} is damaged"):
            folder.load(1, update)


def test_checkpoint_with_another_lora_rank_is_refused(checkpoint, folder):
    first, update = (
        CriticUpdate(build_critic(checkpoint, section, seed=0), section)
        for section in (settings(lora_rank=2), settings(lora_rank=3))
    )
    folder.save(first, state(1, first))
    before = weights(update)
    with pytest.raises(CheckpointError, match=r"was saved with trainer\.lora_rank: 2, not 3; restore it"):
        folder.load(1, update)
    assert torch.equal(weights(update), before)
