"""Every head of a reward model and a critic against plain transformers or torch: alone, batched, and after a swap."""

import functools
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from loaders import load_critic, load_reward, load_trained
from safetensors.torch import load_file
from settings import trainer_section
from tiny_checkpoints import CONFIGS, POSITIONS, VOCAB, change_tensors, save_tiny, save_with_value_head
from transformers import AutoModelForTokenClassification

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.models import modeling
from rlhf_triton.models.collation import collate
from rlhf_triton.models.mapped_tensors import check_finite
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.models.token_head import TokenHead
from rlhf_triton.python_backend.serving.loaders import load_model
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.wire.training_payload import TrainPayload

TOLERANCE = 1e-5
CAUSAL = {"llama": True, "qwen2": True, "gpt2": True, "opt": True, "gptj": True, "bert": False, "deberta-v3": False}
near = functools.partial(np.testing.assert_allclose, atol=TOLERANCE)
quiet_transformers()


def rows(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCAB, length) for length in lengths]


MIXED = rows(1, 7, POSITIONS - 2, 3, 12, 2)


@torch.no_grad()
def hidden_states(body, row):
    """Return `[length, hidden]` of one row, alone and with a mask."""
    ids = torch.from_numpy(row)[None]
    return body(input_ids=ids, attention_mask=torch.ones_like(ids))[0][0]


@torch.no_grad()
def directly(model, row):
    """Return Hugging Face's own logits of one row."""
    ids = torch.from_numpy(row)[None]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()


# A `save(folder, seed)` of the functions below writes a checkpoint and returns what scores a row without this project.
def sequence(family, **config):
    def save(folder, seed):
        model = save_tiny(folder, family, "reward", seed=seed, **config)
        return lambda row: directly(model, row)

    return save


def tokens(family):
    def save(folder, seed):
        model = save_tiny(folder, family, "critic", seed=seed)
        return lambda row: directly(model, row)[-1]

    return save


def mean(folder, seed):
    model = save_tiny(folder, "gpt2", "reward", seed=seed)
    return lambda row: model.score(hidden_states(model.base_model, row).mean(dim=0)).detach().numpy()


def value_head(family, **settings):
    def save(folder, seed):
        body, head = save_with_value_head(folder, family, seed=seed, **settings)
        return lambda row: head(hidden_states(body, row)[-1]).detach().numpy()

    return save


def same(scores):
    return scores


ATTRIBUTES = {"num_labels": 3, "reward_standardization": {"mean": 0.5, "std": 2.0}}
WEIGHTS = [0.5, -1.0, 2.0]
MEAN = {"attribute_weights": [1 / 3] * 3}  # as a critic merges them
OPENRLHF = {"prefix": "my_head", "value_head_prefix": "my_head", "mean": 0.25, "std": 0.5, "normalize_reward": True}
HEADS = {
    **{family: (sequence(family), {}, same) for family in (*CAUSAL, "roberta", "mixtral")},
    **{
        f"{family}, each token": (tokens(family), {} if CAUSAL[family] else {"pooling": "last"}, same)
        for family in CONFIGS
    },
    **{  # families without a classification class in transformers
        family: (value_head(family, prefix="v_head"), {}, same) for family in ("granite", "olmoe")
    },
    "TRL": (value_head("llama", prefix="v_head.summary", bias=True), {}, same),
    "value head of attributes": (
        value_head("gpt2", prefix="v_head", num_labels=3, bias=True),
        MEAN,
        lambda s: s.mean(keepdims=True),
    ),
    "OpenRLHF": (value_head("llama", **OPENRLHF), {}, lambda s: (s - 0.25) / 0.5),
    "OpenRLHF, not normalised": (value_head("gpt2", **{**OPENRLHF, "normalize_reward": False}), {}, same),
    "mean": (mean, {"pooling": "mean"}, same),
    "attributes": (
        sequence("llama", **ATTRIBUTES),
        MEAN,
        lambda s: (s.mean(keepdims=True) - 0.5) / 2,
    ),
    "attributes, weighted": (
        sequence("bert", **ATTRIBUTES),
        {"attribute_weights": WEIGHTS},
        lambda s: ((s @ WEIGHTS)[None] - 0.5) / 2,
    ),
    "attributes, apart": (sequence("bert", **ATTRIBUTES), {"attribute_weights": "separate"}, lambda s: (s - 0.5) / 2),
    "attributes, raw": (
        sequence("llama", **ATTRIBUTES),
        {**MEAN, "standardization": "off"},
        lambda s: s.mean(keepdims=True),
    ),
    "attributes, scaled": (
        sequence("llama", **ATTRIBUTES),
        {**MEAN, "standardization": (3, 1)},
        lambda s: s.mean(keepdims=True) - 3,
    ),
}


