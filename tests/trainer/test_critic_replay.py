"""The critic's part of a replay: the same weights from the same payloads, and the first difference otherwise."""

import re
from dataclasses import replace

import numpy as np
import pytest
from sidecar_rig import payload
from versions import flip

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.store.weights import WeightsError, WeightsStore
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


def test_new_run_continues_with_the_critic_of_an_earlier_step(make):
    """Its sidecar accepts the actor's rewind to that step, serves the critic, and trains as the run did."""
    rig = make(threads=1).begin()
    rig.train(1, 2)
    rig.save()
    rig.train(3)
    rig.stop()
    new = make("new", threads=1)
    critic = CriticReplay(rig.config, 2)
    critic.save(new.config)
    new.begin()
    rewound = new.answer(new.journal.accept_rewind(run_id="run", target=2))
    assert rewound.error is None
    assert new.store.manifest(rewound.weights_version).step == 2
    new.train(3)
    new.stop()
    assert new.store.manifest(new.store.current()).files == rig.store.manifest(rig.store.current()).files


def test_first_version_of_a_new_run_is_its_own(make):
    """Servers of the two runs do not share requests, and `critic.pretrain` reads the new run's journal."""
    rig = make(threads=1).begin()
    rig.train(1)
    rig.stop()
    run = rig.config.run.model_copy(update={"dir": rig.config.run.dir.with_name("new"), "run_id": "new"})
    CriticReplay(rig.config, 1).save(rig.config.model_copy(update={"run": run}))
    new = WeightsStore(run.weights_dir)
    first = rig.store.manifest(0)
    assert (new.current(), new.manifest(0).run_id, new.manifest(0).files) == (0, "new", first.files)
    assert (new.manifest(0).made_from, new.manifest(0).source) == (first.made_from, first.source)
    assert new.identity != rig.store.identity


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
