"""`python -m tools import`: what it says, writes and refuses; `--merge` makes a checkpoint of an adapter."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config, save_tiny, save_with_value_head
from tiny_tokenizers import VOCAB, make_text_tokenizer, save_text_reward
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import RewardSection, load_config
from python_backend.config.labels import attribute_weights
from python_backend.config.sections import Standardization
from python_backend.models.modeling import load_reward
from tools.import_checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # from peft
ROWS = [np.asarray([5, 9, 7]), np.asarray([11, 4, 8, 6, 3])]


def save_tokenizer(folder: Path, *words: str) -> None:
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=words[0]).save_pretrained(folder)


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
    assert re.search(r"only pickled weights \(pytorch_model\.bin\).*never opened here", capsys.readouterr().err)


WRONG = [
    [],
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
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=settings.pop("num_labels", 1))
    settings = {"task_type": "SEQ_CLS", "r": 2, "target_modules": "all-linear", **settings}
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    adapted.save_pretrained(folder)


def merge(tmp_path: Path, *arguments: str) -> int:
    return main(["--reward", str(tmp_path / "adapter"), "--merge", str(tmp_path / "merged"), *arguments])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"num_labels": 3}),
        ("qwen2", {"use_dora": True}),
        ("qwen2", {"modules_to_save": ["score", "classifier"]}),
        ("bert", {"modules_to_save": ["score", "classifier"]}),
    ],
)
def test_the_merged_model_scores_as_the_adapter(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    head = "language" if family == "qwen2" else "body"
    save_tiny(tmp_path / "base", family, head, vocab_size=VOCAB, pad_token_id=None if family == "qwen2" else 0)
    save_adapter(tmp_path / "adapter", tmp_path / "base", family, **settings)
    assert merge(tmp_path, "--out", str(tmp_path / "my.yaml")) == 0
    assert str(tmp_path / "merged") in (tmp_path / "my.yaml").read_text()
    labels = settings.get("num_labels", 1)
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=labels).eval()
    with torch.no_grad():
        expected = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in ROWS]
    found = load_reward(tmp_path / "merged", merge_attributes=False).score(ROWS)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["pad_token_id"] == make_text_tokenizer(family).pad_token_id


@pytest.mark.parametrize("prefix", ["v_head.summary", "regression_head", "value_head", "score.0"])
@pytest.mark.parametrize("place", ["adapter", "a file beside it", "the base model"])
def test_a_head_that_the_class_does_not_have_is_merged_too(tmp_path: Path, prefix: str, place: str) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_tiny(base, "qwen2", "language", vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    adapted.save_pretrained(adapter)
    make_text_tokenizer("qwen2").save_pretrained(adapter)
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


def test_an_adapter_of_a_trained_reward_model_keeps_its_head(tmp_path: Path) -> None:
    save_text_reward(tmp_path / "base", "qwen2")
    save_adapter(tmp_path / "adapter", tmp_path / "base", "qwen2", task_type=None, target_modules=["q_proj"])
    assert merge(tmp_path) == 0
    heads = [load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("base", "merged")]
    assert torch.equal(*heads)


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
    refused("cannot be merged into", "size mismatch")
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    refused("is damaged")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    refused("pickled weights are never opened")
    base.rename(tmp_path / "moved")
    refused("which is no folder here: give it with --base PATH")
    (tmp_path / "merged").mkdir()
    assert merge(tmp_path) == 2
    assert "already exists" in capsys.readouterr().err
