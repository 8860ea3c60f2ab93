"""Tests of `actor.policy`: adapters, checkpoints that resume bit-identically or are refused, and bfloat16 policies."""

import contextlib
import functools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from peft import PeftModel
from policy_training import states, train, trainable_policy
from run_checkpoints import make_tokenizer, save_policy
from safetensors.torch import load_file
from samples import logprobs_of, tokens_of
from tiny_checkpoints import add_tensors, change_config, change_tensors, save_tiny
from transformers import AutoModelForCausalLM

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import rows_of
from rlhf_triton.actor.policy.loading import load_model
from rlhf_triton.actor.run.checkpoints import save_checkpoint
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.language_models import check_language_model
from rlhf_triton.checkpoints.special_tokens import end_of_sequence
from rlhf_triton.config.actor import PolicySection
from rlhf_triton.models.adapters import (
    Lora,
    MergedWeights,
    trained_tensors,
    with_adapters,
    with_merged_layers,
)
from rlhf_triton.models.language_model import load_language_model
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.tools.export import main as export

PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((3, 6, 2, 7))]
TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}
quiet_transformers()
save_start = functools.partial(save_policy, chat_template=TEMPLATES, max_position_embeddings=64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_start(tmp_path_factory.mktemp("start") / "llama")


def make_policy(folder, *, seed=0, **settings):
    torch.manual_seed(seed)  # adapters begin with random weights
    limits = {"model": folder, "max_new_tokens": 8, "prompts_max_tokens": 8, "precision": "float32", "lr": 1e-2}
    return trainable_policy(**{**limits, **settings})


def trained(folder, **settings):
    policy = make_policy(folder, **settings)
    rollout = rows_of(policy.generate(PROMPTS[:2], seed=1))
    train(policy, rollout)
    return policy, rollout


def save(root, policy, step=1):
    save_checkpoint(root, states(policy), step, {}, keep=5)
    return root / str(step)


def parameters(policy):
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


# ---- which folders hold a policy ----


def drop(folder, *names):
    change_tensors(folder, lambda own: [own.pop(name) for name in names])


def rename(folder, name, other):
    add_tensors(folder, {other: load_file(folder / "model.safetensors")[name]})
    drop(folder, name)


def add(folder, **shapes):
    add_tensors(folder, {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})


BY_TOKEN = (40, 16)  # the shape of embeddings and output layer
NO_OUTPUT = r"have no (output layer|lm_head\.weight)"
BY_NAME = "it does not use "
# What the folder is, how it is made, and what is refused; whether the headers show it, before anything is loaded.
NO_POLICIES = {
    "reward": ("llama", "reward", str, f"{NO_OUTPUT}.*, and {BY_NAME}score.weight", True),
    "body": ("qwen2", "body", str, NO_OUTPUT, True),
    "tied classifier": ("gpt2", "critic", str, f"{BY_NAME}classifier.bias, classifier.weight", True),
    "its class lies": (
        "llama",
        "reward",
        lambda f: change_config(f, architectures=["LlamaForCausalLM"]),
        NO_OUTPUT,
        True,
    ),
    "embeddings alone": ("llama", "language", lambda f: drop(f, "model.embed_tokens.weight"), "have no", True),
    "value head": (
        "llama",
        "language",
        lambda f: add(f, v_head__summary__weight=(1, 16)),
        r"v_head\.summary\.weight",
        True,
    ),
    "quantised": (
        "llama",
        "language",
        lambda f: change_config(f, quantization_config={"bits": 4}),
        "is quantised",
        True,
    ),
    "adapter": ("llama", "language", lambda f: (f / "adapter_config.json").write_text("{}"), "a PEFT adapter", True),
    "lacks a matrix": (
        "llama",
        "language",
        lambda f: drop(f, "model.layers.1.mlp.up_proj.weight"),
        r"have no model\.layers\.1\.mlp\.up_proj\.weight",
        False,
    ),
    "unknown tensors": (
        "llama",
        "language",
        lambda f: add(f, normalizer__mean=(1,)),
        f"{BY_NAME}normalizer.mean",
        False,
    ),
    "too many layers": (
        "llama",
        "language",
        lambda f: change_config(f, num_hidden_layers=1),
        r"model\.layers\.1\.",
        False,
    ),
}


@pytest.mark.parametrize("what", NO_POLICIES)
def test_folder_that_is_not_a_language_model_is_refused_with_its_path(tmp_path, what):
    family, head, change, told, by_headers = NO_POLICIES[what]
    save_tiny(tmp_path, family, head)
    change(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    refused = pytest.raises(CheckpointError, match=rf"(?s)^{re.escape(str(tmp_path))} .*{told}")
    with refused if by_headers else contextlib.nullcontext():
        check_language_model(tmp_path)
    for load in (lambda: make_policy(tmp_path), lambda: load_language_model(tmp_path)):
        with refused:
            load()
    if what not in ("quantised", "adapter"):
        with refused:  # without the look at the headers
            load_model(PolicySection(model=tmp_path))


def test_policy_that_is_not_causal_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not causal.*set is_decoder: true"):
        make_policy(save_start(tmp_path / "mask", "bert"))
    make_policy(save_start(tmp_path / "decoder", "bert", is_decoder=True))


POLICIES = {
    "untied": ("llama", "language", str),
    "tied": ("gpt2", "language", str),
    "tied, both stored": ("gpt2", "language", lambda f: add(f, lm_head__weight=BY_TOKEN)),
    "tied, stored as the output layer": (
        "gpt2",
        "language",
        lambda f: rename(f, "transformer.wte.weight", "lm_head.weight"),
    ),
    "a tied body": ("gpt2", "body", str),
    "its class lies": (
        "llama",
        "language",
        lambda f: change_config(f, architectures=["LlamaForSequenceClassification"]),
    ),
    "old buffers": ("gpt2", "language", lambda f: add(f, h__0__attn__masked_bias=(1,), h__0__attn__bias=(1, 1, 9, 9))),
    "another name of the output layer": ("gpt-neox", "language", str),
}


@pytest.mark.parametrize("what", POLICIES)
def test_complete_language_model_checkpoint_loads_as_policy(tmp_path, what):
    family, head, change = POLICIES[what]
    save_tiny(tmp_path, family, head)
    change(tmp_path)
    check_language_model(tmp_path)
    ids = torch.arange(5)[None]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    assert torch.equal(load_model(PolicySection(model=tmp_path))(ids).logits, expected)
    load_language_model(tmp_path)


# ---- adapters ----


def test_lora_policy_starts_as_its_reference_and_trains_only_adapters(llama):
    policy = make_policy(llama, lora_rank=4)
    full = make_policy(llama)
    rollout = rows_of(policy.generate(PROMPTS, seed=1))
    assert policy.reference is None
    assert torch.equal(tokens_of(rollout), tokens_of(rows_of(full.generate(PROMPTS, seed=1))))
    reference = logprobs_of(policy, rollout, reference=True)
    before = parameters(policy)
    torch.testing.assert_close([logprobs_of(policy, rollout), reference], [logprobs_of(full, rollout)] * 2)
    names = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert names == {name for name in before if "lora_" in name}
    assert sum(len(group["params"]) for group in policy.trained.optimizer.param_groups) == len(names) > 0
    for _ in range(3):
        train(policy, rollout)
    after = parameters(policy)
    assert set() < {name for name in before if not torch.equal(before[name], after[name])} <= names
    assert torch.equal(logprobs_of(policy, rollout, reference=True), reference)  # it stays where it was
    assert not torch.allclose(logprobs_of(policy, rollout), reference)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj", "v_proj"), [f"{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "v_proj")]),
        (("layers.1.self_attn.q_proj",), ["1.self_attn.q_proj"]),
        ("all-linear", 14),  # seven in each of two layers, not the output
    ],
)
def test_lora_targets_select_the_layers_with_adapters(llama, targets, expected):
    policy = make_policy(llama, lora_rank=4, lora_targets=targets)
    found = {name.split(".lora_")[0].partition("model.layers.")[2] for name in trained_tensors(policy.model)}
    assert (len(found) if expected == 14 else sorted(found)) == expected


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_porj", " (did you mean q_proj?); choose from"),
        ("lm_head", "adapters; choose from"),
        ("input_layernorm", "; "),
    ],
)
def test_lora_target_that_matches_no_linear_layer_is_refused(llama, target, hint, monkeypatch):
    """Misspelt, not linear, or next to a valid name; the check reads no weights."""
    monkeypatch.setattr("rlhf_triton.actor.policy.policy.load_model", None)
    with pytest.raises(CheckpointError) as caught:
        make_policy(llama, lora_rank=4, lora_targets=("v_proj", target))
    message = str(caught.value)
    assert message.startswith(f"actor.policy.lora_targets: '{target}' matches no linear layer of {llama}")
    assert hint in message
    assert message.endswith("choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")


