"""`python -m tools import`: what it says, what it writes, what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config, save_tiny, save_with_value_head
from tiny_tokenizers import save_text_reward
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from python_backend.config import load_config
from python_backend.config.sections import Standardization
from tools.import_checkpoint import main


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
        "sequence classification `classifier`: 1 output(s), with bias, the model's own pooling",
        "value head `v_head.summary`: 1 output(s), with bias, linear, on each token",
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
    assert config.reward.checkpoint == tmp_path / "reward"
    assert config.critic.checkpoint == tmp_path / "critic"
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
    assert "# attribute_weights: [1.0, 1.0]" in text
    sections = yaml.safe_load(text)
    assert sections["critic"]["checkpoint"] == sections["reward"]["checkpoint"] == str(tmp_path)
    assert sections["reward"]["merge_attributes"] is True


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


def test_a_body_is_a_critic_and_no_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tiny(tmp_path, "qwen2", "body")
    assert main(["--critic", str(tmp_path)]) == 0
    assert "the value head starts at 0" in capsys.readouterr().out
    assert main(["--reward", str(tmp_path)]) == 2
    assert "is not a trained reward model" in capsys.readouterr().err


def test_pickled_weights_are_refused_unopened(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tiny(tmp_path, "llama", "reward")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert main(["--reward", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "only pickled weights (pytorch_model.bin)" in error
    assert "never opened here" in error


def test_weights_that_are_not_finite_are_found_by_trying(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_tiny(tmp_path, "llama", "reward")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"][0, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["--reward", str(tmp_path)]) == 2
    assert "its weights are damaged" in capsys.readouterr().err
    assert main(["--reward", str(tmp_path), "--no-load"]) == 0
    assert "loads;" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--critic", "from-reward"], ["--reward", "x", "--out", "no/such/a.yaml"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage:" in capsys.readouterr().err
