"""`python -m tools import`: what it says, writes and refuses; `--merge` makes a checkpoint of an adapter."""

import copy
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from peft import (
    AdaptionPromptConfig,
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config, save_tiny, save_with_value_head
from tiny_tokenizers import VOCAB, make_text_tokenizer, save_text_reward
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import RewardSection, load_config
from python_backend.config.labels import attribute_weights
from python_backend.config.sections import Standardization
from python_backend.models.modeling import load_reward
from tools import convert_pickled, unpickle
from tools.import_checkpoint import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft
    pytest.mark.filterwarnings("ignore:(Unsupported layer type|Setting `save_embedding):UserWarning"),
]
ROWS = [np.asarray([5, 9, 7]), np.asarray([11, 4, 8, 6, 3])]


def save_tokenizer(folder: Path, *words: str) -> None:
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=words[0]).save_pretrained(folder)


def test_the_trial_and_the_yaml_take_settings_of_the_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_with_value_head(tmp_path / "reward", "bert", prefix="score")
    out, arguments = tmp_path / "my.yaml", ["--reward", str(tmp_path / "reward")]
    assert main(arguments) == 2
    assert "set pooling: last or mean" in capsys.readouterr().err
    scores = []
    for pooling in ("last", "mean"):
        out.unlink(missing_ok=True)
        assert main([*arguments, f"reward.pooling={pooling}", "--out", str(out), "reward.append_eos=true"]) == 0
        scores += re.findall(r"trial +loads; .* scores (\S+)", capsys.readouterr().out)
        assert (load_config(out).reward.pooling, load_config(out).reward.append_eos) == (pooling, True)
    assert len({*scores}) == 2
    save_tiny(tmp_path / "labels", "llama", "reward", num_labels=2, id2label={0: "bad", 1: "good"})
    arguments = ["--reward", str(tmp_path / "labels")]
    assert main([*arguments, "reward.attribute_weights={bad: -1, good: 1}"]) == 0
    said = capsys.readouterr().out
    assert "# choose" not in said
    assert re.search(r"scores -?[\d.]+\n", said)
    for wrong, message in (
        ("reward.attribute_weights=[1]", "has 2 labels (bad, good), but reward.attribute_weights has 1 numbers"),
        ("reward.poling=last", "did you mean reward.pooling"),
    ):
        assert main([*arguments, wrong]) == 2
        assert message in capsys.readouterr().err