@pytest.mark.parametrize("kind", HEADS)
def test_reward_scores_match_transformers_before_and_after_a_swap(tmp_path, kind, monkeypatch):
    save, settings, change = HEADS[kind]
    one = tmp_path / "1"
    two = tmp_path / "2"
    expected = [np.stack([change(score(row)) for row in MIXED]) for score in (save(one, 1), save(two, 2))]
    served, fresh = (load_reward(folder, **settings) for folder in (one, two))
    for reward, right in zip((served, fresh), expected, strict=True):
        together = reward.score(MIXED)
        assert (together.dtype, together.shape) == (np.float32, right.shape)
        assert np.ptp(right) > 20 * TOLERANCE  # a constant would pass for anything
        near(together, right)
        near(reward.score(MIXED, POSITIONS), right)
        near(np.concatenate([reward.score([row]) for row in MIXED]), right)
    before = served.score(MIXED)
    if kind not in (
        "mixtral",
        "olmoe",
    ):  # their experts are stored one by one, and only transformers knows how to join them
        for slow in ("load_token_model", "load_classifier"):
            monkeypatch.setattr(modeling, slow, lambda *_: pytest.fail("built the module again"))
    other = served.with_weights(two)
    np.testing.assert_array_equal(other.score(MIXED), fresh.score(MIXED))
    assert [getattr(other, name) for name in ("skipped_pad_id", "num_outputs", "limits")] == [
        getattr(served, name) for name in ("skipped_pad_id", "num_outputs", "limits")
    ]
    for model in (served, other.with_weights(one)):
        np.testing.assert_array_equal(model.score(MIXED), before)  # the served model keeps its weights


@pytest.mark.parametrize(
    "kind",
    [kind for kind, (_, given, _) in HEADS.items() if not {"mean", "separate"} & {*map(str, given.values())}],
)
def test_a_critic_starts_with_the_head_of_its_checkpoint_and_keeps_it_when_saved(tmp_path, kind):
    """An encoder's sequence head has its own pooling, so the value head starts at 0."""
    save, settings, change = HEADS[kind]
    settings = {name: value for name, value in settings.items() if name == "standardization"}
    expected = np.stack([change(save(tmp_path / "0", 1)(row)) for row in MIXED])
    critic = load_critic(tmp_path / "0", **settings)
    is_pooled = critic.note.endswith("has its own pooling: the value head starts at 0")
    assert is_pooled == (kind in ("bert", "deberta-v3", "roberta", "attributes, weighted"))
    zero = np.full_like(expected[:, :1], -critic.mean / critic.std)
    near(last_values(critic), zero if is_pooled else expected)
    folder = saved(critic, tmp_path / "1")
    for again in (load_critic(folder), critic.with_weights(folder)):
        np.testing.assert_array_equal(last_values(again), last_values(critic))
        assert (again.mean, again.std) == (critic.mean, critic.std)
    written = json.loads((folder / "config.json").read_text())
    assert not {"normalize_reward", "value_head_prefix", "mean", "std"} & written.keys(), (
        "the constants are stored twice"
    )


def last_values(critic):
    return np.array([[values[-1]] for values in critic.values(MIXED)])


def saved(critic, folder):
    folder.mkdir()
    critic.write(folder)
    return folder


