"""Rewards of texts and chats: the server's reader and model against transformers' own text classification pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TEXTS
from tiny_tokenizers import CHATS, PLAIN_CHAT, POSITIONS, make_text_tokenizer, save_text_reward
from transformers import ByT5Tokenizer, pipeline

from python_backend.checkpoints.tokenization import encode_text
from python_backend.models.modeling import load_reward, quiet_transformers
from python_backend.serving.requests import RowReader
from python_backend.serving.round_robin import run_to_end
from python_backend.wire.contract import METADATA, SENTENCES, ContractError, texts_array

TOLERANCE = 1e-5
MESSAGES = [{"role": "user", "content": "Open it."}]
CHAT = [*MESSAGES, {"role": "assistant", "content": "Good day."}]
REPLY = "Good day."
LONG = " ".join(TEXTS)
families = pytest.mark.parametrize("family", CHATS)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    quiet_transformers()


class Request:
    """What the reader asks of one."""

    def __init__(self, texts: list[str], metadata: list[dict[str, Any]] | None) -> None:
        self._arrays = {SENTENCES: texts_array(texts)}
        if metadata is not None:
            self._arrays[METADATA] = texts_array([json.dumps(row) for row in metadata])

    def array(self, name: str) -> np.ndarray | None:
        return self._arrays.get(name)


def serve(
    folder: Path, texts: list[str], metadata: list[dict[str, Any]] | None = None, *, add_special_tokens: bool = True
) -> tuple[list[list[int]], np.ndarray]:
    """Token rows and rewards `[B]` of one request, by what runs in the server."""
    model = load_reward(folder)
    reader = RowReader(folder, model.limits, add_special_tokens=add_special_tokens, skipped_pad_id=model.skipped_pad_id)
    rows = run_to_end(reader.read(Request(texts, metadata))).tokens  # type: ignore[arg-type]
    return [row.tolist() for row in rows], model.score(rows)[:, 0]


def classify(folder: Path, texts: list[str]) -> list[float]:
    """What transformers' pipeline says, each text alone."""
    classifier = pipeline("text-classification", model=str(folder), device="cpu")
    settings = {"function_to_apply": "none", "truncation": True, "max_length": POSITIONS}
    return [found["score"] for found in classifier(texts, **settings)]


@torch.no_grad()
def score_ids(folder: Path, ids: list[int]) -> float:
    """What the pipeline's model says of ids that the tokenizer's own chat template gave."""
    model = pipeline("text-classification", model=str(folder), device="cpu").model
    return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@families
def test_a_text_scores_as_in_the_pipeline(tmp_path: Path, family: str):
    tokenizer = save_text_reward(tmp_path, family)
    texts = [*TEXTS, "y", LONG, *([] if family == "qwen2" else [""])]
    rows, rewards = serve(tmp_path, texts)
    assert rows == [tokenizer(text, truncation=True, max_length=POSITIONS)["input_ids"] for text in texts]
    assert len(rows[len(TEXTS) + 1]) == POSITIONS
    np.testing.assert_allclose(rewards, classify(tmp_path, texts), atol=TOLERANCE, rtol=0)