def test_both_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tiny(tmp_path / "reward", "bert", "reward", reward_standardization={"mean": 0.5, "std": 2.0})
    save_tokenizer(tmp_path / "reward", "a", "b")
    save_with_value_head(tmp_path / "critic", "gpt2", prefix="v_head.summary", bias=True)
    save_tokenizer(tmp_path / "critic", "b", "a")
    out = tmp_path / "my.yaml"
    arguments = ["--reward", str(tmp_path / "reward"), "--critic", str(tmp_path / "critic"), "--out", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for part in (
        "BertForSequenceClassification (bert)",
        "sequence classification `classifier`: 1 output(s), the model's own pooling",
        "value head `v_head.summary`: 1 output(s), on each token",
        "(score - 0.5) / 2",
        "fast (tokenizer.json)",
        "none: chats cannot be scored until chat_template.jinja is saved there",
        "suggested: float32",
        "the value head is v_head.summary",
        "tokenizers: reward and critic DIFFER",
    ):
        assert part in said, part
    assert re.search(r"trial +loads; the row of tokens 1 to 8 scores -?\d", said)
    config = load_config(out)
    assert config.reward.model == tmp_path / "reward"
    assert config.critic.model == tmp_path / "critic"
    assert config.critic.standardization == Standardization(mean=0.5, std=2.0)  # the rewards' own
    with pytest.raises(SystemExit, match="2"):
        main(arguments)  # never writes over a file
    assert "already exists" in capsys.readouterr().err


def test_the_special_tokens_of_a_sentence_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_text_reward(tmp_path, "bert")
    assert main(["--reward", str(tmp_path)]) == 0
    assert re.search(r"\n  sentences     'A text.' is tokenised as: \[CLS\] \S.* \[SEP\]\n", capsys.readouterr().out)


def test_a_critic_from_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = {0: "helpfulness", 1: "verbosity"}
    save_tiny(tmp_path, "llama", "reward", num_labels=2)
    change_config(tmp_path, id2label=names)
    assert main(["--reward", str(tmp_path), "--critic", "from-reward"]) == 0
    said = capsys.readouterr().out
    assert "labels        helpfulness, verbosity" in said
    assert "its 2 outputs merged into one" in said
    text = said[said.index("\nreward:\n") :]
    text, _, told = text.partition("not yet usable")
    assert "choose one of the lines" in told
    sections = yaml.safe_load(text)
    assert sections["critic"]["model"] == sections["reward"]["model"] == str(tmp_path)
    reward = RewardSection.model_validate(sections["reward"])
    with pytest.raises(CheckpointError, match=r"has 2 labels \(helpfulness, verbosity\), and nothing says which of"):
        attribute_weights(reward)  # nothing is chosen for the user
    chosen = text.replace(
        "# attribute_weights: {helpfulness: -1, verbosity: 1}", "attribute_weights: {helpfulness: -1, verbosity: 1}"
    )
    assert attribute_weights(RewardSection.model_validate(yaml.safe_load(chosen)["reward"])) == [-1, 1]
    assert text.count("\n  # merge_attributes: ") == text.count("\n  # attribute_weights: ") == 2
    assert re.search(r"tokens 1 to 8 scores helpfulness -?\d\S+, verbosity -?\d", said)


def test_the_same_tokenizer_and_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for role in ("reward", "critic"):
        save_tiny(tmp_path / role, "llama", role)
        file = tmp_path / role / "model.safetensors"
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
        save_tokenizer(tmp_path / role, "a", "b")
    out = tmp_path / "my.yaml"
    assert main(["--reward", str(tmp_path / "reward"), "--critic", str(tmp_path / "critic"), "--out", str(out)]) == 0
    assert "tokenizers: reward and critic have the same vocabulary" in capsys.readouterr().out
    assert (load_config(out).reward.dtype, load_config(out).critic.dtype) == ("bfloat16", "bfloat16")


def test_what_is_no_reward_model_or_damaged_or_pickled_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    body, reward = tmp_path / "body", tmp_path / "reward"
    save_tiny(body, "qwen2", "body")
    assert main(["--critic", str(body)]) == 0
    assert "the value head starts at 0" in capsys.readouterr().out
    assert main(["--reward", str(body)]) == 2
    assert "is not a trained reward model" in capsys.readouterr().err
    save_tiny(reward, "llama", "reward")
    file = reward / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"][0, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["--reward", str(reward)]) == 2
    assert "its weights are damaged" in capsys.readouterr().err
    assert main(["--reward", str(reward), "--no-load"]) == 0
    assert "loads;" not in capsys.readouterr().out
    file.rename(reward / "pytorch_model.bin")
    assert main(["--reward", str(reward)]) == 2
    assert re.search(r"only pickled weights \(pytorch_model\.bin\).*--convert NEW_FOLDER", capsys.readouterr().err)


WRONG = [
    [],
    ["--reward", "x", "--policy", "y", "--convert", "z"],
    ["--critic", "from-reward"],
    ["--reward", "x", "--out", "no/such/a.yaml"],
    ["--merge", "x"],
    ["--reward", "x", "--base", "y"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage:" in capsys.readouterr().err


def save_adapter(folder: Path, base: Path, family: str, **settings: Any) -> None:
    """Save an adapter as TRL does, after a training that changed all of it."""
    make_text_tokenizer(family).save_pretrained(folder)
    kinds = {"CAUSAL_LM": AutoModelForCausalLM, "TOKEN_CLS": AutoModelForTokenClassification}
    kind = kinds.get(settings.get("task_type", ""), AutoModelForSequenceClassification)
    model = kind.from_pretrained(base, num_labels=settings.pop("num_labels", 1))
    settings = {"task_type": "SEQ_CLS", "r": 2, "target_modules": "all-linear", **settings}
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    adapted.save_pretrained(folder)


def merge(tmp_path: Path, *arguments: str) -> int:
    return main(["--reward", str(tmp_path / "adapter"), "--merge", str(tmp_path / "merged"), *arguments])


# Types of adapters that peft merges: some add a product, some scale, some replace.
TYPES: dict[str, PeftConfig] = {
    "LNTuning": LNTuningConfig(target_modules=["input_layernorm", "model.norm"]),
    "IA3": IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(r=2, target_modules=["q_proj"]),
    "LoHa": LoHaConfig(r=2, target_modules=["q_proj", "down_proj"]),
    "OFT": OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    "LoRA, tokens": LoraConfig(r=2, target_modules="all-linear", trainable_token_indices=[5, 9]),
    "LoRA, biases": LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "LoRA, embeddings": LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "LoRA, norm": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]),
    "LoRA, other scales": LoraConfig(
        r=2, target_modules="all-linear", alpha_pattern={"model.layers.0.mlp.up_proj": 32}, rank_pattern={"q_proj": 3}
    ),
}
# Names of the base model's body, and whether the adapter has them as well; None: transformers' own.
ROOTS: dict[str, tuple[str, bool]] = {
    "wrapped": ("module.model.", False),
    "another": ("transformer.", False),
    "bare": ("", False),
    "another, of both": ("transformer.", True),
    "wrapped, of both": ("reward_model.net.model.", True),
    "bare, of both": ("", True),
}


def trained(folder: Path, base: Path, config: PeftConfig, *, vocab_size: int | None = None) -> Any:
    """Save an adapter of the base model with a new head, all of it trained; return what peft merges of it."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size)
    config = copy.deepcopy(config)
    config.task_type = "SEQ_CLS"
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)
    make_text_tokenizer("qwen2").save_pretrained(folder)
    return adapted.merge_and_unload().eval()


def assert_merged(tmp_path: Path, expected: Any) -> None:
    with torch.no_grad():
        logits = [expected(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in ROWS]
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "root"),
    [
        *((kind, "own") for kind in TYPES),
        *((kind, root) for kind in ("LNTuning", "LoRA, biases", "LoRA, other scales") for root in ROOTS),
    ],
)
@pytest.mark.slow
def test_the_merged_model_is_the_one_that_peft_merges(tmp_path: Path, kind: str, root: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tiny(base, "qwen2", "body", vocab_size=VOCAB, pad_token_id=0)
    theirs = trained(adapter, base, TYPES[kind])
    prefix, of_both = ROOTS.get(root, ("model.", False))
    old, file = "base_model.model.model.", base / "model.safetensors"
    save_file({f"{prefix}{name.removeprefix('model.')}": each for name, each in load_file(file).items()}, file)
    if of_both:
        file, renamed = adapter / "adapter_model.safetensors", f"base_model.model.{prefix}"
        save_file({name.replace(old, renamed, 1): each for name, each in load_file(file).items()}, file)
        file = adapter / "adapter_config.json"
        file.write_text(file.read_text().replace('"model.', f'"{prefix}'))
    assert merge(tmp_path) == 0
    assert_merged(tmp_path, theirs)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert_merged(tmp_path, again)


@pytest.mark.parametrize("kind", ["LoRA, norm", "LoRA, embeddings", "LoRA, tokens"])
@pytest.mark.slow
def test_a_vocabulary_that_was_resized_is_resized_in_the_merged_model(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path / "base", "qwen2", "language", vocab_size=VOCAB, pad_token_id=0)
    theirs = trained(tmp_path / "adapter", tmp_path / "base", TYPES[kind], vocab_size=VOCAB + 3)
    assert merge(tmp_path) == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == VOCAB + 3
    assert_merged(tmp_path, theirs)


@pytest.mark.slow
def test_a_reward_model_of_a_publisher_s_own_type_is_merged(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tiny(base, "gpt-neox", "body", vocab_size=VOCAB)
    body = AutoModel.from_pretrained(base)
    adapted = get_peft_model(body, LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False))
    adapted.save_pretrained(adapter)
    make_text_tokenizer("qwen2").save_pretrained(adapter)
    head = {"out_proj.weight": torch.randn(1, 16), "out_proj.bias": torch.randn(1)}
    own = {f"gpt_neox.{name}": tensor for name, tensor in load_file(base / "model.safetensors").items()}
    save_file({**own, **head}, base / "model.safetensors")
    change_config(base, model_type="gpt_neox_reward_model", pooling="mean", architectures=["GPTNeoXRewardModel"])
    assert merge(tmp_path) == 0
    with torch.no_grad():
        means = [adapted(input_ids=torch.from_numpy(row)[None])[0][0].mean(0) for row in ROWS]
        expected = [(mean @ head["out_proj.weight"].T + head["out_proj.bias"]).numpy() for mean in means]
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), expected, atol=1e-5)


def base_and_adapter(folder: Path) -> tuple[Path, Path, Any]:
    """Save a language model and an adapter of it; return both folders, and peft's model."""
    base, adapter = folder / "base", folder / "adapter"
    save_tiny(base, "qwen2", "language", vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    adapted.save_pretrained(adapter)
    make_text_tokenizer("qwen2").save_pretrained(adapter)
    return base, adapter, adapted


@pytest.mark.slow
def test_the_config_and_each_file_beside_an_adapter_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signals_kept: None
) -> None:
    base, adapter, adapted = base_and_adapter(tmp_path)
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    torch.save(head, adapter / "pytorch_model.bin")  # as TRL's models with a value head
    said = {"normalize_reward": True, "mean": 0.5, "std": 2.0, "quantization_config": {"load_in_4bit": True}}
    (adapter / "config.json").write_text(json.dumps(said))
    assert merge(tmp_path) == 2
    assert "pytorch_model.bin beside the weights may have a part of the model" in capsys.readouterr().err
    assert convert(adapter, tmp_path / "new", "--merge", str(tmp_path / "merged")) == 0
    with torch.no_grad():
        last = [
            adapted(torch.from_numpy(row)[None], output_hidden_states=True).hidden_states[-1][0, -1] for row in ROWS
        ]
        scores = [each @ head["v_head.summary.weight"].T + head["v_head.summary.bias"] for each in last]
    expected = [(score.numpy() - 0.5) / 2 for score in scores]
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), expected, atol=1e-5)
    (tmp_path / "new" / "config.json").write_text(json.dumps({"score_activation": "tanh"}))
    command = ["--reward", str(tmp_path / "new"), "--merge", str(tmp_path / "other")]
    assert main(command) == 2
    assert "says score_activation: 'tanh', which the head" in capsys.readouterr().err
    (tmp_path / "new" / "config.json").unlink()
    save_file(load_file(base / "model.safetensors"), tmp_path / "new" / "model.safetensors")
    assert main(command) == 2
    assert re.search(r"new/model\.safetensors has model\.\S+, and so has", capsys.readouterr().err)
    assert not (tmp_path / "other").exists()


