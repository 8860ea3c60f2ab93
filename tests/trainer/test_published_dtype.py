"""Versions in the dtype in which they are served, and their hashes, which are computed while they are written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_tiny

import rlhf_triton.store.weights as weights_module
from rlhf_triton.digests import digest_of
from rlhf_triton.learning.ranks import Ranks
from rlhf_triton.python_backend.models.modeling import load_critic, save_critic
from rlhf_triton.store.weights import Manifest, WeightsStore, weights_files
from rlhf_triton.trainer.critic_update import load_update
from rlhf_triton.trainer.publish import Publisher
from tests.support.ranks import on_ranks
from tests.support.settings import trainer_section

CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "merged adapters": {"lora_rank": 2},
    "merged adapters in bfloat16": {"lora_rank": 2, "precision": "bfloat16"},
}
ABOUT: dict[str, Any] = {"run_id": "run", "parent": None, "epoch": 1}


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    save_tiny(tmp_path / "critic", "llama", "critic")
    store = WeightsStore(tmp_path / "store")
    critic = load_critic(tmp_path / "critic")
    store.set_current(store.add(lambda folder: save_critic(critic, folder), step=0, **ABOUT).version)
    return store


def dtypes_of(store: WeightsStore, version: int) -> dict[str, set[str]]:
    """The stored dtypes of body and head."""
    tensors = store.manifest(version).tensors
    return {
        "head": {dtype for name, (dtype, _) in tensors.items() if name.startswith("score")},
        "body": {dtype for name, (dtype, _) in tensors.items() if not name.startswith("score")},
    }


def train_a_little(critic: Any) -> None:
    """Change all trained weights so that bfloat16 does not hold them."""
    with torch.no_grad():
        for parameter in critic.model.parameters():
            if parameter.requires_grad:
                parameter += 1e-3 * torch.randn_like(parameter)


def on_each_rank(ranks: Ranks, root: Path, case: str) -> list[bool]:
    """Publish a version from two ranks; return whether it holds the critic's weights, before and after training."""
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    settings = trainer_section(publish_dtype="bfloat16", **CASES[case])
    store, update = WeightsStore(root), load_update(root / "0", settings, seed=0, ranks=ranks)
    publisher = Publisher(store, run_id="run", epoch=1, servers=[], reload="swap", timeout_s=1, keep=3)
    ranks.together(lambda: (root / "1").mkdir(exist_ok=True))
    digests = update.critic.write(root / "1", "sha256")
    if ranks.rank == 0:
        assert digests == {path.name: digest_of(path, "sha256") for path in weights_files(root / "1")}
        tensors = {name: [info.dtype, list(info.shape)] for name, info in _headers(root / "1").items()}
        manifest = Manifest(version=1, step=1, tensors=tensors, files=digests, **ABOUT)
        (root / "1" / "manifest.json").write_text(json.dumps(manifest.to_json()))
    torch.distributed.barrier()
    publisher.verify(1, update.critic)
    found = [publisher.holds_weights(update.critic, 1)]
    torch.manual_seed(0)
    train_a_little(update.critic)
    return [*found, publisher.holds_weights(update.critic, 1)]


def _headers(folder: Path) -> dict[str, Any]:
    files = [path for path in weights_files(folder) if path.suffix == ".safetensors"]
    return {name: info for path in files for name, info in weights_module.read_header(path).items()}


@pytest.mark.parametrize("case", ["all weights", "merged adapters in bfloat16"])
def test_ranks_publish_in_bfloat16(store: WeightsStore, case: str):
    assert on_ranks(2, on_each_rank, store.root, case) == [[True, False]] * 2
    assert dtypes_of(store, 1) == {"head": {"F32"}, "body": {"BF16"}}
