"""What a critic starts from, what is saved of it, and what its forward leaves out: masks, and copies of the file."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import CONFIGS, POSITIONS, VOCAB, change_config, save_tiny, save_with_value_head
from transformers import AutoModelForTokenClassification

from python_backend.models.batching import padded_width
from python_backend.models.collation import collate
from python_backend.models.modeling import CriticModel, quiet_transformers, save_critic
from python_backend.models.token_head import TokenHead
from python_backend.wire.training_payload import TrainPayload
from tests.support.loaders import load_critic, load_reward
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate

TOLERANCE = 1e-5
CAUSAL = {"llama": True, "qwen2": True, "gpt2": True, "opt": True, "gptj": True, "bert": False, "deberta-v3": False}
DECODERS = [family for family, is_causal in CAUSAL.items() if is_causal]
WITHOUT_TOKEN_CLASS = ["opt", "gptj"]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    quiet_transformers()


def rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, length) for length in lengths]


MIXED = rows(1, 7, POSITIONS, 3, 12, 2)


def last_values(critic: CriticModel) -> np.ndarray:
    return np.array([[values[-1]] for values in critic.values(MIXED)])


def saved(critic: CriticModel, folder: Path, **settings: torch.dtype) -> Path:
    folder.mkdir()
    save_critic(critic, folder, **settings)
    return folder


# ---- the first value head ----


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoders_score_becomes_the_value_head(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "reward", reward_standardization={"mean": 0.5, "std": 2.0})
    critic = load_critic(tmp_path)
    np.testing.assert_allclose(last_values(critic), load_reward(tmp_path).score(MIXED), atol=TOLERANCE)
    assert critic.note == "the value head is score"
    raw = load_critic(tmp_path, standardization="off")
    np.testing.assert_allclose(last_values(raw), last_values(critic) * 2 + 0.5, atol=TOLERANCE)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(("prefix", "bias"), [("v_head.summary", True), ("value_head", False)])
def test_a_value_head_stays_one(tmp_path: Path, family: str, prefix: str, bias: bool):
    body, head = save_with_value_head(tmp_path, family, prefix=prefix, bias=bias)
    with torch.no_grad():
        expected = [head(body(input_ids=torch.from_numpy(row)[None])[0])[0, :, 0].numpy() for row in MIXED]
    for values, alone in zip(load_critic(tmp_path).values(MIXED), expected, strict=True):
        np.testing.assert_allclose(values, alone, atol=TOLERANCE)


def test_attributes_become_one_value(tmp_path: Path):
    save_tiny(tmp_path, "llama", "reward", num_labels=3)
    critic = load_critic(tmp_path, attribute_weights=[0.5, -1, 2])
    expected = load_reward(tmp_path, attribute_weights=[0.5, -1, 2]).score(MIXED)
    np.testing.assert_allclose(last_values(critic), expected, atol=TOLERANCE)
    np.testing.assert_allclose(last_values(load_critic(tmp_path)), load_reward(tmp_path).score(MIXED), atol=TOLERANCE)
    assert critic.note.endswith("its 3 outputs merged into one")
    assert critic.model.config.num_labels == 1


def test_the_bias_of_attributes_is_merged_with_them(tmp_path: Path):
    save_with_value_head(tmp_path, "gpt2", prefix="v_head", num_labels=3, bias=True)
    expected = load_reward(tmp_path, attribute_weights=[0.5, -1, 2]).score(MIXED)
    critic = load_critic(tmp_path, attribute_weights=[0.5, -1, 2])
    np.testing.assert_allclose(last_values(critic), expected, atol=TOLERANCE)
    assert load_file(saved(critic, tmp_path / "1") / "model.safetensors")["classifier.bias"].shape == (1,)


@pytest.mark.parametrize("family", ["bert", "deberta-v3", "roberta"])
def test_under_a_pooled_classifier_the_head_starts_at_0(tmp_path: Path, family: str):
    save_tiny(tmp_path, family, "reward")
    critic = load_critic(tmp_path)
    assert all((values == 0).all() for values in critic.values(MIXED))
    assert critic.note.endswith("has its own pooling: the value head starts at 0")


# ---- what is saved ----


@pytest.mark.parametrize(
    ("family", "head"),
    [*itertools.product(CONFIGS, ("critic", "reward", "body")), *((f, "language") for f in ("llama", "qwen2", "gpt2"))],
)
def test_a_saved_critic_is_an_ordinary_checkpoint(tmp_path: Path, family: str, head: str):
    save_tiny(tmp_path / "0", family, head)
    change_config(tmp_path / "0", reward_standardization={"mean": 0.5, "std": 2.0})
    critic = load_critic(tmp_path / "0")
    with torch.no_grad():
        critic.model.get_submodule("score" if family in ("llama", "qwen2") else "classifier").weight += 0.1
    folder = saved(critic, tmp_path / "1")
    model, report = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids, attention, lengths = collate(MIXED, "cpu")
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=attention).logits[..., 0].numpy()
    for values, theirs, length in zip(critic.values(MIXED), logits, lengths, strict=True):
        np.testing.assert_allclose(values, (theirs[:length] - 0.5) / 2, atol=TOLERANCE)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]
    for again in (load_critic(folder), load_critic(tmp_path / "0").with_weights(folder)):
        np.testing.assert_array_equal(last_values(again), last_values(critic))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", WITHOUT_TOKEN_CLASS)
def test_families_without_a_token_class_keep_their_head(tmp_path: Path, family: str, bias: bool):
    save_with_value_head(tmp_path / "0", family, prefix="v_head.summary", bias=bias)
    critic = load_critic(tmp_path / "0")
    folder = saved(critic, tmp_path / "1")
    assert ("score.bias" in load_file(folder / "model.safetensors")) is bias
    for again in (load_critic(folder), critic.with_weights(folder)):
        np.testing.assert_array_equal(last_values(again), last_values(critic))


def test_the_constants_travel_with_the_version(tmp_path: Path):
    settings = {"value_head_prefix": "value_head", "normalize_reward": True, "mean": 0.25, "std": 0.5}
    save_with_value_head(tmp_path / "0", "llama", prefix="value_head", **settings)
    critic = load_critic(tmp_path / "0")
    assert (critic.mean, critic.std) == (0.25, 0.5)
    for number, standardization in (("1", "checkpoint"), ("2", "off")):
        folder = saved(load_critic(tmp_path / "0", standardization=standardization), tmp_path / number)
        expected = (0.25, 0.5) if standardization == "checkpoint" else (0.0, 1.0)
        assert not settings.keys() & json.loads((folder / "config.json").read_text()).keys()  # said once
        for again in (load_critic(folder), critic.with_weights(folder)):
            assert (again.mean, again.std) == expected


def test_values_in_training_are_those_of_inference(tmp_path: Path):
    save_tiny(tmp_path, "llama", "critic", reward_standardization={"mean": 0.5, "std": 2.0})
    critic = load_critic(tmp_path)
    ids, attention, _ = collate(MIXED, critic.model.device)
    values = critic.forward(ids, attention)
    assert values.requires_grad
    np.testing.assert_array_equal(values.detach().cpu()[2], critic.values(MIXED)[2])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_bfloat16_body_under_an_fp32_head(tmp_path: Path, family: str):
    save_tiny(tmp_path / "0", family, "critic")
    exact = load_critic(tmp_path / "0")
    critic = load_critic(tmp_path / "0", dtype="bfloat16")
    name = "score" if family in ("llama", "qwen2") else "classifier"
    head = load_file(tmp_path / "0" / "model.safetensors")[f"{name}.weight"]
    swapped = critic.with_weights(saved(exact, tmp_path / "1"))
    from_half = critic.with_weights(saved(exact, tmp_path / "2", dtype=torch.bfloat16))
    for half in (critic, swapped, from_half):
        assert torch.equal(half.model.get_parameter(f"{name}.weight").cpu(), head)
        assert {p.dtype for p in half.model.base_model.parameters()} == {torch.bfloat16}
        np.testing.assert_array_equal(last_values(half), last_values(critic))
    assert critic.values(MIXED)[0].dtype == np.float32
    np.testing.assert_allclose(last_values(critic), last_values(exact), atol=0.3)


# ---- no mask for causal bodies ----


@pytest.mark.parametrize(("family", "is_causal"), CAUSAL.items())
def test_causality_is_measured(tmp_path: Path, family: str, is_causal: bool):
    assert TokenHead(save_tiny(tmp_path, family, "reward")).is_causal is is_causal


@pytest.mark.parametrize("family", CAUSAL)
def test_without_a_mask_the_values_are_those_under_huggingfaces_mask(tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family, "reward")
    critic = load_critic(tmp_path)
    ids, attention, lengths = collate(MIXED, critic.model.device)
    with torch.no_grad():
        hidden = critic.model.base_model(input_ids=ids, attention_mask=attention)[0]
        expected = next(m for m in reversed(list(critic.model.modules())) if isinstance(m, torch.nn.Linear))(hidden)
    for values, theirs, length in zip(critic.values(MIXED), expected[..., 0].cpu(), lengths, strict=True):
        np.testing.assert_allclose(values, theirs[:length], atol=TOLERANCE)
    assert model.config.model_type == critic.model.config.model_type


def test_a_causal_body_gets_no_mask_and_another_one_does(tmp_path: Path):
    seen = {}
    for family in ("gpt2", "bert"):
        save_tiny(tmp_path / family, family, "critic")
        critic = load_critic(tmp_path / family)
        critic.model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs, family=family: seen.update({family: kwargs.get("attention_mask")}), with_kwargs=True
        )
        critic.values(MIXED)
    assert seen["gpt2"] is None
    assert seen["bert"].sum() == sum(row.size for row in MIXED)


@pytest.mark.parametrize(
    ("multiple", "limit", "width"), [(1, None, 9), (8, None, 16), (8, 12, 12), (64, 32, 32), (8, 5, 9)]
)
def test_padding_to_a_multiple_stops_at_the_models_positions(multiple: int, limit: int | None, width: int):
    lengths = [9, 3]
    assert padded_width(9, multiple, limit) == width
    ids, attention, _ = collate(rows(*lengths), "cpu", width)
    assert ids.shape == attention.shape == (2, width)
    assert attention.sum(1).tolist() == lengths


# ---- weights are mapped, and training leaves the file alone ----


@pytest.mark.parametrize("shards", ["5GB", "3KB"])
def test_a_file_stays_as_it_is_while_a_critic_that_came_from_it_trains(tmp_path: Path, shards: str):
    save_tiny(tmp_path, "llama", "critic").save_pretrained(tmp_path, max_shard_size=shards)
    if shards == "3KB":
        (tmp_path / "model.safetensors").unlink()
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    before = {file: hashlib.sha256(file.read_bytes()).digest() for file in tmp_path.glob("*.safetensors")}
    serving, trained = load_critic(tmp_path), load_critic(tmp_path)
    mapped = {parameter.data_ptr() for parameter in trained.model.parameters() if not parameter.is_cuda}
    update = CriticUpdate(trained, trainer_section(lr=0.1))
    assert not mapped & {parameter.data_ptr() for parameter in trained.model.parameters()}
    served = serving.values(MIXED)
    ones = np.ones(11, np.float32)
    update.train(TrainPayload(MIXED[4], np.array([12]), ones, ones, ones), lambda _: None)
    assert not np.allclose(update.critic.values(MIXED)[2], served[2])
    np.testing.assert_array_equal(serving.values(MIXED)[2], served[2])
    assert before == {file: hashlib.sha256(file.read_bytes()).digest() for file in tmp_path.glob("*.safetensors")}