UNMERGED: dict[str, tuple[PeftConfig, str]] = {
    "prompts": (
        PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
        "inputs or layers (peft_type PROMPT_TUNING)",
    ),
    "layers": (LoraConfig(r=2, layer_replication=[(0, 2), (1, 2)], target_modules=["q_proj"]), "(layer_replication ["),
    "attention": (
        AdaptionPromptConfig(adapter_len=2, adapter_layers=1),
        "inputs or layers (peft_type ADAPTION_PROMPT)",
    ),
}


@pytest.mark.parametrize("kind", UNMERGED)
@pytest.mark.slow
def test_an_adapter_that_no_model_of_its_layers_equals_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    config, told = UNMERGED[kind]
    save_text_reward(tmp_path / "base", "llama" if kind == "attention" else "qwen2")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    assert merge(tmp_path) == 2
    said = capsys.readouterr().err
    assert told in said, said
    assert str(tmp_path / "adapter") in said
    assert "Traceback" not in said
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"num_labels": 3}),
        ("qwen2", {"use_dora": True}),
        ("qwen2", {"modules_to_save": ["score", "classifier"]}),
        ("bert", {"modules_to_save": ["score", "classifier"], "bias": "all"}),
        ("roberta", {}),
        ("qwen2", {"task_type": "TOKEN_CLS", "target_modules": ["q_proj"]}),
    ],
)
@pytest.mark.slow
def test_the_merged_model_scores_as_the_adapter(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    head = "language" if family == "qwen2" else "body"
    save_tiny(tmp_path / "base", family, head, vocab_size=VOCAB, pad_token_id=None if family == "qwen2" else 0)
    save_adapter(tmp_path / "adapter", tmp_path / "base", family, **settings)
    assert merge(tmp_path, "--out", str(tmp_path / "my.yaml")) == 0
    assert str(tmp_path / "merged") in (tmp_path / "my.yaml").read_text()
    labels = settings.get("num_labels", 1)
    is_token = settings.get("task_type") == "TOKEN_CLS"
    kind = AutoPeftModelForTokenClassification if is_token else AutoPeftModelForSequenceClassification
    theirs = kind.from_pretrained(tmp_path / "adapter", num_labels=labels).eval()
    with torch.no_grad():
        logits = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in ROWS]
    expected = [each[-1] if is_token else each for each in logits]
    found = load_reward(tmp_path / "merged", merge_attributes=False).score(ROWS)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["pad_token_id"] == (make_text_tokenizer(family).pad_token_id if family == "qwen2" else 0)