def test_config_value_that_transformers_refuses_is_reported_by_key(tmp_path):
    change_config(save_start(tmp_path), text_config={"a": 1})
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    for load in (lambda: load_model(PolicySection(model=tmp_path)), lambda: end_of_sequence(tmp_path)):
        with pytest.raises(CheckpointError, match=r"config\.json: text_config is .*; correct or remove it"):
            load()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_merged_only_inside_with_merged_layers(family, tmp_path):
    """GPT-2's layers hold their weights transposed."""
    model = save_tiny(tmp_path / "model", family, "language").eval()
    wrapper = with_adapters(model, Lora("actor.policy", 4, 8, "all-linear"), model.get_output_embeddings())
    ids = torch.arange(12)[None]
    adapted = MergedWeights(model).adapted
    with torch.no_grad():
        for name, parameter in wrapper.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in wrapper.state_dict().items()}
        apart = model(ids).logits
        with wrapper.disable_adapter():
            assert not torch.allclose(model(ids).logits, apart, atol=0.1)
        with contextlib.suppress(KeyError), with_merged_layers(model):
            torch.testing.assert_close(model(ids).logits, apart, atol=1e-4, rtol=1e-4)
            assert all(layer.merged for layer in adapted.values())
            raise KeyError
        assert torch.equal(model(ids).logits, apart)
    for name, tensor in wrapper.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


