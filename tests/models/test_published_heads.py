"""Tiny folders shaped like published reward models against their published formulas, intact and damaged.

A damaged folder either scores by the formula without the missing tensor, or is refused by name.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaders import load_critic, load_process_reward, load_reward, load_trained
from random_models import word_tokenizer
from safetensors.torch import load_file, save_file
from settings import trainer_section
from tiny_checkpoints import change_config
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SEQUENCE_CLASSES

from rlhf_triton.checkpoints.heads import GATE_HEADERS
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.labels import attribute_weights
from rlhf_triton.config.sections import RewardSection
from rlhf_triton.models import transformers_classes
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.wire.training_payload import TrainPayload

H = 16
VOCAB = 64
LARGE = {"llama": 128_300, "gemma2": 2_600}  # vocabularies with the header of an answer
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
FAMILIES = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 32},
    "t5": {"d_model": H, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": H},
    "distilbert": {"dim": H, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    "xlnet": {"d_model": H, "n_head": 2, "n_layer": 2, "d_inner": 24},
    "jamba": {
        "num_experts": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "modernbert": {"global_attn_every_n_layers": 2, "cls_token_id": 3, "sep_token_id": 4},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
}
quiet_transformers()
refused = functools.partial(pytest.raises, CheckpointError)

Tensors = dict[str, Tensor]
Formula = Callable[[Tensor, int, Tensors], Tensor]  # hidden states [S, H], where the gate reads, tensors -> rewards [A]


def quick(names, *chosen):
    """Mark all but the chosen names as slow: one of each kind is enough for `make test`."""
    return [
        name
        if name in chosen
        else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=pytest.mark.slow)
        for name in names
    ]


def linear(x, t, name):
    return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def layers(*names, activation=F.relu):
    """Return the formula of linear layers at the last token."""

    def formula(h, _, t):
        x = h[-1]
        for name in names[:-1]:
            x = activation(linear(x, t, name))
        return linear(x, t, names[-1])

    return formula


def armo(h, at, t):
    x = h[at]
    for i in range(3):
        x = F.relu(linear(x, t, f"gating.layers.{i}"))
    gate = F.softmax(linear(x, t, "gating.layers.3") / 10, dim=0) * t["gating.logit_scale"][0]
    return (gate * (linear(h[-1], t, "regression_layer") @ t["reward_transform_matrix"])).sum()[None]


def qrm(h, at, t):
    x = h[at]
    for i in (0, 3):
        n = {part: t[f"gating.layers.{i + 2}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")}
        x = F.batch_norm(F.relu(linear(x, t, f"gating.layers.{i}"))[None], **n, training=False)[0]
    gate = F.softmax(linear(x, t, "gating.layers.6") / 5, dim=0) * t["gating.logit_scale"][0]
    quantiles = linear(h[-1], t, "regression_layer").reshape(4, 3)
    return (gate * (quantiles.mean(1) @ t["reward_transform_matrix"])).sum()[None]


def urm(h, _, t):
    gate = layers("weights.fc.0", "weights.fc.2", "weights.fc.4", activation=F.selu)(h, 0, t)
    return (linear(h[-1], t, "score").view(5, 2)[:, 0] * gate).sum()[None]


def ldl(h, _, t):
    names = ("regression_layer.network.0", "regression_layer.network.2", "regression_layer.network.4")
    bins = layers(*names, activation=F.leaky_relu)(h, 0, t).view(-1, 10).softmax(-1)
    gate = layers(*(f"gating_layer.network.{i}" for i in (0, 3, 6)), activation=F.leaky_relu)(h, 0, t)
    return ((gate[None] @ bins)[0] * torch.linspace(0, 1, 10)).sum()[None]


def scaled(formula, mean, std):
    return lambda h, at, t: (formula(h, at, t) - mean) / std


def mlp(prefix, *sizes, step=2, bias=True):
    """Return the shapes of `prefix.0`, `prefix.2`, ... with these sizes."""
    shapes = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        shapes[f"{prefix}.{step * i}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{prefix}.{step * i}.bias"] = (outputs,)
    return shapes


def one(prefix, outputs=1, *, bias=False):
    return {f"{prefix}.weight": (outputs, H)} | ({f"{prefix}.bias": (outputs,)} if bias else {})


@dataclass
class Shape:
    """A published reward model."""

    family: str
    architecture: str
    head: dict[str, tuple[int, ...]]
    formula: Formula | None = None  # default: the layers of the head at the last token, with ReLU between them
    config: dict[str, Any] = field(default_factory=dict)  # further keys of config.json
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of `load_reward`
    root: str | None = None  # prefix of the body's tensors; default: transformers' own
    language: bool = False  # it has lm_head.weight, too
    dtype: torch.dtype = torch.float32  # the head's
    file: str | None = None  # the head's own file, if it has one
    values: dict[str, list[float]] = field(default_factory=dict)  # tensors that are not random

    def __post_init__(self):
        if self.formula is None:
            self.formula = layers(*(name.removesuffix(".weight") for name in self.head if name.endswith(".weight")))


LLAMA = "LlamaForSequenceClassification"
QWEN = "Qwen2ForRewardModel"
BEAVER = {**one("score_head", bias=True), "normalizer.mean": (1,), "normalizer.var": (1,), "normalizer.count": (1,)}
MOMENTS = {"normalizer.mean": [0.5], "normalizer.var": [4.0], "normalizer.count": [7.0]}
GATED = {"reward_transform_matrix": (4, 4), "gating.logit_scale": (1,)}
BATCH_NORM = {f"gating.layers.{i}.{p}": (8,) for i in (2, 5) for p in ("weight", "bias", "running_mean", "running_var")}
LDL = {**mlp("regression_layer.network", H, 8, 8, 30), **mlp("gating_layer.network", H, 8, 8, 3, step=3)}
ARMO = Shape(
    "llama",
    "LlamaForRewardModelWithGating",
    {**one("regression_layer", 4), **GATED, **mlp("gating.layers", H, 8, 8, 8, 4, step=1)},
    armo,
    config={"vocab_size": LARGE["llama"], "num_objectives": 4},
)
SHAPES = {
    "Skywork-Reward": Shape("llama", LLAMA, one("score"), dtype=torch.bfloat16),
    "GRM-ft": Shape("gemma2", "Gemma2ForSequenceClassification", one("score"), dtype=torch.float16),
    "GRM-sftreg": Shape("llama", "GRewardModel", mlp("v_head.summary", H, 24, 1), root="model.model", language=True),
    "GRM, three layers": Shape(
        "gemma2",
        "GRewardModel",
        mlp("v_head.summary", H, 24, 24, 1),
        config={"vhead_layer_type": "mlp", "vhead_num_neurons": 24, "vhead_num_layers": 2},
    ),
    "GRM, linear": Shape("llama", "X", one("v_head.summary", bias=True), config={"vhead_layer_type": "linear"}),
    "ArmoRM": ARMO,
    "ArmoRM, Gemma": replace(ARMO, family="gemma2", config={"vocab_size": LARGE["gemma2"], "gating_temperature": 10}),
    "QRM": Shape(
        "llama",
        "LlamaForRewardModelWithGating",
        {
            **one("regression_layer", 12),
            **GATED,
            **mlp("gating.layers", H, 8, 8, 4, step=3, bias=False),
            **BATCH_NORM,
        },
        qrm,
        config={"vocab_size": LARGE["llama"], "num_quantiles": 3, "gating_temperature": 5},
        values={f"gating.layers.{i}.running_var": [2.0] * 8 for i in (2, 5)},
    ),
    "URM-3.1": Shape(
        "llama",
        "LlamaForSequenceClassificationWithNormal_Weights",
        {**one("score", 10), **mlp("weights.fc", H, H, H, 5)},
        urm,
        dtype=torch.float16,
    ),
    "URM-3": Shape(
        "llama",
        "LlamaForSequenceClassificationWithNormal",
        one("score", 10),
        lambda h, _, t: (linear(h[-1], t, "score")[::2] * torch.tensor([0.3, 0.74, 0.46, 0.47, -0.33])).sum()[None],
        settings={"attribute_weights": [0.3, 0, 0.74, 0, 0.46, 0, 0.47, 0, -0.33, 0]},
    ),
    "INF-ORM": Shape("llama", "INFORMForSequenceClassification", mlp("score", H, H, 1)),
    "Qwen2.5-Math-RM": Shape("qwen2", QWEN, mlp("score", H, H, 1), language=True),
    "an MLP of another activation": Shape(
        "qwen2",
        QWEN,
        mlp("score", H, H, 1, bias=False),
        layers("score.0", "score.2", activation=F.selu),
        config={"score_activation": "SELU"},
    ),
    "with a dropout": Shape("qwen2", QWEN, mlp("score", H, 8, 8, 1, step=3)),
    "Skywork-o1-PRM": Shape("qwen2", "Qwen2ForPrmModel", one("v_head.summary", bias=True), language=True),
    "Eurus-RM": Shape("mistral", "EurusRewardModel", one("regression_head")),
    "Starling-34B": Shape("llama", LLAMA, one("v_head"), root="transformer"),
    "DeepSpeed-Chat": Shape("opt", "RewardModel", one("v_head"), root="rwtransformer"),
    "beaver": Shape(
        "llama",
        "LlamaForScore",
        BEAVER,
        lambda h, _, t: (linear(h[-1], t, "score_head") - t["normalizer.mean"]) / t["normalizer.var"].sqrt(),
        config={"score_type": "reward", "do_normalize": True},
        values=MOMENTS,
    ),
    "beaver-cost": Shape(
        "llama",
        "LlamaForScore",
        BEAVER,
        lambda h, _, t: linear(h[-1], t, "score_head") / t["normalizer.var"].sqrt(),
        config={"score_type": "cost", "do_normalize": True},
        values=MOMENTS,
    ),
    "beaver, raw": Shape("llama", "LlamaForScore", BEAVER, config={"do_normalize": False}, values=MOMENTS),
    "oasst-pythia": Shape(
        "gpt_neox",
        "GPTNeoXRewardModel",
        one("out_proj", bias=True),
        config={"model_type": "gpt_neox_reward_model", "pooling": "last"},
    ),
    "oasst-pythia, mean": Shape(
        "gpt_neox",
        "GPTNeoXRewardModel",
        one("out_proj", bias=True),
        lambda h, _, t: linear(h.mean(0), t, "out_proj"),
        config={"model_type": "gpt_neox_reward_model", "pooling": "mean"},
    ),
    "OpenRLHF": Shape(
        "llama",
        "RewardModel",
        one("reward_of_mine"),
        scaled(layers("reward_of_mine"), 0.25, 0.5),
        config={"value_head_prefix": "reward_of_mine", "normalize_reward": True, "mean": 0.25, "std": 0.5},
    ),
    "LLaMA-Factory": Shape(
        "qwen2",
        "Qwen2ForCausalLM",
        one("v_head.summary", bias=True),
        language=True,
        file="value_head.safetensors",
    ),
    "LDL": Shape("gemma2", "LDLRewardModel27B", LDL, ldl),
    "HALOs": Shape(
        "llama",
        LLAMA,
        one("score", 2),
        lambda h, _, t: linear(h[-1], t, "score")[1:],
        settings={"attribute_weights": [0, 1]},
    ),
    "trlX": Shape("gpt_neox", "X", mlp("v_head", H, 32, 1), language=True),
    "reward_head": Shape("llama", "X", one("reward_head"), language=True),
    "a decoder's classifier": Shape("llama", LLAMA, one("classifier", bias=True), dtype=torch.float16),
}


def tiny(shape, **more):
    vocabulary = {key: value for key, value in shape.config.items() if key == "vocab_size"}
    sizes = {name: size for name, size in SIZES.items() if shape.family != "xlnet" or "position" not in name}
    return AutoConfig.for_model(shape.family, **{**sizes, **FAMILIES.get(shape.family, {}), **vocabulary, **more})


def large(model):
    """Return the model with weights ten times as large: near-initial ones hardly depend on the other tokens."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model.eval()