@pytest.mark.parametrize("prefix", ["v_head.summary", "regression_head", "value_head", "score.0"])
@pytest.mark.parametrize("place", ["adapter", "a file beside it", "the base model"])
@pytest.mark.slow
def test_a_head_that_the_class_does_not_have_is_merged_too(tmp_path: Path, prefix: str, place: str) -> None:
    base, adapter, adapted = base_and_adapter(tmp_path)
    head = {f"{prefix}.weight": torch.randn(1, 16), f"{prefix}.bias": torch.randn(1)}
    if prefix == "score.0":
        head = {"score.0.weight": torch.randn(8, 16), "score.2.weight": torch.randn(1, 8)}
    file = {"adapter": adapter / "adapter_model.safetensors", "the base model": base / "model.safetensors"}.get(place)
    if file is None:
        save_file(head, adapter / "value_head.safetensors")
    else:
        named = {f"base_model.model.{name}" if place == "adapter" else name: each for name, each in head.items()}
        save_file({**load_file(file), **named}, file, metadata={"format": "pt"})
    assert merge(tmp_path) == 0
    with torch.no_grad():
        hidden = [adapted(input_ids=torch.from_numpy(row)[None], output_hidden_states=True) for row in ROWS]
        last = torch.stack([found.hidden_states[-1][0, -1] for found in hidden])
        if prefix == "score.0":
            expected = (last @ head["score.0.weight"].T).relu() @ head["score.2.weight"].T
        else:
            expected = last @ head[f"{prefix}.weight"].T + head[f"{prefix}.bias"]
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), expected, atol=1e-5)