@pytest.mark.parametrize(("family", "at"), [("llama", "inside"), ("gpt2", "end")])
def test_reward_reads_the_last_token_even_if_it_is_the_padding_id(tmp_path, family, at):
    """Hugging Face takes the last token that is not the padding id: another one in a row that ends with that id."""
    model = save_tiny(tmp_path, family, "reward")  # its padding id is 0
    row = MIXED[4].copy()
    row[5 if at == "inside" else -1] = 0
    score = model.get_submodule("score")(hidden_states(model.base_model, row)).detach().numpy()
    near(load_reward(tmp_path).score([*MIXED, row])[-1], score[-1])
    near(directly(model, row), score[-1 if at == "inside" else -2])
    assert abs(score[-2, 0] - score[-1, 0]) > 1e-3


# ---- refusals ----


def test_critic_of_a_decoder_whose_family_has_an_encoder_is_refused(tmp_path):
    save_tiny(tmp_path, "pegasus", "language")
    with pytest.raises(CheckpointError, match="transformers has no classification class for pegasus models"):
        load_critic(tmp_path)


def refused(*parts):
    return pytest.raises(CheckpointError, match=".*".join(re.escape(str(part)) for part in parts))


def test_pooling_and_attribute_weights_that_do_not_fit_the_head_are_refused(tmp_path):
    save_tiny(tmp_path, "bert", "reward", num_labels=3)
    for settings, message in (
        ({"attribute_weights": [1, 2]}, ["its head has 3 outputs, but attribute_weights has 2"]),
        (
            {"pooling": "last", "attribute_weights": "separate"},
            ["pooling: last does not fit the head ", "set pooling: auto"],
        ),
    ):
        with refused(tmp_path, *message):
            load_reward(tmp_path, **settings)


