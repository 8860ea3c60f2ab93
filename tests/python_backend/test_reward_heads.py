"""Rewards of every head that `load_reward` finds, against a forward of plain transformers or plain torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import CONFIGS, POSITIONS, VOCAB, add_tensors, change_config, save_tiny, save_with_value_head

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.modeling import quiet_transformers
from tests.support.loaders import load_reward

TOLERANCE = 1e-5
DECODERS = ["llama", "qwen2", "gpt2", "opt", "gptj"]
ENCODERS = ["bert", "deberta-v3", "roberta"]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    quiet_transformers()


def rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length) for length in lengths]


MIXED = rows(1, 7, POSITIONS - 2, 3, 12, 2)


@torch.no_grad()
def hidden_states(body: Any, row: np.ndarray) -> torch.Tensor:
    """`[length, hidden]` of one row, alone and with a mask."""
    ids = torch.from_numpy(row)[None]
    return body(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0]


@torch.no_grad()
def directly(model: Any, row: np.ndarray) -> np.ndarray:
    """Hugging Face's own logits `[A]` of one row."""
    ids = torch.from_numpy(row)[None]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()


def assert_scores(folder: Path, expected: list[np.ndarray], **settings: Any) -> None:
    reward = load_reward(folder, **settings)
    together, alone = reward.score(MIXED), np.concatenate([reward.score([row]) for row in MIXED])
    assert together.dtype == np.float32
    assert together.shape == (len(MIXED), reward.num_outputs)
    assert np.ptp(np.stack(expected)) > 20 * TOLERANCE  # a constant would pass for anything
    np.testing.assert_allclose(together, np.stack(expected), atol=TOLERANCE)
    np.testing.assert_allclose(alone, together, atol=TOLERANCE)
    np.testing.assert_allclose(reward.score(MIXED, POSITIONS), together, atol=TOLERANCE)


@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_a_sequence_classification_head(tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family, "reward")
    assert_scores(tmp_path, [directly(model, row) for row in MIXED])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_token_classification_head_at_the_last_token(tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family, "critic")
    assert_scores(tmp_path, [directly(model, row)[-1] for row in MIXED])


@pytest.mark.parametrize(("prefix", "bias"), [("v_head.summary", True), ("v_head", True), ("value_head", False)])
@pytest.mark.parametrize("family", DECODERS)
def test_a_value_head_beside_a_language_model(tmp_path: Path, family: str, prefix: str, bias: bool):
    body, head = save_with_value_head(tmp_path, family, prefix=prefix, bias=bias)
    with torch.no_grad():
        assert_scores(tmp_path, [head(hidden_states(body, row)[-1]).numpy() for row in MIXED])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_openrlhfs_head_and_constants(tmp_path: Path, family: str):
    settings = {"value_head_prefix": "my_head", "normalize_reward": True, "mean": 0.25, "std": 0.5}
    body, head = save_with_value_head(tmp_path, family, prefix="my_head", **settings)
    with torch.no_grad():
        expected = [((head(hidden_states(body, row)[-1]) - 0.25) / 0.5).numpy() for row in MIXED]
    assert_scores(tmp_path, expected)
    assert_scores(tmp_path, [score * 0.5 + 0.25 for score in expected], standardization="off")
    change_config(tmp_path, normalize_reward=False)
    assert_scores(tmp_path, [score * 0.5 + 0.25 for score in expected])


# ---- which token is the last ----


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("at", ["inside", "end"])
def test_the_last_token_is_at_length_minus_1_also_where_it_is_the_padding_id(tmp_path: Path, family: str, at: str):
    """Hugging Face takes the last token that is not the padding id: another one in a row that ends with that id."""
    model = save_tiny(tmp_path, family, "reward")  # its padding id is 0
    row = MIXED[4].copy()
    row[5 if at == "inside" else -1] = 0
    with torch.no_grad():
        score = model.get_submodule("score")(hidden_states(model.base_model, row)).numpy()
    reward = load_reward(tmp_path)
    np.testing.assert_allclose(reward.score([*MIXED, row])[-1], score[-1], atol=TOLERANCE)
    theirs = directly(model, row)
    np.testing.assert_allclose(theirs, score[-1 if at == "inside" else -2], atol=TOLERANCE)
    if at == "end":
        assert abs(theirs[0] - score[-1, 0]) > 1e-3