def linear(hidden: torch.Tensor, head: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return hidden @ head[f"{name}.weight"].T


def urm(hidden: torch.Tensor, head: dict[str, torch.Tensor]) -> torch.Tensor:
    gate = linear(torch.selu(linear(hidden, head, "weights.fc.0")), head, "weights.fc.2")
    return (linear(hidden, head, "score")[:, ::2] * gate).sum(-1, keepdim=True)


MOMENTS = {"normalizer.mean": torch.tensor([0.5]), "normalizer.var": torch.tensor([4.0])}
SCORE = {"score.weight": torch.ones(4, 16)}
GATE = {"weights.fc.0.weight": torch.ones(8, 16), "weights.fc.2.weight": torch.ones(2, 8)}
# Tensors of the base model and of the adapter, each random, config.json of the base model, and the formula.
WHOSE: dict[str, tuple[Any, ...]] = {
    "another name": (["score"], ["v_head"], {}, lambda h, t: linear(h, t, "v_head")),
    "its own name": (["my_head"], ["my_head"], {"value_head_prefix": "my_head"}, lambda h, t: linear(h, t, "my_head")),
    "a name of the base": ([], ["my_head"], {"value_head_prefix": "my_head"}, lambda h, t: linear(h, t, "my_head")),
    "a gate alone": ([*SCORE, *GATE], [*GATE], {}, urm),
    "a new gate": ([*SCORE], [*GATE], {}, urm),
    "the layers of a gate": ([*SCORE, *GATE], [*SCORE], {}, urm),
    "a decoder's classifier": (["classifier"], [], {}, lambda h, t: linear(h, t, "classifier")),
    "a normaliser": (
        ["score_head", *MOMENTS],
        ["score_head"],
        {"do_normalize": True},
        lambda h, t: (linear(h, t, "score_head") - 0.5) / 2,
    ),
    "the base's constants": (["score"], ["score"], {"reward_standardization": {"mean": 0.5, "std": 2.0}}, None),
}


@pytest.mark.parametrize("case", WHOSE)
@pytest.mark.slow
def test_what_an_adapter_trained_replaces_that_of_the_base_and_the_rest_stays(tmp_path: Path, case: str) -> None:
    of_base, of_adapter, config, formula = WHOSE[case]
    formula = formula or (lambda h, t: (linear(h, t, "score") - 0.5) / 2)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tiny(base, "qwen2", "language", vocab_size=VOCAB)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)
    )
    adapted.save_pretrained(adapter)
    make_text_tokenizer("qwen2").save_pretrained(adapter)
    trained: dict[str, torch.Tensor] = {}
    for names, file, prefix in (
        (of_base, base / "model.safetensors", ""),
        (of_adapter, adapter / "adapter_model.safetensors", "base_model.model."),
    ):
        known = {**SCORE, **GATE, **MOMENTS}
        head = {name: torch.randn(known[name].shape) for name in names if name in known}
        head |= {f"{name}.weight": torch.randn(1, 16) for name in names if name not in known}
        head |= {name: tensor for name, tensor in MOMENTS.items() if name in head}
        trained |= head
        own = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
        save_file({**own, **{f"{prefix}{name}": each for name, each in head.items()}}, file, metadata={"format": "pt"})
    change_config(base, **config)
    assert merge(tmp_path) == 0
    with torch.no_grad():
        hidden = [adapted(input_ids=torch.from_numpy(row)[None], output_hidden_states=True) for row in ROWS]
        expected = formula(torch.stack([found.hidden_states[-1][0, -1] for found in hidden]), trained)
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), expected, atol=1e-5)
    assert "lm_head.weight" not in tensors_of(tmp_path / "merged"), "made up by transformers"


BASES: dict[str, tuple[Any, str]] = {
    "a tensor less": (lambda own: {n: own[n] for n in own if "norm.weight" not in n}, r"lack model\.\S*norm\.weight"),
    "a tensor more": (lambda own: {**own, "model.layers.0.extra.weight": torch.ones(1)}, r"layers\.0\.extra\.weight"),
    "a normaliser": (lambda own: {**own, "normalizer.mean": torch.ones(1)}, r"normalizer\.mean, beside the head"),
}


@pytest.mark.parametrize("case", BASES)
@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
@pytest.mark.slow
def test_a_base_model_that_does_not_fit_its_class_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, task: str
) -> None:
    change, told = BASES[case]
    save_tiny(tmp_path / "base", "qwen2", "language", vocab_size=VOCAB)
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2", task_type=task)
    if task == "CAUSAL_LM":
        save_file({"v_head.weight": torch.ones(1, 16)}, tmp_path / "adapter" / "value_head.safetensors")
    file = tmp_path / "base" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    assert merge(tmp_path) == 2
    said = capsys.readouterr().err
    assert re.search(told, said), said
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_an_adapter_of_a_trained_reward_model_keeps_its_head(tmp_path: Path) -> None:
    save_text_reward(tmp_path / "base", "qwen2")
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2", task_type=None, target_modules=["q_proj"])
    assert merge(tmp_path) == 0
    heads = [load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("base", "merged")]
    assert torch.equal(*heads)


