"""The critic's part of a replay: the same weights from the same payloads, and the first difference otherwise."""

import re
from dataclasses import replace

import numpy as np
import pytest
from sidecar_rig import payload

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.trainer.critic_replay import CriticReplay

pytest_plugins = ["sidecar_fixtures"]


def test_critic_replays_identically_from_a_checkpoint(make):
    rig = make(threads=1)
    rig.serve()
    rig.start().train(1, 2)
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
