"""Critics that are mixtures of experts: from their own file through versions and checkpoints, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_critic_update import payload, settings, silent, weights
from test_trainer_checkpoint import state
from tiny_checkpoints import MIXTURES, save_tiny
from transformers import AutoModelForCausalLM

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import CriticSection
from python_backend.models.modeling import quiet_transformers, save_critic
from python_backend.store.weights import WeightsStore
from tests.support.loaders import load_critic
from trainer.checkpoint import CheckpointFolder
from trainer.critic_update import CriticUpdate
from trainer.publish import initialise_store
from trainer.verification import verify_alone, verify_version

ROWS = [np.arange(1, 9), np.arange(3, 6)]
CLASSIFIERS = ("mixtral", "qwen2-moe", "qwen3-moe", "phimoe")  # transformers has no classes for the others
quiet_transformers()


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_critic_goes_on_where_it_was(tmp_path: Path, family: str):
    save_tiny(tmp_path / "start", family, "language")
    store, folder = WeightsStore(tmp_path / "weights"), CheckpointFolder(tmp_path / "checkpoints")
    initialise_store(store, CriticSection(checkpoint=tmp_path / "start"), run_id="run")
    verify_alone(store, 0)
    served = load_critic(store.folder(0))
    straight, resumed = (CriticUpdate(load_critic(store.folder(0)), settings()) for _ in range(2))
    straight.train(payload(), silent)
    folder.save(straight, state(1, straight))
    store.add(lambda path: save_critic(straight.critic, path), run_id="run", step=1, parent=0, epoch=1)
    verify_version(store, 1, straight.critic)
    folder.load(1, resumed)
    assert torch.equal(weights(resumed), weights(straight))
    for critic in (served.with_weights(store.folder(1)), load_critic(store.folder(1)), resumed.critic):
        for found, expected in zip(critic.values(ROWS), straight.critic.values(ROWS), strict=True):
            np.testing.assert_array_equal(found, expected)
    for update in (straight, resumed):
        update.train(payload(seed=1), silent)
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("family", sorted({*MIXTURES} - {*CLASSIFIERS}))
def test_a_family_without_a_classification_class_is_no_critic(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "language")
    with pytest.raises(CheckpointError, match="transformers has no classification class"):
        load_critic(tmp_path)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_critic_starts_with_the_body_of_its_checkpoint(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "language")
    body, critic = AutoModelForCausalLM.from_pretrained(str(tmp_path)).base_model, load_critic(tmp_path)
    for (name, mine), theirs in zip(critic.model.base_model.named_parameters(), body.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs), name