def save(folder, shape):
    """Write the folder; return its body."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        kind = AutoModelForCausalLM if shape.language else AutoModel
        model = large(kind.from_config(tiny(shape)))
        head = {name: torch.randn(size).to(shape.dtype) for name, size in shape.head.items()}
    head |= {name: torch.tensor(values) for name, values in shape.values.items()}
    model.save_pretrained(folder)
    body = {}
    own = stored_in(folder)
    prefix = AutoModelForSequenceClassification._model_mapping[type(model.config)].base_model_prefix
    for name, tensor in own.items():
        bare = name.removeprefix(f"{prefix}.")
        outside = bare == name and shape.language
        body[name if outside else f"{shape.root or prefix}.{bare}"] = tensor
    if shape.root == "model.model":
        body = {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in body.items()}
    store(folder, body if shape.file else {**body, **head})
    if shape.file is not None:
        store(folder, head, shape.file)
    change_config(folder, architectures=[shape.architecture], **shape.config)
    return model.base_model


def stored_in(folder):
    return load_file(folder / "model.safetensors")


def store(folder, tensors, file="model.safetensors"):
    save_file(tensors, folder / file, metadata={"format": "pt"})


def rows(shape):
    rng = np.random.default_rng(0)
    found = [rng.integers(5, VOCAB, length) for length in (9, 14, 7, 20, 12)]
    if "gating.logit_scale" in shape.head:
        header = GATE_HEADERS[shape.family][1]
        found = [np.concatenate([row[:3], header, row[3:5], header, row[5:]]) for row in found]
    return found


@torch.no_grad()
def right(shape, body, tensors):
    t = {name: tensor.float() for name, tensor in tensors.items()}
    header = list(GATE_HEADERS.get(shape.family, ("", ()))[1])
    found = []
    for row in rows(shape):
        starts = [i for i in range(row.size) if row[i : i + len(header)].tolist() == header]
        h = body(input_ids=torch.from_numpy(row)[None])[0][0]
        found.append(shape.formula(h, (starts or [0])[-1], t))
    return torch.stack(found).numpy()


def saved(folder, shape):
    """Write the folder; return its tensors, and the scores of `rows` by the formula."""
    body = save(folder, shape)
    stored = stored_in(folder)
    return stored, right(shape, body, stored)


def assert_scores(folder, shape, expected):
    """Compare the scores of rows that are alone, batched, and mixed with padding."""
    reward = load_reward(folder, **shape.settings)
    given = rows(shape)
    tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))
    assert np.ptp(expected) > 100 * tolerance
    np.testing.assert_allclose(reward.score(given), expected, atol=tolerance)
    np.testing.assert_allclose(reward.score(given, 48)[::-1], expected[::-1], atol=tolerance)
    np.testing.assert_allclose(np.concatenate([reward.score([row]) for row in given]), expected, atol=tolerance)


KINDS = ("Skywork-Reward", "GRM-sftreg", "ArmoRM, Gemma", "QRM", "URM-3.1", "beaver", "oasst-pythia, mean", "OpenRLHF")


@pytest.mark.device
@pytest.mark.parametrize("name", quick(SHAPES, *KINDS, "LLaMA-Factory", "an MLP of another activation"))
def test_published_head_scores_by_its_formula_and_damaged_ones_are_refused(tmp_path, name):
    shape = SHAPES[name]
    body = save(tmp_path, shape)
    files = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    stored = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert_scores(tmp_path, shape, right(shape, body, stored))
    weights = files["model.safetensors"]
    added = ["normalizer.bias", "extra_head.weight", f"{next(iter(shape.head)).rpartition('.')[0]}.scale"]
    if "model.layers.0.mlp.up_proj.weight" in stored:
        added += [f"{shape.root or 'model'}.layers.0.extra.weight", "norm.weight"]
    for extra in added:
        store(tmp_path, {**weights, extra: torch.ones(1)})
        with refused(match=extra):
            load_reward(tmp_path, **shape.settings)
    store(tmp_path, weights)
    file = shape.file or "model.safetensors"
    for lost in shape.head:
        store(tmp_path, {key: each for key, each in files[file].items() if key != lost}, file)
        rest = {key: each for key, each in stored.items() if key != lost}
        try:
            expected = right(shape, body, rest)
        except KeyError:
            with refused():
                load_reward(tmp_path, **shape.settings)
        else:
            assert_scores_or_refused(tmp_path, shape, expected)


def assert_scores_or_refused(folder, shape, expected):
    try:
        load_reward(folder, **shape.settings)
    except CheckpointError:
        return
    assert_scores(folder, shape, expected)


def test_head_split_over_one_file_per_module_scores_by_its_formula(tmp_path):
    shape = SHAPES["LDL"]
    stored, expected = saved(tmp_path, shape)
    for module in ("regression_layer", "gating_layer"):
        own = {name.removeprefix(f"{module}."): tensor for name, tensor in stored.items() if name.startswith(module)}
        store(tmp_path, own, f"{module}.safetensors")
    store(tmp_path, {name: tensor for name, tensor in stored.items() if "_layer.network" not in name})
    assert_scores(tmp_path, shape, expected)
    store(tmp_path, {"scale": torch.ones(1)}, "calibration.safetensors")
    with refused(match=r"calibration\.scale"):
        load_reward(tmp_path)


def test_gated_reward_is_nan_for_rows_without_the_answer_header(tmp_path):
    save(tmp_path, SHAPES["ArmoRM, Gemma"])
    given = rows(SHAPES["ArmoRM, Gemma"])
    bare = np.arange(5, 12)
    scores = load_reward(tmp_path).score([given[0], bare, bare[:2]])
    np.testing.assert_allclose(scores[:1], load_reward(tmp_path).score(given[:1]), atol=1e-5)
    assert np.isnan(scores[1:]).all()
    with refused(match="pooling: mean needs a linear head"):
        load_reward(tmp_path, pooling="mean")
    change_config(tmp_path, vocab_size=VOCAB)
    with refused(match=r"gating.layers reads at the header of an answer.*has no tokens for it"):
        load_reward(tmp_path)


# ---- which tensors and files ----


def renamed(folder, rename):
    store(folder, {rename(name): tensor for name, tensor in stored_in(folder).items()})


def bare(name):
    return name.removeprefix("model.")


@pytest.mark.parametrize("rename", [str, bare], ids=["under a prefix", "without"])
@pytest.mark.parametrize("pair", [("v_head", "score"), ("v_head", "v_head.summary"), ("regression_head", "out_proj")])
def test_value_head_prefix_selects_one_of_two_heads(tmp_path, pair, rename):
    shape = Shape("llama", LLAMA, {**one(pair[0]), **one(pair[1], bias=True)})
    body = save(tmp_path, shape)
    stored = stored_in(tmp_path)
    renamed(tmp_path, rename)
    with refused(match=r"has 2 heads, [\w.]+, [\w.]+; set value_head_prefix") as caught:
        load_reward(tmp_path)
    assert all(name in str(caught.value) for name in pair)
    for name in pair:
        change_config(tmp_path, value_head_prefix=name)
        chosen = Shape("llama", LLAMA, {}, layers(name))
        assert_scores(tmp_path, chosen, right(chosen, body, stored))
    for extra in ("my_head.weight", "normalizer.mean"):  # no heads, which it would leave out
        store(tmp_path, {**stored_in(tmp_path), extra: torch.ones(1, H)})
        with refused(match=extra):
            load_reward(tmp_path)


@pytest.mark.parametrize("name", ["Skywork-Reward", "OpenRLHF", "GRM-sftreg"])
def test_a_value_head_prefix_that_names_no_tensor_is_refused(tmp_path, name):
    save(tmp_path, SHAPES[name])
    for prefix in ("value_hed", "score.weight", "model"):
        change_config(tmp_path, value_head_prefix=prefix)
        for load in (load_reward, load_critic):
            if name == "OpenRLHF":  # without the prefix, no head is known
                with pytest.raises(
                    CheckpointError,
                    match=r"with a known name, but unknown layers reward_of_mine|not use reward_of_mine",
                ):
                    load(tmp_path)
            else:
                with pytest.raises(
                    CheckpointError, match=f"value_head_prefix: {prefix} in config.json names no layer; set it to"
                ):
                    load(tmp_path)


WRAPPERS = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.module.{name}",
    "Lightning": lambda name: f"model.{name}",
    "a class with the body's layers": lambda name: f"model.{bare(name)}",
    "a class of any name": lambda name: f"reward_model.net.{name}",
}


WRAPPED = [
    (name, wrapper)
    for name in ("Skywork-Reward", "GRM-sftreg", "URM-3.1")
    for wrapper in WRAPPERS
    if name != "GRM-sftreg" or "layers" not in wrapper  # a language model has tensors of its own beside the body
]
QUICK = [
    (name, wrapper) for name in ("Skywork-Reward", "GRM-sftreg") for wrapper in ("torch.compile", "a class of any name")
]


@pytest.mark.parametrize(("name", "wrapper"), quick(WRAPPED, *QUICK))
def test_prefix_around_all_tensor_names_changes_no_score(tmp_path, wrapper, name):
    shape = SHAPES[name]
    _, expected = saved(tmp_path, shape)
    renamed(tmp_path, WRAPPERS[wrapper])
    assert_scores(tmp_path, shape, expected)
    again = load_reward(tmp_path).with_weights(tmp_path)
    np.testing.assert_allclose(again.score(rows(shape)), expected, rtol=1e-5)
    assert load_critic(tmp_path).note


COPIES = [("model.model", "transformer"), ("model", "transformer"), ("model", "reward_model"), ("reward_model", "base")]


@pytest.mark.parametrize(("root", "other"), quick(COPIES, *COPIES[::2]))
@pytest.mark.parametrize("name", ["v_head", "score"])
def test_duplicate_body_or_head_is_accepted_only_if_equal(tmp_path, root, other, name):
    shape = Shape("llama", "GPTRewardModel", one(name), root=root, language=name == "v_head")
    stored, expected = saved(tmp_path, shape)
    inside = {key.removeprefix(f"{root}."): each for key, each in stored.items() if key.startswith(f"{root}.")}
    again = {f"{other}.{key}": each.clone() for key, each in inside.items() if "lm_head" not in key}
    again |= {} if root == "reward_model" else {f"{root}.{name}.weight": stored[f"{name}.weight"].clone()}
    store(tmp_path, {**stored, **again})
    assert_scores(tmp_path, shape, expected)
    assert load_critic(tmp_path).note == f"the value head is {name}"
    for changed in (min(again), max(again)):
        store(tmp_path, {**stored, **again, changed: 2 * again[changed]})
        for load in (load_reward, load_critic):
            with refused(match=r"does not use|stored twice|no known head"):
                load(tmp_path)
    store(tmp_path, {**stored, "extra.norm.weight": torch.ones(H)})  # as the body's norm
    with refused(match=r"extra\.norm"):
        load_reward(tmp_path)


UNKNOWN = [
    *(
        ("my_head", str, None),
        ("my_layer", bare, None),
        ("lm_head", str, None),
        ("cls", str, None),
        ("cls", bare, None),
    ),
    ("model.score", str, None),
    ("my_head", str, Shape("llama", "X", mlp("my_head", H, 8, 1))),
    ("net.top", str, Shape("llama", "X", mlp("net.top", H, 8, 1, step=3))),
    ("my_layer", bare, Shape("llama", "X", mlp("my_layer", H, 1))),
]


@pytest.mark.parametrize(("name", "rename", "given"), UNKNOWN)
def test_head_with_an_unknown_name_is_refused_with_the_remedy(tmp_path, name, rename, given):
    shape = given or Shape("llama", "X", one(name))
    stored, expected = saved(tmp_path, shape)
    beside = {} if name == "lm_head" else {"lm_head.bias": torch.ones(VOCAB)}
    store(tmp_path, {**{rename(key): each for key, each in stored.items()}, **beside})
    message = f"{name}.*value_head_prefix: {name} in config.json"
    with refused(match=message):
        load_reward(tmp_path)
    with refused(match=name):
        load_critic(tmp_path)
    change_config(tmp_path, value_head_prefix=name)
    assert_scores(tmp_path, shape, expected)


@pytest.mark.parametrize("family", ["distilbert", "electra"])
def test_pooler_layers_of_a_classifier_are_never_ignored(tmp_path, family):
    model = AutoModelForSequenceClassification.from_config(tiny(Shape(family, "", {}), num_labels=1))
    large(model).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["RewardModel"])
    for pooling, message in (("auto", r"how its head .* pools is unknown"), ("last", "does not use")):
        with refused(match=message):
            load_reward(tmp_path, pooling=pooling)


BESIDE = ["normalizer.pt", "gating_layer.pt", "reward_scale.pth", "value_head.bin", "pytorch_model_head.bin", "a.ckpt"]
BESIDE += ["model_value_head.safetensors", "adapter_model.safetensors", "pytorch_model_head.safetensors"]
BESIDE += ["model-00001-of-00002.safetensors", "optimizer_head.pt", "reward_scaler.pt", "adapters.safetensors"]
BESIDE += ["adapters.npz", "reward_scale.npy", "normalizer.pkl", "value_head.h5"]


@pytest.mark.parametrize("file", quick(BESIDE, *BESIDE[::3]))
def test_a_file_beside_the_weights_is_read_or_refused_by_name(tmp_path, file):
    save(tmp_path, SHAPES["Skywork-Reward"])
    for harmless in (
        *("optimizer.pt", "optimizer.safetensors", "scheduler.pt", "scaler.pt", "rng_state_0.pth", "training_args.bin"),
        *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "consolidated.safetensors"),
        *("tf_model.h5", "flax_model.msgpack", "model.gguf", "model.onnx"),
    ):
        (tmp_path / harmless).write_bytes(b"")
    load_reward(tmp_path)
    is_read = file.endswith(".safetensors")
    tensors = {"normalizer.scale": torch.ones(1)}
    store(tmp_path, tensors, file) if is_read else torch.save(tensors, tmp_path / file)
    for load in (load_reward, load_critic):
        with refused(match=r"normalizer\.scale" if is_read else f"{file} is not read"):
            load(tmp_path)


@pytest.mark.parametrize("name", ["score.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize(
    "dtype", quick([torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool], torch.int8)
)
def test_integer_and_float8_weights_are_refused_as_quantised(tmp_path, name, dtype):
    save(tmp_path, SHAPES["Skywork-Reward"])
    stored = stored_in(tmp_path)
    store(tmp_path, {**stored, name: stored[name].to(dtype)})
    for load in (load_reward, load_critic):
        with refused(match=f"quantised: {name} is of type"):
            load(tmp_path)


COUNTERS = {"global_step": [12], "module.steps": 3, "v_head.num_updates": 7, "epoch": 1, "norm.num_batches_tracked": 5}


@pytest.mark.parametrize("name", COUNTERS)
def test_counter_tensors_beside_the_weights_change_no_score(tmp_path, name):
    shape = SHAPES["Skywork-Reward"]
    stored, expected = saved(tmp_path, shape)
    store(tmp_path, {**stored, name: torch.tensor(COUNTERS[name])})
    assert_scores(tmp_path, shape, expected)
    store(tmp_path, {**stored, "scale": torch.tensor(2)})
    with refused(match="does not use scale"):
        load_reward(tmp_path)


# ---- keys of config.json ----

KEYS = {
    "Skywork-Reward": (
        *("value_head_prefix", "architectures", "text_config", "max_position_embeddings", "n_positions", "max_seq_len"),
        *("rope_parameters", "rope_scaling", "original_max_position_embeddings", "is_encoder_decoder", "id2label"),
        *("model_type", "vocab_size", "critic_adapters", "reward_standardization", "quantization_config"),
        *("pooling", "pad_token_id", "tie_word_embeddings"),
    ),
    "OpenRLHF": ("normalize_reward", "mean", "std", "value_head_prefix"),
    "beaver": ("do_normalize", "score_type"),
    "beaver, moments in config.json": ("mean", "var"),
    "GRM, three layers": ("vhead_layer_type", "vhead_num_layers", "vhead_activation", "head_activation"),
    "LDL": ("softmax", "temperature"),
    "QRM": ("num_quantiles", "gating_n_hidden", "gating_temperature"),
}


OF_EACH_TYPE = [("Skywork-Reward", "architectures"), ("Skywork-Reward", "id2label"), ("beaver", "do_normalize")]


@pytest.mark.parametrize(
    ("name", "key"), quick([(name, key) for name, keys in KEYS.items() for key in keys], *OF_EACH_TYPE)
)
def test_config_key_of_a_wrong_json_type_is_refused_or_changes_no_score(tmp_path, name, key):
    shape = SHAPES[name.partition(", moments")[0]]
    if "moments" in name:
        shape = replace(shape, head=one("score_head"), values={}, config={**shape.config, "mean": 0.5, "var": [4.0]})
    save(tmp_path, shape)
    if name == "LDL":
        change_config(tmp_path, softmax=True)
    given = rows(shape) if "gating.logit_scale" in shape.head else [row[:5] for row in rows(shape)]  # 5 positions
    expected = load_reward(tmp_path, **shape.settings).score(given)
    config = json.loads((tmp_path / "config.json").read_text())
    for value in (None, 5, "x", [], {}, True, math.inf, {"a": {"b": [1]}}, [None], 10**400):
        text = json.dumps({**config, key: value}).replace("Infinity", "1e400")
        (tmp_path / "config.json").write_text(text)
        try:
            found = load_reward(tmp_path, **shape.settings).score(given)
        except CheckpointError:
            continue
        if isinstance(value, str | list | dict):
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(value))


# Keys of config.json and what is said of them; None: the score stays.
UNUSUAL = [
    ("llama", {"attn_implementation": "flash_attention_2"}, None),
    ("llama", {"_attn_implementation": "nonsense"}, None),
    ("llama", {"output_hidden_states": "x", "output_attentions": True, "torchscript": True}, None),
    ("llama", {"dtype": "nonsense"}, None),
    ("bert", {"chunk_size_feed_forward": 2}, None),
    ("llama", {"hidden_act": "nonsense"}, "config.json: hidden_act is 'nonsense': "),
    ("bert", {"hidden_size": None}, "config.json: hidden_size is 'None': "),
    ("gpt2", {"n_layer": "2"}, "config.json: n_layer is '2': "),
    (
        "llama",
        {"id2label": {"good": 0}},
        "config.json: id2label has the key 'good', but its keys must be label numbers",
    ),
    (
        "llama",
        {"id2label": {1: "bad", 2: "good"}},
        "id2label has the key '1', but its keys must be label numbers, from",
    ),
    (
        "llama",
        {"vocab_size": 48},
        r"embed_tokens.weight has shape \[64, 16\], but config.json implies \[48, 16\] \(.*vocab_size: 48\)",
    ),
    ("gpt2", {"n_inner": 8}, r"has shape .* config.json implies .* \(.*n_inner: 8\)"),
]


@pytest.mark.parametrize(("family", "config", "told"), UNUSUAL, ids=lambda each: str(each)[:40])
def test_unusual_config_key_changes_no_score_or_is_refused_by_name(tmp_path, family, config, told, monkeypatch):
    monkeypatch.setattr(transformers_classes, "OWN_PATHS", {})
    kind = SEQUENCE_CLASSES[family]
    shape = Shape(family, kind, one("classifier" if family == "bert" else "score", bias=family == "bert"))
    save(tmp_path, shape)
    expected = load_reward(tmp_path).score(rows(shape))
    monkeypatch.setattr(transformers_classes, "OWN_PATHS", {})
    change_config(tmp_path, **config)
    if told is None:
        np.testing.assert_allclose(load_reward(tmp_path).score(rows(shape)), expected, rtol=1e-5)
        return
    for load in (load_reward, load_critic):
        with refused(match=told) as caught:
            load(tmp_path)
        assert str(tmp_path) in str(caught.value)


# ---- transformers' own classes ----

OWN_CLASSES = [
    ("deberta-v2", AutoModelForSequenceClassification),
    ("modernbert", AutoModelForSequenceClassification),
    ("modernbert", AutoModelForTokenClassification),
    ("bert", AutoModelForSequenceClassification),
    ("roberta", AutoModelForSequenceClassification),
    ("electra", AutoModelForSequenceClassification),
    ("distilbert", AutoModelForSequenceClassification),
    ("xlnet", AutoModelForSequenceClassification),
    ("jamba", AutoModelForSequenceClassification),
    ("mistral", AutoModelForSequenceClassification),
]
OF_BASE_MODELS = {  # keys that are in config.json of the published ones, but in no class
    "deberta-v2": {"position_buckets": 64, "share_att_key": True, "norm_rel_ebd": "none", "conv_act": "gelu"},
    "modernbert": {"layer_norm_eps": 1e-5, "global_rope_theta": 160000.0},
}


@pytest.mark.parametrize("scale", ["as initialised", "as trained"])
@pytest.mark.parametrize(
    ("family", "kind"), quick(OWN_CLASSES, *OWN_CLASSES[1:4]), ids=lambda each: getattr(each, "__name__", each)
)
def test_transformers_classes_score_exactly_and_reject_missing_tensors(tmp_path, family, kind, scale, caplog):
    """Near-initial weights also reveal whether a body is causal."""
    shape = Shape(family, "", {})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind.from_config(tiny(shape, num_labels=1, **OF_BASE_MODELS.get(family, {}))).eval()
    model = large(model) if scale == "as trained" else model
    model.save_pretrained(tmp_path)
    change_config(tmp_path, **OF_BASE_MODELS.get(family, {}))
    given = rows(shape)
    with torch.no_grad():
        logits = [model(input_ids=torch.from_numpy(row)[None]).logits[0] for row in given]
    expected = np.stack([(each if each.ndim == 1 else each[-1]).numpy() for each in logits])
    settings = {}
    if kind is AutoModelForTokenClassification:  # which has no pooling
        settings["pooling"] = "last"
        with refused(match=r"which token.*classifier.*pooling"):
            load_reward(tmp_path)
    for reward in (load_reward(tmp_path, **settings), load_reward(tmp_path, **settings).with_weights(tmp_path)):
        np.testing.assert_allclose(reward.score(given), expected, atol=1e-5 * max(1, np.abs(expected).max()))
    assert "keys that nothing reads" not in caplog.text
    if scale == "as initialised":
        return
    stored = stored_in(tmp_path)
    for lost in [name for name in stored if not name.startswith(f"{model.base_model_prefix}.")]:
        store(tmp_path, {name: tensor for name, tensor in stored.items() if name != lost})
        with refused(match=r"missing|lack|have no|no head|no known head"):
            load_reward(tmp_path, **settings)
    store(tmp_path, {**stored, "extra.weight": torch.ones(1)})
    with refused(match=r"extra\.weight"):
        load_reward(tmp_path, **settings)


# ---- labels ----


def labelled(folder, *labels):
    """Write a classifier; return rows and its logits."""
    shape = Shape("llama", LLAMA, one("score", len(labels)))
    _, logits = saved(folder, shape)
    change_config(folder, id2label=dict(enumerate(labels)))
    return rows(shape), logits


def test_several_labels_need_attribute_weights(tmp_path):
    given, logits = labelled(tmp_path, "bad", "good")
    with refused(match=r"2 outputs \(bad, good\) is the reward\? Give reward.attribute_weights"):
        load_reward(tmp_path)
    odds = load_reward(tmp_path, attribute_weights=[-1, 1]).score(given)
    np.testing.assert_allclose(odds, logits[:, 1:] - logits[:, :1], atol=1e-4)
    np.testing.assert_allclose(load_reward(tmp_path, attribute_weights="separate").score(given), logits, atol=1e-4)
    labelled(tmp_path / "three", "bad", "so-so", "good")
    with refused(match=r"3 outputs \(bad, so-so, good\) is the reward\? Give [^;]*$"):
        load_reward(tmp_path / "three")


def test_swap_refuses_labels_in_another_order(tmp_path):
    for name, labels in (("served", ("bad", "good")), ("same", ("bad", "good")), ("other", ("good", "bad"))):
        labelled(tmp_path / name, *labels)
    served = load_reward(tmp_path / "served", attribute_weights=[-1, 1])
    served.with_weights(tmp_path / "same")
    with refused(match="its labels are good, bad, but the served model's are bad, good"):
        served.with_weights(tmp_path / "other")


LABELS = [
    (("incorrect", "correct"), 1),
    (("correct", "incorrect"), 0),
    (("Good", "BAD"), 0),
    (("NEGATIVE", "POSITIVE"), 1),
    (("not_correct", "correct"), 1),
    (("+", "-"), 0),
    (("LABEL_0", "LABEL_1"), 1),  # unnamed: as published
    (("LABEL_1", "LABEL_0"), 0),
    (("1", "0"), 0),
    (("A", "B"), None),
    (("good", "excellent"), None),
    (("correct", "right"), None),
]


@pytest.mark.parametrize(
    ("labels", "good"), quick(LABELS, *LABELS[::3]), ids=[" ".join(labels) for labels, _ in LABELS]
)
def test_good_label_of_two_is_inferred_by_name_or_must_be_configured(tmp_path, labels, good):
    given, logits = labelled(tmp_path, *labels)
    with refused(match=re.escape(f"(the log-odds of {labels[0 if good == 0 else 1]}, if")):
        attribute_weights(RewardSection(model=tmp_path))
    weights = [1, -1] if good == 0 else [-1, 1]
    if good is None:
        with refused(match=rf"which of its 2 labels \({', '.join(labels)}\).*attribute_weights"):
            load_process_reward(tmp_path)
    steps = load_process_reward(tmp_path, score="logit", attribute_weights=None if good is not None else weights)
    odds = [scores[-1] for scores in steps.launch_token_scores(given)()]
    np.testing.assert_allclose(odds, logits @ np.float32(weights), atol=1e-4)
    change_config(tmp_path, label2id={labels[0]: 1, labels[1]: 0})
    with refused(match=r"id2label .* and label2id .* contradict each other"):
        load_process_reward(tmp_path)


def test_process_reward_matches_published_formulas_at_each_token(tmp_path):
    qwen = Shape("qwen2", "Qwen2ForProcessRewardModel", mlp("score", H, H, 2), language=True)
    for shape, score in ((qwen, "auto"), (SHAPES["Skywork-o1-PRM"], "probability")):
        body = save(tmp_path / shape.architecture, shape)
        given = rows(shape)[0]
        t = stored_in(tmp_path / shape.architecture)
        with torch.no_grad():
            hidden = body(input_ids=torch.from_numpy(given)[None])[0][0]
            logits = torch.stack([shape.formula(hidden[: i + 1], 0, t) for i in range(given.size)])
        right_scores = logits.softmax(-1)[:, 1] if score == "auto" else logits.sigmoid()[:, 0]
        model = load_process_reward(tmp_path / shape.architecture, score=score)
        np.testing.assert_allclose(model.launch_token_scores([given, given[:3]])()[0], right_scores, atol=1e-5)


# ---- what has no score of one text ----

UNSERVED = {
    "PairRM": (
        Shape("deberta-v2", "DebertaV2PairRM", {"head_layer.1.weight": (H, 2 * H)}, root="pretrained_model"),
        ["compares two candidates in one row"],
    ),
    "SteamSHP": (Shape("t5", "T5ForConditionalGeneration", {}), ["is an encoder-decoder"]),
    "a layer norm in the head": (
        Shape("llama", LLAMA, {**mlp("score", H, 8, 1, step=3), "score.1.weight": (8,)}),
        ["score.0, score.1, score.3"],
    ),
    "InternLM2": (
        Shape("llama", "InternLM2ForRewardModel", one("v_head"), config={"model_type": "internlm2"}),
        ["transformers has no internlm2 models"],
    ),
    "pair-preference-model": (
        Shape("llama", "LlamaForCausalLM", {}, language=True),
        ["its weights have no head", "reward.logit"],
    ),
    "a head that is wider than the body": (
        Shape("llama", "X", {"v_head.summary.weight": (1, 24)}),
        ["v_head.summary.weight", r"has shape \[1, 24\]"],
    ),
    "a head of a class that is wider than the body": (
        Shape("bert", "BertForSequenceClassification", {"classifier.weight": (1, 24), "classifier.bias": (1,)}),
        ["classifier.weight", r"has shape \[1, 24\]", rf"\[num_labels, {H}\]"],
    ),
    "an activation that is unknown": (
        Shape("qwen2", QWEN, mlp("score", H, 8, 1), config={"head_activation": "snake"}),
        ["head_activation is 'snake'"],
    ),
    "an encoder under a linear head": (
        Shape("electra", "ElectraForSequenceClassification", one("score")),
        ["which token", "pooling"],
    ),
    "layers under the name of a class's one layer": (
        Shape("bert", "BertForSequenceClassification", mlp("classifier", H, 8, 1)),
        ["which token", "pooling"],
    ),
    "a decoder's class that reads both ways, of another name": (
        Shape("gemma3_text", "RewardModel", one("score"), config={"use_bidirectional_attention": True}),
        ["which token", "pooling"],
    ),
    "the mean of what is not linear": (
        Shape("qwen2", QWEN, mlp("score", H, 8, 1), config={"pooling": "mean"}),
        ["pooling: mean needs a linear head"],
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_checkpoints_that_give_no_score_are_refused_with_the_cause(tmp_path, name):
    shape, words = UNSERVED[name]
    save(tmp_path, shape)
    with refused(match=".*".join(words)):
        load_reward(tmp_path)


HEAD_KEYS = [
    ("head_activation", "tanh"),
    ("score_activation", "sigmoid"),
    ("summary_activation", "tanh"),
    ("mlp_activation", "tanh"),
    ("activation", "gelu"),
    ("sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid"),
    ("normalize_outputs", True),
    ("reward_scale", 2.0),
    ("pooling", "last2"),
    ("score_activation", "1"),
    ("head_layer_norm", True),
    ("function_to_apply", "sigmoid"),
    ("pooling", "mean"),
    ("pooling", "cls"),
    ("pooling_type", "mean"),
    ("classifier_pooling", "mean"),
    ("use_mean_pooling", True),
    ("summary_type", "first"),
    ("score_fn", "sigmoid"),
    ("use_sigmoid_output", True),
    ("output_scale", 5.0),
    ("layer_index", -4),
    ("hidden_layer_index", 1),
    ("logit_bias", 0.5),
    ("reward_clip", [-5, 5]),
    ("calibration", {"slope": 2.0}),
    ("softmax", True),
    ("mean", 0.5),
    ("value_transform", "symlog"),
    ("apply_tanh", True),
]


@pytest.mark.parametrize("family", quick(["llama", "gpt2"], "llama"))
@pytest.mark.parametrize(
    ("key", "value"), quick(HEAD_KEYS, *HEAD_KEYS[::3]), ids=[f"{key}-{value}" for key, value in HEAD_KEYS]
)
def test_head_settings_in_config_json_are_applied_or_refused(tmp_path, family, key, value):
    shape = Shape(family, {"llama": LLAMA, "gpt2": "GPT2ForSequenceClassification"}[family], one("score"))
    save(tmp_path, shape)
    change_config(tmp_path, **{key: value, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6})
    with refused(match=rf"has {key}: {re.escape(repr(value))}, which the head score"):
        load_reward(tmp_path)
    if "pool" in key or key == "summary_type":
        load_reward(tmp_path, pooling="mean")
    else:
        with refused(match=key):
            load_reward(tmp_path, pooling="mean")
    silent = {"pooling": "last", "pooling_type": "last_token", "use_mean_pooling": False, "summary_type": "last"}
    change_config(tmp_path, **{key: silent.get(key)})
    load_reward(tmp_path)


# Keys of published config.json files that have no part in a score.
UNREAD = json.loads(Path(__file__).with_name("published_keys.json").read_text())


@pytest.mark.parametrize("family", quick(UNREAD["of a family"], "llama", "gptj", "bloom", "gemma3_text"))
def test_irrelevant_config_keys_are_accepted_silently(tmp_path, family, caplog):
    save(tmp_path, Shape(family, "", one("score")))
    change_config(tmp_path, **(UNREAD["read by nothing"] | UNREAD["of a family"][family]))
    load_reward(tmp_path)
    assert "keys that nothing reads" not in caplog.text
    for _ in range(2):
        change_config(tmp_path, use_deep_thought=True, reading="backwards")
        load_reward(tmp_path)
    assert caplog.text.count(f"keys that nothing reads, for a {family} model: reading, use_deep_thought;") == 1


@pytest.mark.parametrize("config", UNREAD["without effect"], ids=str)
def test_config_keys_without_effect_on_scores_are_accepted(tmp_path, config):
    shape = Shape("bert", "BertForSequenceClassification", one("classifier", bias=True))
    save(tmp_path, shape)
    expected = load_reward(tmp_path).score(rows(shape))
    change_config(tmp_path, **config)
    np.testing.assert_array_equal(load_reward(tmp_path).score(rows(shape)), expected)
    change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"})
    with refused(match=r"has activation_fn: 'torch\.nn\.modules\.activation\.Sigmoid'"):
        load_reward(tmp_path)


def test_model_type_that_transformers_remaps_is_remapped(tmp_path):
    """transformers loads a mistral with `layer_types` as ministral, whose first layer attends to the whole row."""
    shape = Shape("mistral", "MistralForSequenceClassification", one("score"))
    save(tmp_path, shape)
    change_config(tmp_path, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert theirs.config.model_type == "ministral"
    with torch.no_grad():
        expected = [float(theirs(torch.from_numpy(row)[None]).logits) for row in rows(shape)]
    np.testing.assert_allclose(load_reward(tmp_path).score(rows(shape))[:, 0], expected, rtol=1e-5)


STRAYS = [
    ("gpt_neox", "gpt_neox.", "final_layer_norm.weight"),
    ("gpt2", "transformer.", "ln_f.bias"),
    ("opt", "model.", "decoder.final_layer_norm.bias"),
    ("llama", "model.", "layers.1.mlp.up_proj.weight"),
    ("bloom", "transformer.", "word_embeddings_layernorm.weight"),
]


@pytest.mark.parametrize("change", ["moved", "lost", "twice", "elsewhere"])
@pytest.mark.parametrize(
    ("family", "prefix", "name"), quick(STRAYS, *STRAYS[1:4:2]), ids=[family for family, *_ in STRAYS]
)
def test_misplaced_missing_or_duplicate_body_tensor_is_refused(tmp_path, family, prefix, name, change):
    save(tmp_path, Shape(family, "", one("score")))
    stored = stored_in(tmp_path)
    tensor = stored[f"{prefix}{name}"] if change == "twice" else stored.pop(f"{prefix}{name}")
    beside = {"moved": {name: tensor}, "lost": {}, "twice": {name: 2 * tensor}, "elsewhere": {f"base.{name}": tensor}}
    store(tmp_path, {**stored, **beside[change]})
    with refused(match=re.escape(name)):
        load_reward(tmp_path)
    bare = {key.removeprefix(prefix): each for key, each in stored.items()}
    store(tmp_path, {**bare, f"{prefix}{name}": 2 * tensor})
    with refused(match=re.escape(f"{prefix}{name}")):
        load_reward(tmp_path)


# ---- critics ----


@pytest.mark.parametrize(
    "name",
    quick(["INF-ORM", "GRM-sftreg", "with a dropout", "trlX", "beaver", "an MLP of another activation"], "INF-ORM"),
)
def test_critic_starts_from_a_published_head_trains_it_and_reloads(tmp_path, name):
    shape = SHAPES[name]
    _, expected = saved(tmp_path / "0", shape)
    given = rows(shape)
    critic = load_critic(tmp_path / "0")
    np.testing.assert_allclose(last(critic, given), expected, atol=1e-5 * max(1, np.abs(expected).max()))
    critic = load_trained(tmp_path / "0")
    update = CriticUpdate(critic, trainer_section(lr=0.01))
    ones = np.ones(given[0].size - 1, np.float32)
    update.train(TrainPayload(given[0], np.array([given[0].size]), ones, ones, ones), lambda _: None)
    assert np.abs(last(update.critic, given) - expected).max() > 1e-3
    (tmp_path / "1").mkdir()
    update.critic.write(tmp_path / "1")
    for again in (load_critic(tmp_path / "1"), critic.with_weights(tmp_path / "1")):
        np.testing.assert_array_equal(last(again, given), last(update.critic, given))


def last(critic, given):
    return np.array([[values[-1]] for values in critic.values(given)])


HEADERS = {  # vocabularies, and the header's ids; None: the tokenizer has no such token
    "has it": ({"[UNK]": 0, "<|eot_id|>": 1, "<|start_header_id|>": 2, "assistant": 3, "<|end_header_id|>": 4}, None),
    "writes its unknown token": ({"[UNK]": 0, "assistant": 1}, "[UNK]"),
    "drops it": ({"x": 0}, None),
}


@pytest.mark.parametrize("name", HEADERS)
def test_gated_reward_is_refused_if_its_tokenizer_lacks_the_answer_header(tmp_path, name):
    save(tmp_path, SHAPES["ArmoRM"])
    vocabulary, unknown = HEADERS[name]
    special = {"unk_token": unknown, "extra_special_tokens": [each for each in vocabulary if each.startswith("<|")]}
    tokenizer = word_tokenizer(vocabulary, unknown="[UNK]" if "[UNK]" in vocabulary else None, special=special)
    tokenizer.save_pretrained(tmp_path)
    if name == "has it":
        assert load_reward(tmp_path).header == (1, 2, 3, 4)
        return
    with refused(match=r"gating.layers reads at the header of an answer.*has no tokens for it"):
        load_reward(tmp_path)


@pytest.mark.parametrize("name", ["ArmoRM, Gemma", "URM-3.1", "LDL"])
def test_critic_from_a_gated_reward_model_starts_at_0_with_a_note(tmp_path, name):
    save(tmp_path, SHAPES[name])
    critic = load_critic(tmp_path)
    assert critic.note.endswith("has its own gate: the value head starts at 0")
    assert not last(critic, rows(SHAPES[name])).any()
    for extra in ("model.layers.0.extra.weight", "extra.weight"):
        store(tmp_path, {**stored_in(tmp_path), extra: torch.ones(1)})
        with refused(match=extra):
            load_critic(tmp_path)
