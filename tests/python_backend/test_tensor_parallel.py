"""Models split over two processes: same outputs as in one process, and new weights that all ranks accept or none."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from python_backend.checkpoints.inspection import WEIGHTS_FILE, CheckpointError
from python_backend.checkpoints.tensor_parallel import check_tensor_parallel
from python_backend.models import token_head
from python_backend.models.modeling import CriticModel, save_critic
from python_backend.models.tensor_parallel import RankGroup
from python_backend.serving.ranks.controller import ServingRanks
from python_backend.serving.ranks.loaders import load_model
from python_backend.serving.ranks.process import Rank
from tests.support.ranks import serving_ranks

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "intermediate_size": 25},  # rank 1 gets one feature less
    "qwen2": {**HEADS, "tie_word_embeddings": True},
    "mistral": HEADS,
    "gpt-neox": {"num_attention_heads": 4},  # biases in the row-wise layers, and another name of the head
}
REFERENCE = {"temperature": 0.7, "banned_token_ids": [3]}
LAYER = "model.layers.1.self_attn.q_proj.weight"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks() -> Iterator[ServingRanks]:
    """Two ranks on the CPU; this process is rank 0."""
    with serving_ranks("cpu") as ranks:
        yield ranks


def random_rows(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 40, length) for length in lengths]


ROWS = random_rows(1, 3, 9, 30)


def outputs(model: Any) -> np.ndarray:
    """All outputs of a forward pass over `ROWS`, in one array."""
    if isinstance(model, CriticModel):
        return np.concatenate(model.values(ROWS, 32))
    return np.concatenate(model.score(ROWS, 32) if hasattr(model, "score") else model.logprobs(ROWS, 32))


def split_outputs(ranks: ServingRanks, model: Any) -> np.ndarray:
    with ranks.forward(model, ROWS, 32):
        return outputs(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("loader", "head", "options"),
    [("load_reward", "reward", {}), ("load_critic", "critic", {}), ("load_language_model", "language", REFERENCE)],
)
def test_outputs_equal_those_of_one_process(
    ranks: ServingRanks, tmp_path: Path, family: str, loader: str, head: str, options: dict[str, Any]
) -> None:
    save_tiny(tmp_path, family, head, **FAMILIES[family])
    split, whole = ranks.load(loader, tmp_path, None, options), load_model(loader, tmp_path, None, options)
    np.testing.assert_allclose(split_outputs(ranks, split), outputs(whole), atol=TOLERANCE, rtol=0)
    num_split, num_whole = (sum(p.numel() for p in model.model.base_model.parameters()) for model in (split, whole))
    assert num_split < 0.8 * num_whole, "the layers are not split"


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Two critics of one architecture, saved as the sidecar saves them."""
    folders = []
    for seed in (1, 2):
        save_tiny(tmp_path / f"checkpoint-{seed}", "llama", "critic", seed=seed, **FAMILIES["llama"])
        critic = load_model("load_critic", tmp_path / f"checkpoint-{seed}", None, {})
        folders.append(tmp_path / f"version-{seed}")
        folders[-1].mkdir()
        save_critic(critic, folders[-1])
    return folders


def test_two_versions_keep_their_own_weights(ranks: ServingRanks, versions: list[Path]) -> None:
    first = ranks.load("load_critic", versions[0], None, {})
    second = ranks.load("load_critic", versions[1], first, {})
    for split, folder in ((first, versions[0]), (second, versions[1]), (first, versions[0])):
        whole = load_model("load_critic", folder, None, {})
        np.testing.assert_allclose(split_outputs(ranks, split), outputs(whole), atol=TOLERANCE, rtol=0)
    modules = list(first.model.modules())
    del first, split
    assert not any(module._parameters for module in modules), "the memory of an unused version is not freed"
    third = ranks.load("load_critic", versions[0], second, {})  # also tells rank 1 to free the first version
    whole = load_model("load_critic", versions[0], None, {})
    np.testing.assert_allclose(split_outputs(ranks, third), outputs(whole), atol=TOLERANCE, rtol=0)


