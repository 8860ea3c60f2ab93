"""`RewardModel.with_weights`: other weights of the same reward model, as a fresh load would give them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config, save_tiny, save_with_value_head

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models import modeling
from python_backend.models.modeling import quiet_transformers
from python_backend.serving.ranks.loaders import load_model
from tests.support.loaders import load_reward

ROWS = [np.arange(2, 2 + length) for length in (5, 1, 20)]
Save = Callable[[Path, int], Any]
HEADS: dict[str, tuple[Save, dict[str, Any]]] = {
    **{
        family: (lambda folder, seed, family=family: save_tiny(folder, family, "reward", seed=seed), {})
        for family in ("llama", "qwen2", "gpt2", "opt", "gptj", "bert", "deberta-v3", "roberta", "mixtral")
    },
    "five labels": (
        lambda folder, seed: save_tiny(folder, "llama", "reward", seed=seed, num_labels=5),
        {"attribute_weights": [0.1, 0.2, 0.3, 0.2, 0.2]},
    ),
    "five labels of an encoder": (
        lambda folder, seed: save_tiny(folder, "bert", "reward", seed=seed, num_labels=5),
        {"merge_attributes": False},
    ),
    "mean, bfloat16": (
        lambda folder, seed: save_tiny(folder, "llama", "reward", seed=seed),
        {"pooling": "mean", "dtype": "bfloat16"},
    ),
    "value head": (
        lambda folder, seed: save_with_value_head(folder, "llama", prefix="v_head.summary", bias=True, seed=seed),
        {},
    ),
    "OpenRLHF": (
        lambda folder, seed: save_with_value_head(
            folder,
            "llama",
            prefix="my_head",
            seed=seed,
            value_head_prefix="my_head",
            normalize_reward=True,
            mean=0.1 * seed,
            std=2.0,
        ),
        {},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    quiet_transformers()


@pytest.mark.parametrize("kind", HEADS)
def test_it_scores_as_a_fresh_load_does(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    save, settings = HEADS[kind]
    for seed in (1, 2):
        save(tmp_path / str(seed), seed)
    served, fresh = (load_reward(tmp_path / str(seed), **settings) for seed in (1, 2))
    before = served.score(ROWS)
    if kind != "mixtral":  # its experts are stored one by one, and only transformers knows how to join them
        for slow in ("load_token_model", "load_classifier"):
            monkeypatch.setattr(modeling, slow, lambda *_: pytest.fail("built the module again"))
    other = served.with_weights(tmp_path / "2")
    assert np.array_equal(other.score(ROWS), fresh.score(ROWS))
    assert (other.skipped_pad_id, other.num_outputs, other.limits) == (
        served.skipped_pad_id,
        served.num_outputs,
        served.limits,
    )
    assert np.array_equal(served.score(ROWS), before), "the served model keeps its weights"
    assert not np.allclose(other.score(ROWS), before)
    again = other.with_weights(tmp_path / "1")
    assert np.array_equal(again.score(ROWS), before)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["score.weight"][0, 3] = float("nan")


MISFITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not finite": (lambda folder: rewrite(folder, poison), r"score\.weight has values that are not finite"),
    "another family": (lambda folder: save_tiny(folder, "qwen2", "reward"), "is a qwen2 model, but the served model"),
    "more labels": (lambda folder: save_tiny(folder, "llama", "reward", num_labels=2), "another head than the served"),
    "another size": (
        lambda folder: save_tiny(folder, "llama", "reward", intermediate_size=32),
        "intermediate_size in config.json is",
    ),
    "another padding": (lambda folder: change_config(folder, pad_token_id=3), "pad_token_id in config.json is 3"),
    "a shape of its own": (
        lambda folder: rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        "does not fit the served model",
    ),
    "a missing tensor": (lambda folder: rewrite(folder, lambda t: t.pop("model.norm.weight")), "the weights lack"),
    "cut short": (lambda folder: truncate(folder / "model.safetensors"), "is damaged"),
}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_refused(tmp_path: Path, kind: str):
    damage, message = MISFITS[kind]
    save_tiny(tmp_path / "served", "llama", "reward")
    shutil.copytree(tmp_path / "served", tmp_path / "other")
    damage(tmp_path / "other")
    served = load_reward(tmp_path / "served")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model("load_reward", tmp_path / "other", served, {"finite": True})
    print(caught.value)
