"""The dry run on GPUs: which roles share a device, on which node, and what they need beside their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_tiny

from python_backend.config import ConfigError, RunConfig, load_config
from tools.plan.command import PlanError, dry_run, needs_of, roles_of
from tools.plan.role import CONTEXT, FRAGMENTATION, GIB, NCCL_BUFFERS, Role, Sizes

SMALL = ["actor.prompts.max_tokens=4", "actor.generation.max_new_tokens=4", "actor.policy.token_budget=16"]

SERVERS = 'actor.client.servers=["host:8000"]'


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    """Return a run of tiny models, all of them on `cuda`, with these overrides."""
    for kind in ("language", "reward"):
        if not (tmp_path / kind).exists():
            save_tiny(tmp_path / kind, "llama", kind)
    models = {"reward": "reward", "critic": "reward", "actor.policy": "language"}
    given = [f"{key}.checkpoint={tmp_path / kind}" for key, kind in models.items()]
    given += [f"{key}.device=cuda" for key in (*models, "trainer")]
    (tmp_path / "run.yaml").write_text("{}")
    return load_config(tmp_path / "run.yaml", [*given, *SMALL, f"run.dir={tmp_path / 'run'}", *overrides])


def test_contexts_buffers_and_fragmentation_are_counted():
    roles = [
        Role("actor", Sizes(weights=100 * GIB), devices=("cuda:0", "cuda:1"), processes=2, has_group=True),
        Role("reward", Sizes(weights=GIB), devices=("cuda:1",), contexts=2),
    ]
    needs = needs_of(roles, interpreter=7)
    assert needs["cpu"] == {"processes": 3 * 7}
    fragments = int(100 * GIB * FRAGMENTATION)
    assert needs["cuda:0"] == {"actor": 100 * GIB, "contexts": CONTEXT + NCCL_BUFFERS, "fragmentation": fragments}
    assert needs["cuda:1"]["contexts"] == 3 * CONTEXT + NCCL_BUFFERS


def test_a_model_served_on_every_gpu_has_a_copy_on_each(tmp_path: Path):
    config = config_of(tmp_path, "reward.device=cuda:1")
    roles = roles_of(config, num_devices=4)
    assert roles["critic"].devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (roles["critic"].processes, roles["reward"].devices) == (4, ("cuda:1",))
    assert not roles["critic"].has_group  # independent copies exchange nothing
    needs = needs_of(roles.values(), interpreter=0)
    size = roles["critic"].sizes.total
    assert {device: parts["critic"] for device, parts in needs.items() if device != "cpu"} == {
        f"cuda:{i}": size for i in range(4)
    }
    assert needs["cuda:3"]["contexts"] == 2 * CONTEXT  # the critic's process and tritonserver
    assert needs["cuda:1"]["contexts"] == 3 * CONTEXT


def test_tensor_parallel_ranks_have_buffers(tmp_path: Path):
    config = config_of(tmp_path, "critic.device=cuda:1", "critic.tensor_parallel=2", "run.share_cards=true")
    role = roles_of(config, num_devices=4)["critic"]
    assert (role.devices, role.has_group) == (("cuda:1", "cuda:2"), True)


@pytest.mark.parametrize(
    ("overrides", "copies", "contexts"),
    [
        ((), 1, 1),  # reload_on_save: none, the default on a GPU
        (("trainer.reload_on_save=triton",), 2, 2),
        (("critic.reload=triton",), 1, 2),
    ],
)
def test_copies_of_the_critic_while_a_version_is_loaded(
    tmp_path: Path, overrides: tuple[str, ...], copies: int, contexts: int
):
    role = roles_of(config_of(tmp_path, *overrides))["critic"]
    assert (role.sizes.copies, role.contexts) == (copies * role.sizes.weights, contexts)
    assert any("third copy" in note for note in role.notes) == (copies == 2)


def test_ranks_are_spread_over_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = config_of(tmp_path, "actor.ranks=16", "trainer.ranks=4", SERVERS)
    roles = roles_of(config, num_devices=8)
    assert (roles["actor"].nodes, len(roles["actor"].devices), roles["actor"].node) == (2, 8, "actor")
    assert (roles["trainer"].nodes, len(roles["trainer"].devices), roles["reward"].node) == (1, 4, "server")
    needs = needs_of(roles.values(), interpreter=1)
    assert set(needs["actor cuda:7"]) == {"actor", "contexts", "fragmentation"}
    assert (needs["actor cpu"]["processes"], needs["trainer cpu"]["processes"]) == (8, 4)
    dry_run(config, num_devices=8, device_gib=80, host_gib=64)
    out = capsys.readouterr().out
    assert "actor cuda:0-7: " in out
    assert out.count("of 80 GiB each") == 3


def test_named_servers_are_on_nodes_of_their_own(tmp_path: Path):
    together, apart = (
        needs_of(roles_of(config_of(tmp_path, *overrides)).values(), interpreter=0) for overrides in ((), (SERVERS,))
    )
    assert set(together) == {"cpu", "cuda:0"}
    assert {device.partition(" ")[0] for device in apart} == {"server", "trainer", "actor"}
    tensors = [{k: v for k, v in parts.items() if k not in ("contexts", "fragmentation")} for parts in apart.values()]
    assert sum(sum(parts.values()) for parts in tensors) == sum(
        v for k, v in together["cuda:0"].items() if k not in ("contexts", "fragmentation")
    )


def test_vllm_names_its_gpus_and_is_planned(tmp_path: Path):
    engine = "actor.generation.engine=vllm"
    with pytest.raises(
        ConfigError, match=r"actor\.generation\.vllm\.cuda_devices is not set, .* most of the first GPU"
    ):
        config_of(tmp_path, engine)
    config_of(tmp_path, engine, 'actor.generation.vllm.servers=["host:8000"]')  # not ours to place
    own: dict[str, Any] = {"num_devices": 2, "device_gib": 10, "host_gib": 64, "say": lambda line: None}
    apart = ("reward.device=cuda:0", "critic.device=cuda:0", 'actor.generation.vllm.cuda_devices="1"')
    dry_run(config_of(tmp_path, engine, *apart), **own)
    same = config_of(tmp_path, engine, 'actor.generation.vllm.cuda_devices="0"')
    with pytest.raises(
        PlanError, match=r"cuda:0 needs .* of 10 GiB: vLLM 9 GiB, .*; .* of vLLM: change .*cuda_devices"
    ):
        dry_run(same, **own)
    half = 'actor.generation.vllm.arguments=[--gpu-memory-utilization, "0.5"]'
    dry_run(config_of(tmp_path, engine, 'actor.generation.vllm.cuda_devices="0"', half), **own)


def test_a_gpu_beyond_those_of_the_machine_is_refused(tmp_path: Path):
    config = config_of(tmp_path, "reward.device=cuda:4")
    with pytest.raises(PlanError, match="cuda:4 is not on a machine with 4 GPUs"):
        dry_run(config, num_devices=4, device_gib=80, host_gib=64, say=lambda line: None)
