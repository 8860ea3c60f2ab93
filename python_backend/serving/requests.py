"""Reads scoring requests: token rows as sent, or sentences tokenised with the model's own tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.checkpoints.tokenization import encode_bare_text, encode_text, load_tokenizer
from python_backend.wire.contract import (
    METADATA,
    PROMPT_LENGTHS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TOKENS,
    ContractError,
    Limits,
    ScoringRows,
    check_row,
    metadata_rows,
    scoring_rows,
    sentence_texts,
    text_bytes,
)

if TYPE_CHECKING:  # that module imports triton_python_backend_utils, which exists only inside tritonserver
    from python_backend.serving.triton import Call, Parameters

MESSAGES = "messages"
BYTES_PER_ROW = 128  # estimated overhead of a row's Python objects, in addition to the text
LONGEST_ROW_TOKENS = 32_768  # row limit if neither the checkpoint nor the configuration sets one


class RowReader:
    """Reads requests for one model; `sentences` take precedence over `tokens`."""

    def __init__(
        self, checkpoint: Path, limits: Limits, *, add_special_tokens: bool, skipped_pad_id: int | None = None
    ) -> None:
        """Create a reader; the tokenizer is loaded when the first sentence arrives.

        Args:
            checkpoint: folder with the tokenizer.
            limits: limits to enforce on rows.
            add_special_tokens: True: tokenise sentences as `tokenizer(text)` does, with special tokens. False: without
                special tokens, truncated to the first `max_length` tokens.
            skipped_pad_id: padding id that transformers skips when it looks for a row's last token. With
                `add_special_tokens`, sentences lose their trailing tokens with this id; None: nothing is removed.
        """
        self._checkpoint = checkpoint
        self._limits = limits
        self._adds_special_tokens = add_special_tokens
        self._skipped_pad_id = skipped_pad_id
        self._tokenizer: Any = None

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        """Return the request's rows, as a generator because tokenising sentences is slow.

        Token rows are returned without yielding. For sentences, the generator first yields their estimated memory in
        bytes, before decoding any of them, and yields again after each sentence. The caller may continue it in another
        thread. Raises ContractError if the request is invalid.
        """
        sentences = call.array(SENTENCES)
        if sentences is None:
            arrays = (call.array(name) for name in (TOKENS, SEQUENCE_LENGTHS, PROMPT_LENGTHS))
            return scoring_rows(*arrays, limits=self._limits)
        if call.array(PROMPT_LENGTHS) is not None:
            raise ContractError(f"{PROMPT_LENGTHS}: only valid with {TOKENS}, but {SENTENCES} was sent")
        encoded_metadata = call.array(METADATA)
        yield text_bytes(sentences, encoded_metadata, self._limits) + BYTES_PER_ROW * sentences.size
        texts = sentence_texts(sentences)
        metadata = metadata_rows(encoded_metadata, len(texts))
        rows = []
        for i, text in enumerate(texts):
            rows.append(self._tokenize(i, text, metadata[i]))
            yield len(text)
        return ScoringRows(rows, max(row.size for row in rows))

    def _tokenize(self, index: int, text: str, metadata: dict[str, Any]) -> np.ndarray:
        """Return token ids int64 `[length]`, truncated to the model's limit."""
        if self._tokenizer is None:  # loaded lazily: clients that send tokens never need it
            self._tokenizer = load_tokenizer(self._checkpoint)
        if MESSAGES in metadata:
            text = self._render(index, text, metadata[MESSAGES])
        row = np.asarray(self._encode(text), dtype=np.int64)
        if row.size == 0:
            raise ContractError(
                f"{SENTENCES}[{index}]: {text[:80]!r} has no tokens, an empty sequence cannot be scored"
            )
        check_row(row, index, self._limits)
        return row

    def _encode(self, text: str) -> list[int]:
        max_length = self._limits.max_length or LONGEST_ROW_TOKENS
        if not self._adds_special_tokens:
            return encode_bare_text(self._tokenizer, text, max_length)
        ids = encode_text(self._tokenizer, text, max_length)
        while len(ids) > 1 and ids[-1] == self._skipped_pad_id:
            ids.pop()
        return ids

    def _render(self, index: int, reply: str, messages: Any) -> str:
        """Render `messages`, followed by `reply` if it is not empty, with the checkpoint's chat template."""
        where = f"{METADATA}[{index}].{MESSAGES}"
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise ContractError(f'{where}: {str(messages)[:80]}, must be a list of {{"role": …, "content": …}}')
        if not self._tokenizer.chat_template:
            raise ContractError(
                f"{where}: the tokenizer of {self._checkpoint.name} has no chat template; "
                "save one in that folder (chat_template.jinja), or send the conversation as one text"
            )
        conversation = [*messages, {"role": "assistant", "content": reply}] if reply else messages
        try:
            text = str(self._tokenizer.apply_chat_template(conversation, tokenize=False))
            text.encode()  # raises on lone surrogates: JSON may contain them, tokenizers reject them
            return text
        except Exception as error:  # the template is the checkpoint's own code and may raise any exception
            raise ContractError(f"{where}: the chat template rejects the messages: {error}") from error


def read_limits(limits: Limits, parameters: Parameters) -> Limits:
    """Return the checkpoint's `limits` with the configured bounds on the size of one request.

    `max_length` is the smaller of the checkpoint's and the configured value, or `LONGEST_ROW_TOKENS` if neither is set.
    """
    configured = parameters.optional("max_length")
    lengths = [length for length in (limits.max_length, int(configured) if configured else None) if length]
    return dataclasses.replace(request_limits(limits, parameters), max_length=min(lengths, default=LONGEST_ROW_TOKENS))


def request_limits(limits: Limits, parameters: Parameters) -> Limits:
    """Return `limits` with the configured bounds on the size of one request."""
    return dataclasses.replace(
        limits,
        max_sentence_bytes=parameters.number("max_sentence_bytes"),
        max_request_tokens=parameters.number("max_request_tokens"),
        max_request_bytes=parameters.number("max_request_bytes"),
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
