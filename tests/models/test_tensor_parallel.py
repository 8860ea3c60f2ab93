"""Models split over two processes: the outputs of one process, and new weights that all ranks accept or none."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from ranks import serving_ranks
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE, CheckpointError
from rlhf_triton.checkpoints.tensor_parallel import check_tensor_parallel
from rlhf_triton.models import token_head
from rlhf_triton.models.modeling import CriticModel
from rlhf_triton.models.tensor_parallel import RankGroup
from rlhf_triton.python_backend.serving.loaders import load_model
from rlhf_triton.python_backend.serving.ranks.process import Rank

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


FAMILIES = {
    "llama": {**HEADS, "intermediate_size": 25},  # rank 1 gets one feature less
    "qwen2": {**HEADS, "tie_word_embeddings": True},
    "mistral": HEADS,
    "gpt-neox": {"num_attention_heads": 4},  # biases in the row-wise layers, and another name of the head
}


REFERENCE = {"temperature": 0.7, "banned_token_ids": [3]}


LAYER = "model.layers.1.self_attn.q_proj.weight"


TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks():
    """Two ranks on the CPU; this process is rank 0."""
    with serving_ranks("cpu") as ranks:
        yield ranks


def random_rows(*lengths):
    generator = np.random.default_rng(0)
    return [generator.integers(3, 40, length) for length in lengths]


ROWS = random_rows(1, 3, 9, 30)


def outputs(model):
    """All outputs of a forward pass over `ROWS`, in one array."""
    if isinstance(model, CriticModel):
        return np.concatenate(model.values(ROWS, 32))
    return np.concatenate(model.score(ROWS, 32) if hasattr(model, "score") else model.launch(ROWS, 32)())


def assert_same(ranks, split, whole):
    with ranks.forward(split, ROWS, 32):
        found = outputs(split)
    np.testing.assert_allclose(found, outputs(whole), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("loader", "head", "options"),
    [("load_reward", "reward", {}), ("load_critic", "critic", {}), ("load_language_model", "language", REFERENCE)],
)
def test_tensor_parallel_outputs_match_one_process(ranks, tmp_path, family, loader, head, options):
    save_tiny(tmp_path, family, head, **FAMILIES[family])
    split = ranks.load(loader, tmp_path, None, options)
    whole = load_model(loader, tmp_path, None, options)
    assert_same(ranks, split, whole)
    num_split, num_whole = (sum(p.numel() for p in model.model.base_model.parameters()) for model in (split, whole))
    assert num_split < 0.8 * num_whole, "the layers are not split"


@pytest.fixture
def versions(tmp_path):
    """Two critics of one architecture, saved as the sidecar saves them."""
    folders = [tmp_path / "1", tmp_path / "2"]
    for seed, folder in enumerate(folders):
        save_tiny(folder, "llama", "critic", seed=seed, **FAMILIES["llama"])
        load_model("load_critic", folder, None, {}).write(folder)
    return folders


def test_tensor_parallel_versions_keep_their_own_weights(ranks, versions):
    wholes = [load_model("load_critic", folder, None, {}) for folder in versions]
    first = ranks.load("load_critic", versions[0], None, {})
    second = ranks.load("load_critic", versions[1], first, {})
    for split, whole in ((first, wholes[0]), (second, wholes[1]), (first, wholes[0])):
        assert_same(ranks, split, whole)
    modules = list(first.model.modules())
    del first, split
    assert not any(module._parameters for module in modules), "the memory of an unused version is not freed"
    third = ranks.load("load_critic", versions[0], second, {})  # also tells rank 1 to free the first version
    assert_same(ranks, third, wholes[0])


def test_tensor_parallel_swap_runs_no_forward_while_loading(ranks, tmp_path, monkeypatch):
    """A request's collectives could meet those of a probe, which another rank runs before or after the request."""
    for seed in (1, 2):
        save_tiny(tmp_path / str(seed), "llama", "reward", seed=seed, **FAMILIES["llama"])
    served = ranks.load("load_reward", tmp_path / "1", None, {})
    whole = load_model("load_reward", tmp_path / "2", None, {})
    for name in ("measure_causality", "depends_on_padding"):
        monkeypatch.setattr(token_head, name, Mock(side_effect=AssertionError("a forward pass while loading")))
    assert_same(ranks, ranks.load("load_reward", tmp_path / "2", served, {}), whole)


@pytest.mark.parametrize("is_cut", [False, True])
def test_version_refused_by_one_rank_is_served_by_none(ranks, versions, is_cut):
    """The fault is in the slice that only the last rank reads: a row is missing, or contains NaN."""
    served = ranks.load("load_critic", versions[0], None, {})
    tensors = load_file(versions[1] / WEIGHTS_FILE)
    tensors[LAYER][-1] = torch.nan
    tensors[LAYER] = tensors[LAYER][: -1 if is_cut else None].contiguous()
    save_file(tensors, versions[1] / WEIGHTS_FILE, metadata={"format": "pt"})
    for previous in (served, None):  # the first version of a server, too
        with pytest.raises(
            CheckpointError, match="rank 1: " + ("" if is_cut else f".*: {LAYER} has values that are not")
        ):
            ranks.load("load_critic", versions[1], previous, {})
    assert_same(ranks, served, load_model("load_critic", versions[0], None, {}))


def test_rank_loads_models_one_at_a_time(monkeypatch):
    """Rank 0 may begin a load while a refused one still ends on another rank: both would count votes together."""
    log = []
    may_end = threading.Event()

    def load(group, loader, folder, *_):
        log.append(folder)
        may_end.wait()
        log.append(folder)
        return Mock()

    monkeypatch.setattr("rlhf_triton.python_backend.serving.ranks.process.load_part", load)
    rank = Rank(SimpleNamespace())
    for key in range(2):
        message = {"op": "load", "key": key, "unused": [], "loader": "", "folder": str(key), "served": None}
        rank.execute({**message, "options": {}}, Mock())
    time.sleep(0.2)  # enough to begin both, if they may
    may_end.set()
    with rank._loaded:
        rank._loaded.wait_for(lambda: len(rank._models) == 2)
    assert log[0] == log[1] != log[2] == log[3]


def test_rank_that_fails_before_the_vote_votes_once():
    """Its vote on the outer block meets theirs on the inner one; a second vote would wait for one that never comes."""
    group = RankGroup.__new__(RankGroup)
    group._gather_reasons = Mock(side_effect=[{1: "no file"}, {}])
    with pytest.raises(CheckpointError, match="rank 1: no file"), group.run_on_all_ranks(), group.run_on_all_ranks():
        pass
    assert group._gather_reasons.call_count == 1
    with group.run_on_all_ranks():
        pass
    assert group._gather_reasons.call_count == 2


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        *((family, {}, f"no tensor-parallel plan for {family} models") for family in ("gpt2", "opt", "bert")),
        ("llama", HEADS, r"num_key_value_heads is 2, which tensor_parallel \(4\) does not divide"),
    ],
)
def test_models_that_tensor_parallel_cannot_split_are_refused(tmp_path, family, sizes, message):
    save_tiny(tmp_path, family, "body", **sizes)
    with pytest.raises(CheckpointError, match=message):
        check_tensor_parallel(tmp_path, 4)
    if sizes:
        check_tensor_parallel(tmp_path, 2)