# ---- checkpoints ----


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_rank": 2}, {"lora_rank": 2, "lora_targets": ("q_proj",), "precision": "bfloat16"}],
    ids=["full", "lora", "bfloat16"],
)
def test_an_exported_checkpoint_loads_with_transformers_and_peft(llama, tmp_path, settings, capsys):
    start = shutil.copytree(llama, tmp_path / "start")
    policy, rollout = trained(start, **settings)
    policy.save(tmp_path / "expected")
    save(tmp_path / "checkpoints" / "actor", policy, step=3)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "expected")]
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "PeftModel": PeftModel}
    for kind in ("--merged", "--peft")[: 2 if settings else 1]:
        assert export([str(tmp_path), kind]) == 0
        models.append(eval(capsys.readouterr().out, names))
    first, *others = [model(tokens_of(rollout)).logits for model in models]
    assert all((other - first).abs().max() <= (1e-2 if "precision" in settings else 1e-5) for other in others)
    files = [tmp_path / "export" / "step-3" / name for name in ("tokenizer.json", "model.safetensors")]
    assert files[0].stat().st_mode == files[1].stat().st_mode  # as the umask says
    refused = {"--step=2": "no checkpoint of step 2; it has those of steps 3", "--merged": "already exists"}
    for wrong, text in (refused if settings else {**refused, "--peft": ""}).items():
        assert export([str(tmp_path), wrong]) == 2
        assert text in capsys.readouterr().err
    change_tensors(start, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert export([str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert f"started from {start}, which has different weights" in capsys.readouterr().err
    assert export([str(start)]) == 2
    assert "no checkpoint; give the folder (run.dir) of a run that has saved one" in capsys.readouterr().err


def test_saved_policy_lists_the_runs_eos_ids_and_keeps_generation_settings(tmp_path):
    """Such as a temperature without sampling, which transformers saves only in a GenerationConfig as it was loaded."""
    start = save_start(tmp_path / "start")
    published = {"eos_token_id": [1, 5, 999], "do_sample": False, "temperature": 0.6}
    (start / "generation_config.json").write_text(json.dumps(published))
    make_policy(start).save(tmp_path / "policy")
    found = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert {**found, **published, "eos_token_id": [1, 5], "pad_token_id": 2} == found


# ---- bfloat16 ----


def loaded(folder, monkeypatch, *, add_table=False, **settings):
    """Load a policy; return it and the dtype of each load of its model. `add_table` gives the model a buffer."""
    original = AutoModelForCausalLM.from_pretrained
    dtypes = []

    def recording(*args, dtype, **kwargs):
        dtypes.append(dtype)
        model, report = original(*args, dtype=dtype, **kwargs)
        if add_table:
            model.register_buffer("table", torch.zeros(1, dtype=dtype))
        return model, report

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", recording)
        return make_policy(folder, **settings), dtypes


def test_bfloat16_checkpoint_is_loaded_in_float32_only_if_it_is_trained(tmp_path, monkeypatch):
    """The base under adapters has the weights of one that was loaded in float32, and none was float32 in between. A
    family that computes a table in the dtype of its weights would lose digits."""
    folder = save_start(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    narrow = torch.bfloat16
    wide = torch.float32
    lora = {"lora_rank": 2, "precision": "bfloat16"}
    for settings in ({"precision": "bfloat16"}, {"lora_rank": 2}):
        full, dtypes = loaded(folder, monkeypatch, **settings)
        assert (dtypes, {p.dtype for p in full.model.parameters()}) == ([wide], {wide})
    assert loaded(folder, monkeypatch, add_table=True, **lora)[1] == [narrow, wide]
    policy, dtypes = loaded(folder, monkeypatch, **lora)
    monkeypatch.setattr("rlhf_triton.actor.policy.loading.stored_dtypes", lambda _: {"F32"})
    widened, later = loaded(folder, monkeypatch, **lora)
    assert (dtypes, later) == ([narrow], [wide])
    found = MergedWeights(policy.model).plain
    expected = MergedWeights(widened.model).plain
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
