"""A version that several ranks wrote is served once every live instance has reproduced its canary row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_tiny

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.canary import canary_row, check_canary
from python_backend.models.modeling import CriticModel, load_critic, save_critic
from python_backend.store.serving_records import ServingRecord
from python_backend.store.weights import Manifest, WeightsStore
from trainer.publish import Publisher
from trainer.verification import VersionRejected


class Publication:
    """A version to publish; `records` are what the instances say at each look of the publisher."""

    def __init__(self, root: Path, reload: str = "swap") -> None:
        save_tiny(root / "critic", "llama", "critic")
        self.critic, self.store = load_critic(root / "critic"), WeightsStore(root / "store")
        self.publisher = Publisher(self.store, run_id="run", epoch=1, servers=[], reload=reload, timeout_s=60, keep=3)
        self.store.set_current(self.add(0).version)
        self.manifest = self.add(1, canary=self.critic.values([canary_row(self.critic)])[0].tolist())
        self.waited = 0

    def add(self, step: int, **more: Any) -> Manifest:
        return self.store.add(
            lambda folder: save_critic(self.critic, folder), run_id="run", step=step, parent=None, epoch=1, **more
        )

    def say(self, name: str, version: int | None = 0, **more: Any) -> None:
        self.store.records.put(ServingRecord.of_this_process(name, version, **more))

    def wait(self, *sayings: dict[str, Any]) -> None:
        """Await the staging; each `beat` of the publisher lets an instance say the next thing."""
        left = list(sayings)

        def beat(state: str) -> None:
            self.waited += 1
            assert state == "waiting until version 1 is staged"
            self.say(**left.pop(0))

        self.publisher.await_staging(self.manifest, beat)
        assert not left


def test_it_waits_for_every_instance_that_serves(tmp_path: Path) -> None:
    publication = Publication(tmp_path)
    publication.say("critic_0")
    publication.say("critic_1")
    publication.say("starting", None, loading=0)  # it looks at CURRENT after its start
    publication.wait({"name": "critic_1", "staged": 1}, {"name": "critic_0", "staged": 1})
    assert publication.waited == 2
    publication.wait()
    assert publication.waited == 2
    assert publication.store.current() == 0


def test_one_that_refuses_is_enough(tmp_path: Path) -> None:
    publication = Publication(tmp_path)
    publication.say("critic_0")
    publication.say("critic_1")
    with pytest.raises(VersionRejected, match=r"version 1 was refused by critic_1 .*: it looks odd"):
        publication.wait({"name": "critic_1", "staged": 1, "staging_error": "it looks odd"})
    assert publication.store.current() == 0


@pytest.mark.parametrize("reload", ["swap", "triton"])
def test_it_does_not_wait_for_instances_that_are_not_there_or_never_stage(tmp_path: Path, reload: str) -> None:
    publication = Publication(tmp_path, reload)
    if reload == "triton":
        publication.say("critic_0")
    publication.wait()
    publication.say("critic_0", 1)  # serves it already: a replay after a crash
    publication.wait()


def test_a_critic_with_other_weights_does_not_reproduce_the_canary_row(tmp_path: Path) -> None:
    publication = Publication(tmp_path)
    expected = publication.manifest.canary
    assert expected is not None
    assert publication.store.manifest(1).canary == expected
    check(publication.critic, expected)
    with torch.no_grad():
        publication.critic.model.score.weight += 0.1
    with pytest.raises(CheckpointError, match="the values for the canary row differ by"):
        check(publication.critic, expected)


def check(critic: CriticModel, expected: list[float]) -> None:
    check_canary(critic, critic.values([canary_row(critic)])[0], expected)
