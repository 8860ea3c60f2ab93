"""Texts that are much too long: cut before they are tokenised, and tokenised while other requests are served."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from live_system import TEXTS
from scoring_rig import started
from tiny_tokenizers import CHATS, make_text_tokenizer
from triton_python_backend_utils import Request

from python_backend.checkpoints.tokenization import encode_bare_text, encode_text
from python_backend.wire.contract import REWARDS, Limits, ScoringRows, TokenRow, scoring_rows

WORDS = [word for text in TEXTS for word in text.split()]


class Counting:
    """A tokenizer that counts the characters it gets."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.characters = 0

    def __call__(self, text: str, **settings: Any) -> Any:
        self.characters += len(text)
        return self._tokenizer(text, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", CHATS)
def test_a_cut_text_has_the_tokens_of_the_whole(family: str, side: str) -> None:
    tokenizer = make_text_tokenizer(family, truncation_side=side)
    counting = Counting(tokenizer)
    generator = random.Random(family)
    for max_length in (8, 31, 64):
        text = " ".join(generator.choices(WORDS, k=20_000))
        counting.characters = 0
        expected = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        assert encode_text(counting, text, max_length) == expected
        assert (
            encode_bare_text(counting, text, max_length)
            == tokenizer(text, add_special_tokens=False)["input_ids"][:max_length]
        )
        assert counting.characters < len(text) / 10


@pytest.mark.parametrize(
    "text", [" " * 30_000, "x" * 30_000, "\n \n" * 10_000, "x " * 15_000, " x" + " " * 30_000 + "x"]
)
def test_odd_texts_are_cut_as_the_tokenizer_cuts(text: str) -> None:
    for family in CHATS:
        tokenizer = make_text_tokenizer(family, [*TEXTS, "x" * 40])
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode_bare_text(tokenizer, text, 16) == whole[:16], family
        assert encode_text(tokenizer, text, 16) == tokenizer(text, truncation=True, max_length=16)["input_ids"], family


class Model:
    """A model that scores 0, and reads sentences when `go` is set."""

    version = 1

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.reply = {REWARDS: lambda done: np.zeros((len(done.outputs), 1), np.float32)}

    def read(self, call: Any) -> ScoringRows:
        sentences = call.array("sentences")
        if sentences is not None:
            return ScoringRows(self.tokenized(sentences), unread_bytes=10)
        return scoring_rows(call.array("tokens"), None, limits=Limits(100))

    def tokenized(self, sentences: np.ndarray) -> Iterator[TokenRow]:
        assert self.go.wait(30)
        if b"bad" in sentences[0, 0]:
            raise ValueError("a bad sentence")
        yield TokenRow(np.zeros(1, np.int64))

    def forward(self, model: int, rows: list[TokenRow], width: int) -> Callable[[], list[np.ndarray]]:
        return lambda: [np.zeros(1, np.float32)] * len(rows)


def sentence(text: bytes = b"A list") -> Request:
    return Request({"sentences": np.asarray([[text]], dtype=np.object_)}, ("rewards",))


def test_tokens_do_not_wait_for_sentences_that_are_being_read(scoring: Any) -> None:
    go = threading.Event()
    model = started(Model(go), token_budget=100)
    slow, bad = sentence(), sentence(b"bad")
    tokens = Request({"tokens": np.zeros((2, 3), np.int64)}, ("rewards",))
    model.execute([slow, bad, tokens])
    assert tokens.responses.get(timeout=30).outputs["rewards"].shape == (2, 1)
    assert slow.responses.empty()
    go.set()
    model.finalize()  # what was received is still answered
    assert slow.responses.get(timeout=1).outputs["rewards"].shape == (1, 1)
    assert bad.responses.get(timeout=1).error == "INTERNAL: ValueError: a bad sentence"


def test_sentences_beyond_the_bound_wait_in_tritons_queue(scoring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_UNREAD_BYTES", 15)
    go = threading.Event()
    model = started(Model(go), token_budget=100)
    returned = threading.Event()

    def execute() -> None:
        model.execute([sentence(), sentence()])
        returned.set()

    threading.Thread(target=execute, daemon=True).start()
    assert not returned.wait(0.2)
    go.set()
    assert returned.wait(30)
    model.finalize()