@pytest.mark.slow
def test_lora_on_the_head_itself_is_merged(tmp_path: Path) -> None:
    save_text_reward(tmp_path / "base", "qwen2")
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2", task_type=None, target_modules=["q_proj", "score"])
    assert merge(tmp_path) == 0
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in ROWS]
    np.testing.assert_allclose(load_reward(tmp_path / "merged").score(ROWS), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_adapter_with_a_value_head_in_a_file_of_its_own(tmp_path: Path, signals_kept: None) -> None:
    save_tiny(tmp_path / "base", "qwen2", "language", vocab_size=VOCAB)
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2", task_type="CAUSAL_LM")
    head = {"v_head.summary.weight": torch.randn(1, 16), "v_head.summary.bias": torch.randn(1)}
    torch.save(head, tmp_path / "adapter" / "value_head.bin")
    assert convert(tmp_path / "adapter", tmp_path / "new", "--merge", str(tmp_path / "merged")) == 0
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    for row, found in zip(ROWS, load_reward(tmp_path / "merged").score(ROWS), strict=True):
        hidden = theirs(input_ids=torch.from_numpy(row)[None], output_hidden_states=True).hidden_states[-1][0, -1]
        expected = head["v_head.summary.weight"] @ hidden + head["v_head.summary.bias"]
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("base_model.model.v_head.summary.weight", "it has 2 heads, v_head.summary, score; set value_head_prefix"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", "does not use base_model.model.model.layers.7"),
    ],
)
@pytest.mark.slow
def test_tensors_of_an_adapter_that_would_be_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    save_tiny(tmp_path / "base", "qwen2", "language", vocab_size=VOCAB)
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({**weights, name: torch.ones(1, 16)}, file)
    assert merge(tmp_path) == 2
    assert told in capsys.readouterr().err
    lora = next(iter(weights))
    save_file({key: weights[key] for key in weights if key != lora}, file)
    assert merge(tmp_path) == 2
    assert f"it lacks {lora.removesuffix('.weight')}" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_adapters_that_cannot_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*parts: str) -> None:
        assert merge(tmp_path) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in parts), said
        assert not (tmp_path / "merged").exists()

    refused("is not a PEFT adapter")
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    save_tiny(base, "qwen2", "language", vocab_size=VOCAB)
    save_adapter(adapter, base, "qwen2", task_type=None)
    refused("has no trained head", 'modules_to_save=["score"]')
    assert main(["--reward", str(adapter)]) == 2
    assert "--merge NEW_FOLDER" in capsys.readouterr().err
    save_adapter(adapter, base, "qwen2")
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({**weights, "base_model.model.score.weight": torch.ones(1, 99)}, adapter / "adapter_model.safetensors")
    refused("merged into", "score.weight has shape [1, 99], expected [num_labels, 16]")
    save_file({**weights, "base_model.model.model.norm.weight": torch.ones(9)}, adapter / "adapter_model.safetensors")
    refused("model.norm.weight has shape [9], but [16] in", "with --base PATH")
    torch.save({"mean": torch.ones(1)}, adapter / "normalizer.pt")
    refused("normalizer.pt beside the weights may have a part of the model")
    (adapter / "normalizer.pt").rename(base / "reward_scale.pth")
    refused("reward_scale.pth beside the weights may have a part of the model")
    (base / "reward_scale.pth").unlink()
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    refused("is damaged")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused("if its weights are pickled, add `--convert NEW_FOLDER`")
    base.rename(tmp_path / "moved")
    refused("which is no folder here: give it with --base PATH")
    (tmp_path / "merged").mkdir()
    assert merge(tmp_path) == 2
    assert "already exists" in capsys.readouterr().err


