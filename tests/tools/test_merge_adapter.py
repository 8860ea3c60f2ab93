"""`python -m tools import --merge`: an adapter becomes a checkpoint that scores as PEFT's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny
from tiny_tokenizers import VOCAB, make_text_tokenizer, save_text_reward
from transformers import AutoModelForSequenceClassification

from python_backend.models.modeling import load_reward
from tools.import_checkpoint import main

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # from peft
ROWS = [np.asarray([5, 9, 7]), np.asarray([11, 4, 8, 6, 3])]


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


@pytest.mark.parametrize("family", ["qwen2", "bert"])
@pytest.mark.parametrize(
    "settings", [{"num_labels": 3}, {"use_dora": True}, {"modules_to_save": ["score", "classifier"]}]
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
    for wrong in (["--merge", "x"], ["--reward", "x", "--base", "y"]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