def test_a_new_version_of_a_reward_is_not_probed(
    ranks: ServingRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's collectives could meet those of a probe, which another rank runs before or after the request."""
    for seed in (1, 2):
        save_tiny(tmp_path / str(seed), "llama", "reward", seed=seed, **FAMILIES["llama"])
    served = ranks.load("load_reward", tmp_path / "1", None, {})
    whole = load_model("load_reward", tmp_path / "2", None, {})

    def probe(*_: Any, **__: Any) -> bool:
        raise AssertionError("a forward pass while loading")

    for name in ("measure_causality", "depends_on_padding"):
        monkeypatch.setattr(token_head, name, probe)
    split = ranks.load("load_reward", tmp_path / "2", served, {})
    np.testing.assert_allclose(split_outputs(ranks, split), outputs(whole), atol=TOLERANCE, rtol=0)


def damage(folder: Path, *, shape: bool) -> None:
    """Change what only the last rank reads of a layer: cut off a row, or write NaN into it."""
    tensors = load_file(folder / WEIGHTS_FILE)
    if shape:
        tensors[LAYER] = tensors[LAYER][:-1].contiguous()
    else:
        tensors[LAYER][-1] = torch.nan
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("shape", [False, True])
def test_what_one_rank_refuses_no_rank_serves(ranks: ServingRanks, versions: list[Path], shape: bool) -> None:
    served = ranks.load("load_critic", versions[0], None, {})
    damage(versions[1], shape=shape)
    with pytest.raises(CheckpointError, match="rank 1: "):
        ranks.load("load_critic", versions[1], served, {})
    whole = load_model("load_critic", versions[0], None, {})
    np.testing.assert_allclose(split_outputs(ranks, served), outputs(whole), atol=TOLERANCE, rtol=0)


def test_a_first_version_that_one_rank_refuses(ranks: ServingRanks, versions: list[Path]) -> None:
    damage(versions[0], shape=False)
    with pytest.raises(CheckpointError, match=f"rank 1: {LAYER} has values that are not finite"):
        ranks.load("load_critic", versions[0], None, {})


class Received:
    """Stands in for a model on another rank: keeps the rows of a forward pass."""

    def launch(self, rows: list[np.ndarray], width: int) -> Callable[[], None]:
        self.rows, self.width = rows, width
        return lambda: None


@pytest.mark.parametrize("lengths", [(5,), (0, 3, 0), (8192, 1, 8192, 70_000)], ids=str)
def test_rows_reach_the_other_ranks_as_they_are(lengths: tuple[int, ...]) -> None:
    """The longest of them are larger than a socket's buffer."""
    rows = [np.arange(2 * length, dtype=np.int32)[::2] + (1 << 30) for length in lengths]
    ours, theirs = multiprocessing.Pipe()
    rank, model = Rank(SimpleNamespace()), Received()  # type: ignore[arg-type]
    rank._models[7] = model  # type: ignore[assignment]
    controller = ServingRanks.__new__(ServingRanks)
    controller._connections, controller._unused = [ours], deque()
    controller._forwards, controller._sending = threading.Lock(), threading.Lock()
    controller._keys = {model: 7}  # type: ignore[assignment]
    controller._group = SimpleNamespace(device="cpu")  # type: ignore[assignment]
    other = threading.Thread(target=lambda: rank.execute(json.loads(theirs.recv_bytes()), theirs.recv_bytes))
    other.start()
    with controller.forward(model, rows, max(lengths)):  # type: ignore[arg-type]
        other.join()
    assert model.width == max(lengths)
    assert [row.dtype for row in model.rows] == [np.dtype(np.int64)] * len(rows)
    assert [row.tolist() for row in model.rows] == [row.tolist() for row in rows]


def test_a_rank_that_fails_before_the_others_vote_ends_the_same_block() -> None:
    """Its vote on the outer block meets theirs on the inner one; a second vote would wait for one that never comes."""
    group = RankGroup.__new__(RankGroup)
    votes = [{1: "no file"}, {}]
    group._vote = lambda reason: votes.pop(0)  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="rank 1: no file"), group.together(), group.together():
        pass
    assert votes == [{}]
    with group.together():
        pass
    assert votes == []


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert"])
def test_families_without_a_plan_are_refused_by_name(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, "body")
    with pytest.raises(CheckpointError, match=f"no tensor-parallel plan for {family} models"):
        check_tensor_parallel(tmp_path, 2)


def test_heads_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", "body", **HEADS)
    check_tensor_parallel(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"num_key_value_heads is 2, which tensor_parallel \(4\) does not divide"):
        check_tensor_parallel(tmp_path, 4)