@families
def test_a_chat_scores_as_its_own_template_says(tmp_path: Path, family: str):
    tokenizer = save_text_reward(tmp_path, family)
    rows, rewards = serve(tmp_path, [REPLY, "", "No chat."], [{"messages": MESSAGES}, {"messages": CHAT}, {}])
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    templated = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    own = CHATS[family] != PLAIN_CHAT  # the template has the special tokens, if there are any
    assert rows[0] == rows[1] == (templated if own else tokenizer(rendered)["input_ids"])
    expected = score_ids(tmp_path, templated) if own else classify(tmp_path, [rendered])[0]
    np.testing.assert_allclose(rewards[:2], expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(rewards[2], classify(tmp_path, ["No chat."])[0], atol=TOLERANCE, rtol=0)
    assert rows == serve(tmp_path, [rendered, rendered, "No chat."])[0]  # or rendered by the client


@families
def test_the_replaced_systems_rows_have_no_special_tokens(tmp_path: Path, family: str):
    tokenizer = save_text_reward(tmp_path, family)
    rows, rewards = serve(tmp_path, [TEXTS[0], LONG], add_special_tokens=False)
    bare = [tokenizer(text, add_special_tokens=False)["input_ids"][:POSITIONS] for text in (TEXTS[0], LONG)]
    assert rows == bare
    assert not {*tokenizer.all_special_ids} & {*rows[0]}
    differs = abs(rewards[0] - classify(tmp_path, [TEXTS[0]])[0]) > 1e-3
    assert differs == (family != "qwen2")


def test_a_padding_token_that_ends_texts_is_skipped_as_in_the_pipeline(tmp_path: Path):
    """end-of-text is also the padding token: transformers pools the token before it."""
    settings: dict[str, Any] = {"added": ("<s>", "</s>"), "pad_token": "</s>"}
    tokenizer = save_text_reward(tmp_path, "llama", **settings)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer("y")["input_ids"][-1]
    texts = [*TEXTS, LONG, "", "</s></s>"]
    rows, rewards = serve(tmp_path, texts)
    assert rows[0] == tokenizer(texts[0])["input_ids"][:-1]
    np.testing.assert_allclose(rewards, classify(tmp_path, texts), atol=TOLERANCE, rtol=0)
    kept, rewards = serve(tmp_path, texts[:1], add_special_tokens=False)
    assert rewards[0] == pytest.approx(score_ids(tmp_path, kept[0]), abs=TOLERANCE)


@pytest.mark.parametrize("template", ["", "{{ eos_token }}"])
def test_a_row_that_ends_with_its_eos_pools_there(tmp_path: Path, template: str):
    chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + template
    tokenizer = save_text_reward(tmp_path, "llama", added=("<s>", "</s>"), chat_template=chat_template)
    rows, rewards = serve(tmp_path, [REPLY, "Good friends"], [{"messages": MESSAGES}, {}])
    for row in rows:
        assert row[0] == tokenizer.bos_token_id != row[1]
        assert row[-1] == tokenizer.eos_token_id != row[-2]
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False).removesuffix("</s>")
    np.testing.assert_allclose(rewards, classify(tmp_path, [rendered, "Good friends"]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_length", [2, 3, 8, 9, 10, 11])
def test_cutting_keeps_the_special_tokens(side: str, max_length: int):
    tokenizer = make_text_tokenizer("llama", added=("<s>", "</s>"), truncation_side=side)
    text = "the words"
    whole = tokenizer(text)["input_ids"]
    cut = encode_text(tokenizer, text, max_length)
    assert cut == tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
    rendered = encode_text(tokenizer, f"<s>{text}</s>", max_length)  # no space before the first word
    assert len(rendered) <= max_length
    assert (rendered[0], rendered[-1]) == (whole[0], whole[-1])
    assert not {whole[0], whole[-1]} & {*rendered[1:-1]}


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")
def test_a_tokenizer_in_python():
    tokenizer = ByT5Tokenizer()  # ids are bytes + 3; </s> is 1
    a, b = 100, 101
    for text, ids in {"ab": [a, b, 1], "ab</s>": [a, b, 1], "abaaa": [a, b, a, 1]}.items():
        assert encode_text(tokenizer, text, 4) == ids


def test_only_pooling_by_the_last_token_skips_padding(tmp_path: Path):
    for family in CHATS:
        tokenizer = save_text_reward(tmp_path / family, family)
        is_causal = family in ("llama", "qwen2")
        assert load_reward(tmp_path / family).skipped_pad_id == (tokenizer.pad_token_id if is_causal else None)
    assert load_reward(tmp_path / "llama", pooling="last").skipped_pad_id is None
    assert load_reward(tmp_path / "llama", pooling="mean").skipped_pad_id is None


def test_a_row_that_cannot_be_read_is_refused(tmp_path: Path):
    save_text_reward(tmp_path, "qwen2", chat_template=None)
    with pytest.raises(ContractError, match=r"sentences\[0\]: '' has no tokens"):
        serve(tmp_path, [""])
    with pytest.raises(ContractError, match=r"has no chat template; save one in that folder"):
        serve(tmp_path, ["y"], [{"messages": MESSAGES}])