NAN = float("nan")
NORM = "model.norm.weight"
MISFITS = {
    "another family": ("qwen2", {}, "is a qwen2 model, but the served model"),
    "more labels": ("llama", {"num_labels": 2}, "but the served model's is"),
    "another size": ("llama", {"intermediate_size": 32}, "intermediate_size in config.json is"),
    "another padding": ("llama", {"pad_token_id": 3}, "pad_token_id in config.json is 3"),
    "more layers": ("llama", {"num_hidden_layers": 3}, "num_hidden_layers in config.json is 3"),
    "not finite": (
        "llama",
        {},
        "other: score.weight has values that are not finite; save the model again",
        lambda own: own["score.weight"].fill_(NAN),
    ),
    "a shape of its own": ("llama", {}, "does not fit the served model", lambda own: own.update({NORM: torch.ones(3)})),
    "a missing tensor": ("llama", {}, "the weights have no", lambda own: own.pop(NORM)),
    "cut short": ("llama", {}, "is damaged"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_weights_that_do_not_fit_the_served_model_are_refused(tmp_path, kind):
    family, config, message, *changes = MISFITS[kind]
    save_tiny(tmp_path / "served", "llama", "reward")
    save_tiny(tmp_path / "other", family, "reward", **config)
    for change in changes:
        change_tensors(tmp_path / "other", change)
    if kind == "cut short":
        file = tmp_path / "other" / "model.safetensors"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with refused(message):
        load_model("load_reward", tmp_path / "other", load_reward(tmp_path / "served"), {})


@pytest.mark.parametrize(("loader", "kind"), [("load_reward", "reward"), ("load_language_model", "language")])
def test_load_model_refuses_non_finite_weights(tmp_path, loader, kind):
    save_tiny(tmp_path, "llama", kind)
    change_tensors(tmp_path, lambda own: own["model.layers.0.mlp.up_proj.weight"][0].fill_(NAN))
    with refused(f"{tmp_path}: model.layers.0.mlp.up_proj.weight has values that are not finite; save the model again"):
        load_model(loader, tmp_path, None, {})


def test_finite_weights_whose_sum_overflows_are_accepted():
    module = torch.nn.Linear(64, 1, bias=False)
    module.weight.data.fill_(3e38)
    check_finite(module)


# ---- a bfloat16 body under an fp32 head ----


@pytest.mark.parametrize("family", [*CONFIGS, "roberta"])
def test_head_stays_float32_under_a_bfloat16_body(tmp_path, family):
    model = save_tiny(tmp_path, family, "reward")
    reward = load_reward(tmp_path, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    name = next(n for n in ("score", "classifier", "classifier.out_proj") if f"{n}.weight" in stored)
    head = [p for p in reward.model.parameters() if p.dtype == torch.float32]
    assert torch.equal(head[0].cpu(), stored[f"{name}.weight"])  # not a rounded copy
    assert not torch.equal(head[0].bfloat16().float(), head[0])
    assert all(p.dtype == torch.bfloat16 for p in reward.model.base_model.parameters())
    scores = reward.score(MIXED)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [directly(model, row) for row in MIXED], atol=0.3)
    np.testing.assert_array_equal(reward.with_weights(tmp_path).score(MIXED), scores)


# ---- critics: masks, saved versions, copies of the file ----


@pytest.mark.parametrize(("family", "is_causal"), CAUSAL.items())
def test_causal_models_run_without_a_mask_and_give_the_masked_values(tmp_path, family, is_causal):
    assert TokenHead(save_tiny(tmp_path, family, "critic" if family in CONFIGS else "reward")).is_causal is is_causal
    critic = load_critic(tmp_path)
    seen = []
    body = critic.model.base_model
    ids, attention, lengths = collate(MIXED, critic.model.device)
    with torch.no_grad():
        hidden = body(input_ids=ids, attention_mask=attention)[0]
        head = next(m for m in reversed(list(critic.model.modules())) if isinstance(m, torch.nn.Linear))
        expected = head(hidden)[..., 0].cpu()
    body.register_forward_pre_hook(lambda _, args, given: seen.append(given.get("attention_mask")), with_kwargs=True)
    for values, theirs, length in zip(critic.values(MIXED), expected, lengths, strict=True):
        near(values, theirs[:length])
    masks = [mask if mask is None else int(mask.sum()) for mask in seen]
    assert masks == [None if is_causal else int(lengths.sum())]
    training = critic.forward(ids, attention)
    assert training.requires_grad
    np.testing.assert_allclose(training.detach().cpu()[2], critic.values(MIXED)[2], atol=1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_saved_critic_loads_as_a_transformers_checkpoint(tmp_path, family):
    save_tiny(tmp_path / "0", family, "body", reward_standardization={"mean": 0.5, "std": 2.0})
    critic = load_critic(tmp_path / "0", standardization="off")
    assert not any(values.any() for values in critic.values(MIXED)), "the value head starts at 0"
    critic = load_critic(tmp_path / "0")
    with torch.no_grad():
        critic.model.get_submodule("score" if family in ("llama", "qwen2") else "classifier").weight += 0.1
    folder = saved(critic, tmp_path / "1")
    model, report = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not [*report["missing_keys"], *report["unexpected_keys"]]
    for values, row in zip(critic.values(MIXED), MIXED, strict=True):
        near(values, (directly(model.eval(), row)[:, 0] - 0.5) / 2)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("shards", ["5GB", "3KB"])
def test_training_a_critic_does_not_change_its_mapped_file(tmp_path, shards):
    save_tiny(tmp_path / "whole", "llama", "critic").save_pretrained(tmp_path, max_shard_size=shards)
    shutil.rmtree(tmp_path / "whole")
    before = {file: hashlib.sha256(file.read_bytes()).digest() for file in tmp_path.glob("*.safetensors")}
    assert (len(before) > 2) == (shards == "3KB")
    serving = load_critic(tmp_path)
    trained = load_trained(tmp_path)
    mapped = {parameter.data_ptr() for parameter in trained.model.parameters() if not parameter.is_cuda}
    update = CriticUpdate(trained, trainer_section(lr=0.1))
    assert not mapped & {parameter.data_ptr() for parameter in trained.model.parameters()}
    served = serving.values(MIXED)
    ones = np.ones(11, np.float32)
    update.train(TrainPayload(MIXED[4], np.array([12]), ones, ones, ones), lambda _: None)
    assert not np.allclose(update.critic.values(MIXED)[2], served[2])
    np.testing.assert_array_equal(serving.values(MIXED)[2], served[2])
    assert before == {file: hashlib.sha256(file.read_bytes()).digest() for file in tmp_path.glob("*.safetensors")}