class Danger:
    """Makes a folder when it is unpickled without care."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (f"{self.file}-made",)


def save_pickled(folder: Path, name: str, change: Any = dict, *, family: str = "llama", **how: Any) -> dict[str, Any]:
    """Save a reward model with its weights in a pickle, changed by `change`; return the weights as they were."""
    save_tiny(folder, family, "reward")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(tensors), folder / name, **how)
    return tensors


def convert(folder: Path, out: Path, *arguments: str, role: str = "--reward") -> int:
    return main([role, str(folder), "--convert", str(out), "--no-load", *arguments])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    ("name", "change", "how"),
    [
        ("pytorch_model.bin", dict, {}),
        ("pytorch_model.bin", dict, {"_use_new_zipfile_serialization": False}),
        ("model.pt", lambda own: {"module": {f"module.{name}": own[name] for name in own}, "epoch": 3}, {}),
        (
            "a.pth",
            lambda own: {
                "state_dict": own,
                "optimizer": {"state": [own]},
                "lr_schedulers": [own],
                "scaler": {"scale": 65536.0, "growth_factor": 2.0},
                "rng_state": torch.zeros(8, dtype=torch.uint8),
                "hyper_parameters": {"init_std": 0.02},
            },
            {},
        ),
    ],
    ids=["zip", "legacy", "module", "training"],
)
def test_a_pickled_checkpoint_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signals_kept: None, name: str, change: Any, how: Any
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    own = save_pickled(source, name, change, **how)
    save_tokenizer(source, "a", "b")
    torch.save({}, source / "training_args.bin")
    torch.save({}, source / "optimizer.pt")
    linked = tmp_path / "linked"  # as in the cache of the Hub
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    assert convert(linked / name if name == "a.pth" else linked, out) == 0
    assert_same(tensors_of(out), own)
    assert {file.name for file in out.iterdir()} == {
        *(file.name for file in source.iterdir() if file.suffix == ".json"),
        "model.safetensors",
    }
    assert not any(file.is_symlink() for file in out.iterdir())
    said = capsys.readouterr().out
    assert f"reading {name}" in said
    assert ("left out epoch (int)" in said) == (name == "model.pt")
    assert ("left out optimizer, lr_schedulers, scaler, rng_state, hyper_parameters" in said) == (name == "a.pth")
    assert str(out) in said[said.index("\nreward:\n") :]


def test_shards_have_an_index_and_tied_weights_each_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "embed": wide,
        "head": wide,
        "turned": wide.T,
        "slice": wide[1:3],
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)},
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
    }
    torch.save(tensors, tmp_path / "a.bin")
    torch.save({"layers.0.weight": torch.ones(2)}, tmp_path / "head.pt")
    monkeypatch.setattr(unpickle, "SHARD_BYTES", 200)
    unpickle.write_safetensors({tmp_path / "a.bin": "", tmp_path / "head.pt": "head."}, tmp_path, "model")
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert_same(tensors_of(tmp_path), {**tensors, "head.layers.0.weight": torch.ones(2)})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {name: load_file(tmp_path / file).keys() & {name} for name, file in index["weight_map"].items()} == {
        name: {name} for name in tensors_of(tmp_path)
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path).values())


def archive(file: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(file, "w") as opened:
        for name, data in entries.items():
            opened.writestr(name, data)


T = torch.ones(2)
SHARED = {"c": T}
REFUSED: dict[str, tuple[Any, str]] = {
    "code": (lambda file: torch.save({"a": T, "b": Danger(file)}, file), r"calls posix\.mkdir, which is no part"),
    "code, legacy": (
        lambda file: torch.save([Danger(file)], file, _use_new_zipfile_serialization=False),
        r"calls posix\.mkdir",
    ),
    "plain pickle": (lambda file: file.write_bytes(pickle.dumps(Danger(file), 4)), r"calls posix\.mkdir"),
    "numpy": (lambda file: torch.save({"a": T, "loss": np.float64(1)}, file), r"calls numpy\..*multiarray\.scalar"),
    "module": (lambda file: torch.save(torch.nn.Linear(1, 1), file), r"calls torch\.nn\.modules\.linear\.Linear"),
    "script": (lambda file: torch.jit.save(torch.jit.script(torch.nn.ReLU()), file), "calls __torch__"),
    "zip": (lambda file: archive(file, {"a/b": b"c"}), "no file of tensors"),
    "noise": (lambda file: file.write_bytes(b"hello world"), "no file of tensors"),
    "empty": (lambda file: file.write_bytes(b""), "no file of tensors"),
    "numbers": (lambda file: torch.save({"a": 1, "b": [2.0]}, file), "has no tensors"),
    "a list": (lambda file: torch.save({"model": {"a": [T, T]}}, file), "a is a list of tensors"),
    "twice": (lambda file: torch.save({"model": {"a": T}, "module": {"a": T}}, file), "it has a twice"),
    "one dict twice": (lambda file: torch.save({key: SHARED for key in "ab"}, file), "the dict 'b' more than once"),
    "expanded": (lambda file: torch.save({"a": torch.ones(1).expand(10**10)}, file), "a claims 40,000,000,000 bytes"),
    "sparse": (lambda file: torch.save({"a": torch.eye(3).to_sparse()}, file), "tensor a is not a dense tensor"),
    "no data": (lambda file: torch.save({"a": torch.ones(2, device="meta")}, file), "tensor a is not a dense tensor"),
    "complex": (lambda file: torch.save({"a": torch.ones(2) * 1j}, file), r"tensor a of type torch\.complex64"),
    "reserved": (lambda file: torch.save({"__metadata__": T}, file), "tensor __metadata__ .* cannot be stored"),
    "a mean": (lambda file: torch.save({"model": {"a": T}, "mean": 0.5}, file), r"mean is 0\.5, no tensor"),
    "means": (lambda file: torch.save({"a": T, "reward_std": [1.0, 2.0]}, file), r"reward_std is \[1\.0, 2\.0\]"),
    "a scaler": (
        lambda file: torch.save({"a": T, "reward_scaler": {"mean": 1, "count": 7}}, file),
        r"reward_scaler\.mean is 1, no tensor",
    ),
    "a scaler like a trainer's": (lambda file: torch.save({"a": T, "scaler": {"std": 2.0}}, file), r"scaler\.std is 2"),
    "NaN": (lambda file: torch.save({"a": T, "b": torch.tensor([1, torch.nan])}, file), "tensor b .* not a number"),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and torch.load warns about an archive of it
@pytest.mark.parametrize("content", REFUSED)
def test_anything_but_tensors_in_a_pickle_is_refused(tmp_path: Path, content: str) -> None:
    save, told = REFUSED[content]
    file = tmp_path / "weights.bin"
    save(file)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}.*{told}") as caught:
        unpickle.write_safetensors({file: ""}, tmp_path, "model")
    assert "weights_only" not in str(caught.value), "torch's advice to load the file all the same"
    assert file.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["weights.bin"]


def test_a_bomb_and_a_kill_end_only_the_process_that_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, signals_kept: None
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_pickled(source, "pytorch_model.bin", lambda own: {"a": T}, _use_new_zipfile_serialization=False)
    file = source / "pytorch_model.bin"
    small, huge = pickle.dumps(2, 2)[2:-1], pickle.dumps(2 * 10**9, 2)[2:-1]  # elements of the storage
    assert file.read_bytes().count(b"cpuq\x06" + small) == 1
    good = file.read_bytes()
    file.write_bytes(good.replace(b"cpuq\x06" + small, b"cpuq\x06" + huge))

    def refused(told: str) -> None:
        assert convert(source, out) == 2
        assert re.search(told, capsys.readouterr().err)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    refused(r"pytorch_model\.bin is no file of tensors that .* in [\d,]+ MB of memory: .*allocate")
    file.write_bytes(good)
    with monkeypatch.context() as patched:
        patched.setattr(convert_pickled, "say", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(source, out)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (tmp_path / "source" / "killed").write_text("#!/bin/sh\nkill -KILL $$\n")
    (tmp_path / "source" / "killed").chmod(0o700)
    monkeypatch.setattr(convert_pickled, "interpreter", lambda: str(source / "killed"))
    refused(r"the process that read pytorch_model\.bin was killed by SIGKILL; nothing was written")


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_folders_that_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    own = save_pickled(source, "a.pt")

    def refused(told: str, folder: Path = source) -> None:
        assert convert(folder, out) == 2
        said = capsys.readouterr().err
        assert re.search(told, said), said
        assert not out.exists()

    refused("none does not exist; give the folder", tmp_path / "none")
    torch.save(own, source / "b.pt")
    refused(r"has a\.pt, b\.pt, not one file to convert; give the path of the file")
    write_index(source, {"x": "../a.pt"})
    refused(r"index\.json names \.\./a\.pt, which is no file in this folder")
    write_index(source, {"x": "missing.bin"})
    refused(r"names missing\.bin, which is no file")
    write_index(source, {"x": "a.pt", "y": "b.pt"})
    refused(r"b\.pt: \S+ is in a\.pt as well")
    write_index(source, {"x": "a.pt", "model.norm.weight": "a.pt"})
    (source / "b.pt").unlink()
    refused(r"index\.json lists x, which no file contains")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    refused(r"index\.json has no weight_map")
    (source / "pytorch_model.bin.index.json").unlink()
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10)):
        refused("0.0 GB are free; make room")
    (source / "config.json").unlink()
    refused(r"has no config\.json; copy it and the tokenizer's files there")
    save_tiny(source, "llama", "reward")
    (source / "a.pt").unlink()
    refused("nothing to convert: its weights are safetensors")
    out.mkdir()
    assert convert(source, out) == 2
    assert "already exists" in capsys.readouterr().err


def test_heads_in_pickles_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], signals_kept: None) -> None:
    source = tmp_path / "source"
    save_tiny(source, "llama", "body")
    own = load_file(source / "model.safetensors")
    head = {"network.0.weight": torch.ones(10, 16), "network.0.bias": torch.zeros(10)}
    torch.save(head, source / "regression_layer.pt")
    torch.save({"scale": torch.ones(2)}, source / "pytorch_model_head.bin")
    torch.save(torch.ones(3), source / "calibration.pth")
    save_file({"v_head.weight": torch.ones(1, 16)}, source / "model_value_head.safetensors")
    assert main(["--reward", str(source)]) == 2
    told = "calibration.pth, pytorch_model_head.bin, regression_layer.pt beside the weights may have a part"
    assert told in capsys.readouterr().err
    (source / "model_value_head.safetensors").rename(tmp_path / "head.safetensors")
    torch.save({"v_head.summary.weight": torch.ones(1, 16)}, source / "value_head.bin")
    assert main(["--reward", str(source)]) == 2
    assert "regression_layer.pt, value_head.bin may be one; convert it" in capsys.readouterr().err
    (tmp_path / "head.safetensors").rename(source / "model_extra.safetensors")
    assert convert(source, tmp_path / "out") == 2
    assert "it has 2 heads, v_head.summary, v_head; set value_head_prefix" in capsys.readouterr().err
    convert(source / "value_head.bin", tmp_path / "one")
    assert "left out, since value_head.bin alone was given: calibration.pth, pytorch_model" in capsys.readouterr().out
    renamed = {f"regression_layer.{name}": tensor for name, tensor in head.items()}
    more = {"pytorch_model_head.scale": torch.ones(2), "calibration": torch.ones(3), "v_head.weight": torch.ones(1, 16)}
    assert_same(tensors_of(tmp_path / "out"), {**own, **renamed, **more, "v_head.summary.weight": torch.ones(1, 16)})


def test_a_pickled_adapter_is_converted_and_merged(tmp_path: Path, signals_kept: None) -> None:
    adapter = tmp_path / "adapter"
    save_tiny(tmp_path / "base", "qwen2", "language", vocab_size=VOCAB, pad_token_id=None)
    save_adapter(adapter, tmp_path / "base", "qwen2")
    assert merge(tmp_path) == 0
    weights = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    assert convert(adapter, tmp_path / "converted", "--merge", str(tmp_path / "again")) == 0
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "merged"))


def test_a_policy_is_inspected_and_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signals_kept: None
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_tiny(source, "gpt2", "language")
    own = load_file(source / "model.safetensors")
    own["lm_head.weight"] = own["transformer.wte.weight"]  # tied: in a pickle it has both names
    torch.save(own, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    yaml_file = tmp_path / "my.yaml"
    assert main(["--policy", str(source), "--convert", str(out), "--out", str(yaml_file)]) == 0
    assert re.search(r"trial +loads; the log-prob of token 2 after token 1 is -\d", capsys.readouterr().out)
    assert load_config(yaml_file).actor.policy.model == out
    assert_same(tensors_of(out), own)
    assert main(["--policy", str(tmp_path / "none")]) == 2
    save_pickled(tmp_path / "reward", "pytorch_model.bin")
    assert convert(tmp_path / "reward", tmp_path / "converted", role="--policy") == 2
    assert "does not use score.weight" in capsys.readouterr().err