# ---- pooling, attributes, constants ----


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_mean_pooling(tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family, "reward")
    with torch.no_grad():
        expected = [model.score(hidden_states(model.base_model, row).mean(dim=0)).numpy() for row in MIXED]
    assert_scores(tmp_path, expected, pooling="mean")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_attributes_merged_and_not(tmp_path: Path, family: str):
    constants = {"mean": 0.5, "std": 2.0}
    model = save_tiny(tmp_path, family, "reward", num_labels=3, reward_standardization=constants)
    scores = [directly(model, row) for row in MIXED]
    weights = np.array([0.5, -1.0, 2.0], np.float32)
    assert load_reward(tmp_path).num_outputs == 1
    assert_scores(tmp_path, [(score.mean(keepdims=True) - 0.5) / 2 for score in scores])
    assert_scores(tmp_path, [((score @ weights)[None] - 0.5) / 2 for score in scores], attribute_weights=weights)
    assert_scores(tmp_path, [(score - 0.5) / 2 for score in scores], merge_attributes=False)
    assert load_reward(tmp_path, merge_attributes=False).num_outputs == 3
    assert_scores(tmp_path, [score[:1] for score in scores], attribute_weights=[1, 0, 0], standardization="off")
    assert_scores(tmp_path, [score[:1] - 3 for score in scores], attribute_weights=[1, 0, 0], standardization=(3, 1))


def refused(*parts: object):
    return pytest.raises(CheckpointError, match=".*".join(re.escape(str(part)) for part in parts))


def test_settings_that_do_not_fit(tmp_path: Path):
    save_tiny(tmp_path, "bert", "reward", num_labels=3)
    with refused(tmp_path, "2 attribute weights for a head of 3 outputs"):
        load_reward(tmp_path, attribute_weights=[1, 2])
    for pooling in ("last", "mean"):
        with refused(tmp_path, f"pooling: {pooling} does not fit the head ", "set pooling: auto"):
            load_reward(tmp_path, pooling=pooling)
    with refused(tmp_path, "std is 0, must be above 0"):
        load_reward(tmp_path, standardization=(0.0, 0.0))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_body_is_no_reward(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "body")
    with refused(tmp_path, "is not a trained reward model"):
        load_reward(tmp_path)


def test_a_pooled_head_that_lacks_its_first_layer_is_no_reward(tmp_path: Path):
    save_tiny(tmp_path, "deberta-v3", "critic")  # its classifier, under the name of the sequence classes
    change_config(tmp_path, architectures=["DebertaV2ForSequenceClassification"])
    with refused(tmp_path, "the weights lack pooler.dense.bias, pooler.dense.weight"):
        load_reward(tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "weight"),
    [("llama", "body", "v_head.summary.weight"), ("bert", "reward", "classifier.weight")],
)
def test_a_head_of_another_width_is_named(tmp_path: Path, family: str, kind: str, weight: str):
    save_tiny(tmp_path, family, kind)
    add_tensors(tmp_path, {weight: torch.zeros(1, 24)})
    with refused(tmp_path, weight, "has shape [1, 24]", "[num_labels, 16]"):
        load_reward(tmp_path)


# ---- a bfloat16 body under an fp32 head ----


@pytest.mark.parametrize("family", [*CONFIGS, "roberta"])
def test_the_head_keeps_its_fp32_values_under_a_bfloat16_body(tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family, "reward")
    reward = load_reward(tmp_path, dtype="bfloat16")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in ("score", "classifier", "classifier.out_proj") if f"{n}.weight" in tensors)
    head = [p for p in reward.model.parameters() if p.dtype == torch.float32]
    assert torch.equal(head[0].cpu(), tensors[f"{name}.weight"])  # not a rounded copy
    assert not torch.equal(head[0].bfloat16().float(), head[0])
    assert all(p.dtype == torch.bfloat16 for p in reward.model.base_model.parameters())
    scores = reward.score(MIXED)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [directly(model, row) for row in MIXED], atol=0.3)
    if reward.model.base_model_prefix in ("model", "transformer"):
        with torch.no_grad():  # by hand: the body's bfloat16 states through the fp32 head
            inputs = [torch.from_numpy(row)[None].to(reward.model.device) for row in MIXED]
            states = [reward.model.base_model(input_ids=ids)[0][0, -1].cpu() for ids in inputs]
            expected = torch.stack(states).float() @ tensors[f"{name}.weight"].T
        alone = np.concatenate([reward.score([row]) for row in MIXED])
        np.testing.assert_allclose(alone, expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_compiled_body_scores_the_same(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "reward")
    expected = load_reward(tmp_path).score(MIXED)
    np.testing.assert_allclose(load_reward(tmp_path, compile_forward=True).score(MIXED), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_without_a_compiler_compile_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny(tmp_path, "llama", "reward")
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    with refused("torch.compile does not work here", "install a C++ compiler"):
        load_reward(tmp_path, compile_forward=True)
