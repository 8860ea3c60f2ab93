"""The critic's part of a replay: the same weights from the same payloads, and the first difference otherwise."""

import re
from dataclasses import replace

import numpy as np
import pytest
from sidecar_rig import payload
from versions import flip

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.store.weights import WeightsError
from rlhf_triton.trainer.critic_replay import CriticReplay

pytest_plugins = ["sidecar_fixtures"]


def test_critic_replays_identically_from_a_checkpoint(make):
    rig = make(threads=1).begin()
    rig.train(1, 2)
    rig.save()
    rig.train(3, 4)
    rig.stop()
    assert rig.checkpoints.steps() == [2, 4]
    for start in (0, 2):
        critic = CriticReplay(rig.config, start)
        assert [critic.train(step, payload(step)) for step in range(start + 1, 5)] == [""] * (4 - start)
    with pytest.raises(CheckpointError):
        CriticReplay(rig.config, 3)
    critic = CriticReplay(rig.config, 2)
    returns = payload(3).returns.copy()
    returns[5] = np.nextafter(returns[5], np.float32(9))
    told = critic.train(3, replace(payload(3), returns=returns))
    assert (
        told == f"the critic's payload: `returns` at position 5: {payload(3).returns[5]} in the run, {returns[5]} here"
    )
    critic._update.trained.optimizer_step += 10
    assert re.fullmatch(r"the critic's loss: \S+ in the run, \S+ here", critic.train(3, payload(3)))


def test_damaged_version_0_is_not_replayed(make):
    """The steps would differ, and a fork would go on from it."""
    rig = make(threads=1).begin()
    rig.train(1)
    rig.stop()
    flip(rig.store.folder(0) / "model.safetensors")
    with pytest.raises(WeightsError, match=r"version 0: model\.safetensors has digest"):
        CriticReplay(rig.config, 1)


def test_critic_of_a_resumed_run_replays_with_its_new_settings(make):
    rig = make(threads=1, lr=1e-2).begin()
    rig.train(1)
    rig.stop()
    critic = CriticReplay(rig.config, 0)
    assert critic.train(1, payload(1)) == ""
    again = make(threads=1, lr=5e-2)
    again.start().train(2)
    again.stop()
    assert critic.resumed(again.config).train(2, payload(2)) == ""
    assert critic.train(2, payload(2)) != ""
