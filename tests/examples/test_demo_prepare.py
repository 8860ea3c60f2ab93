"""The preparation in its quick form: what it writes loads, repeats bit for bit, and is never half finished."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import models as demo_models
from examples.demo import prepare as demo_prepare
from examples.demo.prepare import prepare
from examples.demo.prepared_folder import MANIFEST, Built
from python_backend.errors import RlhfError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return prepare(tmp_path_factory.mktemp("demo") / "out", 3, quick=True, log=lambda line: None)


def _hashes(demo: Built) -> dict[str, str]:
    """Of everything but the manifest, which holds the seconds it took."""
    files = (p for p in demo.root.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(demo.root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_module_is_imported_without_torch() -> None:
    code = "import sys, examples.demo.prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_checkpoints_load_through_the_auto_classes(prepared: Built) -> None:
    import torch
    import transformers as hf

    policy = hf.AutoModelForCausalLM.from_pretrained(prepared.root / "policy")
    reward = hf.AutoModelForSequenceClassification.from_pretrained(prepared.root / "reward")
    critic = hf.AutoModelForTokenClassification.from_pretrained(prepared.root / "critic")
    tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
    assert policy(tokens).logits.shape == (2, 6, policy.config.vocab_size)
    assert critic(tokens).logits.shape == (2, 6, 1)
    assert not critic(tokens).logits.any()
    assert critic.dropout.p == 0.0
    assert {m.dtype for model in (policy, reward, critic) for m in model.parameters()} == {torch.float32}
    ours = demo_models.score_rows(reward, [[5, 6, 7, 8], [5, 6, 7, 8, 9, 1]])
    torch.testing.assert_close(reward(tokens).logits[:, 0], ours)
    torch.testing.assert_close(critic.model.state_dict(), policy.model.state_dict())
    assert not list(prepared.root.rglob("*.bin"))
    assert len(list(prepared.root.rglob("*.safetensors"))) == 3


def test_the_reward_s_mean_and_deviation_travel_in_its_config(prepared: Built) -> None:
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(prepared.root / "reward").reward_standardization
    assert stored == {"mean": prepared.figures["reward_mean"], "std": prepared.figures["reward_std"]}
    assert stored["std"] > 0.0


def test_the_tokenizers_are_one_with_its_own_padding(prepared: Built) -> None:
    from transformers import AutoTokenizer

    folders = (prepared.root / "policy", prepared.root / "reward", prepared.root / "critic")
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    tokenizer = AutoTokenizer.from_pretrained(prepared.root / "reward")
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (demo_models.PAD, demo_models.EOS)
    text = "Return the object's name."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_prompts_are_six_tokens_again_and_the_parts_share_none(prepared: Built) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.root / "policy")
    parts = [
        [json.loads(line) for line in p.read_text().splitlines()]
        for p in (prepared.root / "prompts.jsonl", prepared.root / "validation.jsonl")
    ]
    texts = [[line["text"] for line in part] for part in parts]
    assert {len(ids) for part in texts for ids in tokenizer(part)["input_ids"]} == {6}
    assert not set(texts[0]) & set(texts[1])
    assert len(texts[0]) == prepared.figures["num_train_prompts"]
    assert len(texts[1]) == prepared.figures["num_validation_prompts"] >= 256
    ids = [line["prompt_id"] for part in parts for line in part]
    assert len(set(ids)) == len(ids)


def test_a_second_call_returns_what_is_there(prepared: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_prepare, "_build", lambda *_: pytest.fail("built again"))
    assert prepare(prepared.root, 3, quick=True, log=lambda line: None) == prepared


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(prepared: Built, tmp_path: Path) -> None:
    """In another process: no hash seed or earlier draw may matter."""
    command = [sys.executable, "-m", "examples.demo", "sentences", "--prepare-only", "--quick", "run.seed=3"]
    subprocess.run([*command, "--cache-dir", str(tmp_path)], check=True, timeout=240, capture_output=True)
    again = prepare(tmp_path / "seed-3-quick", 3, quick=True, log=lambda line: None)
    assert _hashes(again) == _hashes(prepared)


def test_an_interrupted_preparation_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: Built
) -> None:
    out = tmp_path / "out"
    abandoned = tmp_path / ".out.building-999999999"
    abandoned.mkdir()
    (abandoned / MANIFEST).write_text("{}")

    def interrupted(root: Path, *_: object) -> None:
        (root / "policy").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_prepare, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(out, 3, quick=True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(demo_prepare, "_build", lambda *_: prepared.figures)
    assert prepare(out, 3, quick=True).figures == prepared.figures


def test_another_seed_replaces_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: Built) -> None:
    monkeypatch.setattr(demo_prepare, "_build", lambda root, *_: ((root / "x").touch(), prepared.figures)[1])
    prepare(tmp_path / "out", 1, quick=True)
    (tmp_path / "out" / "stale").touch()
    prepare(tmp_path / "out", 2, quick=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [MANIFEST, "x"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RlhfError, match="neither empty nor a prepared demo"):
        prepare(tmp_path, 1, quick=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
