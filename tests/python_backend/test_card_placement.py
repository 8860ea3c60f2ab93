"""Which GPUs each role uses, and configurations in which roles meet on one by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from python_backend.config import ConfigError, load_config
from python_backend.models.card.placement import device_of, devices_of, own_device

LAYOUTS = {  # overrides -> what the error says; None: accepted
    "all roles on the only GPU": (
        ["reward.device=cuda", "critic.device=cuda", "trainer.device=cuda", "actor.policy.device=cuda:0"],
        None,
    ),
    "ranks of actor and trainer from the same GPU on": (
        ["actor.policy.device=cuda", "actor.ranks=4", "trainer.device=cuda", "trainer.ranks=2"],
        r"trainer.device \(cuda:0 to cuda:1\) and actor.policy.device \(cuda:0 to cuda:3\) share cuda:0, cuda:1; ",
    ),
    "ranks beside each other": (
        [
            *("actor.policy.device=cuda", "actor.ranks=4", "trainer.device=cuda:4", "trainer.ranks=2"),
            *("reward.device=cuda:6", "critic.device=cuda:7"),
        ],
        None,
    ),
    "a served model inside the actor's range": (
        ["actor.policy.device=cuda:2", "actor.ranks=2", "critic.device=cuda:3"],
        r"critic.device \(cuda:3\) and actor.policy.device \(cuda:2 to cuda:3\) share cuda:3; .*run.share_cards: true",
    ),
    "a served model on every GPU": (
        ["actor.policy.device=cuda:6", "actor.ranks=2", "reward.device=cuda"],
        r"reward.device \(every card\) and actor.policy.device \(cuda:6 to cuda:7\) share cuda:6, cuda:7; ",
    ),
    "tensor parallelism": (
        ["critic.device=cuda:2", "critic.tensor_parallel=4", "trainer.device=cuda:5"],
        r"critic.device \(cuda:2 to cuda:5\) and trainer.device \(cuda:5\) share cuda:5; ",
    ),
    "vLLM": (
        [
            *("actor.generation.engine=vllm", "actor.generation.vllm.cuda_devices='2, 3'"),
            *("actor.policy.device=cuda", "actor.ranks=4"),
        ],
        r"actor.policy.device \(cuda:0 to cuda:3\) and actor.generation.vllm.cuda_devices .* share cuda:2, cuda:3; ",
    ),
    "shared on purpose": (
        ["run.share_cards=true", "actor.policy.device=cuda", "actor.ranks=2", "trainer.device=cuda", "trainer.ranks=2"],
        None,
    ),
    "machines of their own": (
        [
            *("actor.client.servers=[a:8000]", "actor.policy.device=cuda", "actor.ranks=8"),
            *("trainer.device=cuda", "trainer.ranks=8", "reward.device=cuda", "critic.device=cuda:1"),
        ],
        None,
    ),
    "on the CPU": (["actor.ranks=4", "trainer.ranks=4", "reward.device=cuda"], None),
}


@pytest.mark.parametrize(("overrides", "error"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_gpu_is_shared_by_roles_of_one_gpu_or_on_purpose(tmp_path: Path, overrides: list[str], error: str | None):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path)}}))
    if error is None:
        load_config(path, overrides)
    else:
        with pytest.raises(ConfigError, match=error):
            load_config(path, overrides)


def test_a_role_has_the_gpus_from_its_first_one_on(monkeypatch: pytest.MonkeyPatch):
    assert devices_of("cuda", 2) == ("cuda:0", "cuda:1")
    assert devices_of("cuda:4", 4) == ("cuda:4", "cuda:5", "cuda:6", "cuda:7")
    assert devices_of("cuda:1") == ("cuda:1",)
    assert devices_of("cpu", 2) == ("cpu", "cpu")
    assert device_of("cpu", 3) == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda:4") == "cuda:7"


def test_ranks_on_several_nodes_have_the_gpus_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "run.yaml"
    path.write_text("actor: {ranks: 16, policy: {device: cuda}}\ntrainer: {ranks: 2, device: 'cuda:8'}\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    places = {place.key: place.cards for place in load_config(path).places}
    assert places["actor.policy.device"] == devices_of("cuda", 8)
    assert places["trainer.device"] == ("cuda:8", "cuda:9")
