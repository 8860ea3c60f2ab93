"""The run of each overlay of deploy/ fits the GPUs of 80 GB that it is meant for, by the project's own plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from manifests import DEPLOY, OVERLAYS, pods

from python_backend.config import RunConfig, load_config
from tools.plan.command import dry_run

QWEN2 = {  # the shapes of Qwen2.5: layers, hidden size, intermediate size, heads, key-value heads, vocabulary
    "3B": (36, 2048, 11008, 16, 2, 151936),
    "7B": (28, 3584, 18944, 28, 4, 152064),
}
SIZES = {"single": ("3B", 1), "servers": ("7B", 1), "ranks": ("7B", 8)}  # models, and GPUs of each node


def overlay_config(tmp_path: Path, overlay: str, size: str) -> RunConfig:
    """Return the overlay's run, with checkpoints that are a config.json alone."""
    layers, hidden, intermediate, heads, kv_heads, vocabulary = QWEN2[size]
    shape = {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": size == "3B",
    }
    for name, kind in {"policy": "CausalLM", "reward": "SequenceClassification"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape | {"architectures": [f"Qwen2For{kind}"]}))
    checkpoints = {"reward": "reward", "critic": "reward", "actor.policy": "policy"}
    overrides = [f"{key}.checkpoint={tmp_path / name}" for key, name in checkpoints.items()]
    return load_config(DEPLOY / "overlays" / overlay / "run.yaml", [*overrides, f"run.dir={tmp_path / 'run'}"])


def host_gib(overlay: str) -> float:
    """Return the smallest memory limit of the overlay's pods."""
    limits = [pod["spec"]["containers"][0]["resources"]["limits"] for pod in pods(overlay).values()]
    return min(int(limit["memory"].removesuffix("Gi")) for limit in limits if "nvidia.com/gpu" in limit)


def test_every_overlay_has_a_size() -> None:
    assert set(SIZES) == set(OVERLAYS)


@pytest.mark.parametrize(
    "overlay",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(900)] if name != "single" else [])
        for name in OVERLAYS
    ],
)
def test_an_overlay_fits_its_gpus(tmp_path: Path, overlay: str) -> None:
    size, num_devices = SIZES[overlay]
    config = overlay_config(tmp_path, overlay, size)
    assert {section.dtype for section in config.served_sections.values()} == {"bfloat16"}
    assert (config.trainer.precision, config.actor.policy.precision) == ("bfloat16", "bfloat16")
    lines: list[str] = []
    dry_run(config, num_devices=num_devices, device_gib=80, host_gib=host_gib(overlay), say=lines.append)
    nodes = {"server", "trainer", "actor"} if config.actor.client.servers else {""}
    assert {line.partition("cuda:")[0].strip() for line in lines if "of 80 GiB" in line} == nodes
    assert f"fit {'one GPU' if overlay == 'single' else 'GPUs'} of 80 GB" in " ".join(
        (DEPLOY / "overlays" / overlay / "run.yaml").read_text().replace("#", "").split()
    )
