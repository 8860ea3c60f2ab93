"""Rewards of texts and chats: the server's reader and model against transformers' own text classification pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TEXTS
from tiny_checkpoints import save_tiny
from tiny_tokenizers import CHATS, PLAIN_CHAT, POSITIONS, VOCAB, make_text_tokenizer, save_text_reward
from transformers import AutoTokenizer, ByT5Tokenizer, pipeline

from python_backend.checkpoints.tokenization import encode_text
from python_backend.models.modeling import RewardModel, quiet_transformers
from python_backend.serving.requests import RowReader
from python_backend.wire.contract import METADATA, SENTENCES, TEXT_PAIRS, TOKENS, ContractError, TokenRow, texts_array
from tests.support.loaders import load_reward

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

    def __init__(
        self, texts: list[str], metadata: list[dict[str, Any]] | None = None, **arrays: np.ndarray | None
    ) -> None:
        self._arrays = {SENTENCES: texts_array(texts), **arrays}
        if metadata is not None:
            self._arrays[METADATA] = texts_array([json.dumps(row) for row in metadata])

    def array(self, name: str) -> np.ndarray | None:
        return self._arrays.get(name)


def read(
    folder: Path,
    texts: list[str],
    metadata: list[dict[str, Any]] | None = None,
    *,
    add_special_tokens: bool = True,
    takes_pairs: bool = False,
    append_eos: bool = False,
    **arrays: np.ndarray | None,
) -> tuple[RewardModel, list[TokenRow]]:
    """The model and the rows of one request, by what runs in the server."""
    model = load_reward(folder)
    reader = RowReader(
        folder,
        model.limits,
        add_special_tokens=add_special_tokens,
        skipped_pad_id=model.skipped_pad_id,
        takes_pairs=takes_pairs,
        append_eos=append_eos,
    )
    return model, list(reader.read(Request(texts, metadata, **arrays)).rows)  # type: ignore[arg-type]


def serve(*args: Any, **settings: Any) -> tuple[list[list[int]], np.ndarray]:
    """Token rows and rewards `[B]` of one request; see `read`."""
    model, rows = read(*args, **settings)
    tokens, types = [row.tokens for row in rows], [row.types for row in rows]
    return [row.tolist() for row in tokens], model.score(tokens, types=types)[:, 0]


def classify(folder: Path, texts: list[Any]) -> list[float]:
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
def test_a_pair_scores_as_in_the_pipeline(tmp_path: Path, family: str):
    tokenizer = save_text_reward(tmp_path, family)
    pairs = [
        (TEXTS[0], TEXTS[1]),
        (TEXTS[2], "y"),
        ("", TEXTS[3]),
        (LONG, "y"),
        ("y", LONG),
        (LONG, LONG[5:]),
        ("y [SEP] </s> y", "[SEP] y"),
        ("word " * 150, "one " * 160),
        ("y", "word " * 400),
    ]
    seconds = texts_array([second for _, second in pairs])
    rows, rewards = serve(tmp_path, [first for first, _ in pairs], takes_pairs=True, text_pairs=seconds)
    encoded = [tokenizer(*pair, truncation=True, max_length=POSITIONS) for pair in pairs]
    assert rows == [one["input_ids"] for one in encoded]
    _, found = read(tmp_path, [first for first, _ in pairs], takes_pairs=True, text_pairs=seconds)
    types = [None if row.types is None else row.types.tolist() for row in found]
    assert types == [one.get("token_type_ids") for one in encoded]
    given = [{"text": first, "text_pair": second} for first, second in pairs]
    np.testing.assert_allclose(rewards, classify(tmp_path, given), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("head", ["reward", "critic"])
def test_rows_with_and_without_a_second_text_share_a_forward_pass(tmp_path: Path, head: str):
    """Under a head on each token as well as under an encoder's own."""
    save_text_reward(tmp_path, "bert")
    if head == "critic":
        save_tiny(tmp_path, "bert", "critic", vocab_size=VOCAB, max_position_embeddings=POSITIONS)
    texts, pairs = [TEXTS[0], TEXTS[1], TEXTS[0]], texts_array([TEXTS[2], "", ""])
    rows, rewards = serve(tmp_path, texts, takes_pairs=True, text_pairs=pairs)
    assert rows[1:] == serve(tmp_path, texts[1:])[0]
    model, tokenizer = load_reward(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        for i, pair in enumerate([(TEXTS[0], TEXTS[2]), (TEXTS[1],), (TEXTS[0],)]):
            logits = model.model(**tokenizer(*pair, return_tensors="pt").to(model.model.device)).logits
            score = logits[0, -1, 0] if head == "critic" else logits[0, 0]
            assert rewards[i] == pytest.approx(float(score), abs=TOLERANCE)
    untyped = [np.asarray(row) for row in rows]
    assert abs(model.score(untyped)[0, 0] - rewards[0]) > 1e-4


def test_a_pair_of_huge_texts_is_cut_before_it_is_tokenised(tmp_path: Path):
    """A tokenizer makes a row of each pair of pieces that it cuts off: here 30 million."""
    save_text_reward(tmp_path, "bert")
    texts, pairs = ["word " * 150, "word " * 199_000], texts_array(["one " * 150, "one " * 199_000])
    rows, _ = serve(tmp_path, texts, takes_pairs=True, text_pairs=pairs)
    assert rows[0] == rows[1]


def test_the_prompt_of_a_pair_may_be_a_chat(tmp_path: Path):
    tokenizer = save_text_reward(
        tmp_path, "deberta-v3", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    rows, _ = serve(tmp_path, [""], [{"messages": MESSAGES}], takes_pairs=True, text_pairs=texts_array([REPLY]))
    assert rows == [tokenizer(MESSAGES[0]["content"], REPLY)["input_ids"]]


def test_pairs_that_cannot_be_read_are_refused(tmp_path: Path):
    save_text_reward(tmp_path, "bert")
    ones = texts_array(["y"])
    cases: dict[str, dict[str, Any]] = {
        r"text_pairs: this model scores one text per row, unless reward.text is pair": {"takes_pairs": False},
        r"text_pairs: only valid with sentences, and not with tokens": {TOKENS: np.ones((1, 2), np.int64)},
        r"text_pairs: only valid with sentences, and not": {SENTENCES: None, TOKENS: np.ones((1, 2), np.int64)},
        r"text_pairs: shape \[2, 1\], must be \[1, 1\]": {TEXT_PAIRS: texts_array(["y", "y"])},
        r"text_pairs: shape \[1\], must be \[1, 1\]": {TEXT_PAIRS: ones[0]},
        r"text_pairs\[0\]: not UTF-8": {TEXT_PAIRS: np.asarray([[b"\xff"]], np.object_)},
        r"text_pairs\[0\]: 10000000 bytes, must be at most 1000000": {TEXT_PAIRS: texts_array(["x" * 10_000_000])},
    }
    for message, arrays in cases.items():
        with pytest.raises(ContractError, match=message):
            serve(tmp_path, ["y"], **{"takes_pairs": True, TEXT_PAIRS: ones, **arrays})


def test_texts_end_with_eos_as_in_trl(tmp_path: Path):
    tokenizer = save_text_reward(tmp_path, "qwen2")
    eos = tokenizer.eos_token_id
    texts, metadata = ["y", "y<|im_end|>", "y"], [{}, {}, {"messages": MESSAGES}]
    rows, _ = serve(tmp_path, texts, metadata, append_eos=True)
    assert rows[0] == rows[1] == [*tokenizer("y")["input_ids"], eos]
    assert rows[2] == serve(tmp_path, ["y"], metadata[2:])[0][0]
    rows, _ = serve(tmp_path, ["y"], takes_pairs=True, append_eos=True, text_pairs=texts_array(["one"]))
    assert rows[0] == [*tokenizer("y", "one")["input_ids"], eos]
    save_text_reward(tmp_path, "bert")
    with pytest.raises(ContractError, match=r"append_eos is set, but the tokenizer of .* has no end-of-sequence"):
        serve(tmp_path, ["y"], append_eos=True)


@pytest.mark.parametrize(
    ("num_labels", "problem"),
    [
        (1, None),
        (1, "multi_label_classification"),
        (1, "regression"),
        (3, None),
        (3, "regression"),
        (3, "single_label_classification"),
        (3, "multi_label_classification"),
    ],
)
def test_probabilities_are_those_of_the_pipeline(tmp_path: Path, num_labels: int, problem: str | None):
    save_text_reward(tmp_path, "bert", num_labels=num_labels, model={"problem_type": problem})
    classifier = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    model = load_reward(tmp_path, standardization=(0.5, 2.0))
    rows = [np.asarray(classifier.tokenizer(text)["input_ids"]) for text in TEXTS]
    outputs = model.launch(rows)()
    np.testing.assert_array_equal(outputs[:, :1], model.score(rows))
    for found, expected in zip(model.probabilities(outputs[:, 1:]), classifier([*TEXTS]), strict=True):
        by_label = {item["label"]: item["score"] for item in expected}
        np.testing.assert_allclose(found, [by_label[f"LABEL_{i}"] for i in range(num_labels)], atol=1e-6)


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
    differs = abs(rewards[0] - classify(tmp_path, [TEXTS[0]])[0]) > TOLERANCE
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
