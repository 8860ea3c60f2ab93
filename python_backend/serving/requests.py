"""Reads scoring requests: token rows as sent, or sentences tokenised with the model's own tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from python_backend.checkpoints.tokenization import LONGEST_ROW_TOKENS, TYPE_SHIFT, encode_sentence, load_tokenizer
from python_backend.wire.contract import (
    MESSAGES,
    METADATA,
    NEEDS_MORE,
    PROMPT_LENGTHS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TEXT_PAIRS,
    TOKENS,
    ContractError,
    Limits,
    ScoringRows,
    check_row,
    metadata_rows,
    pair_texts,
    scoring_rows,
    sentence_texts,
    text_bytes,
)

if TYPE_CHECKING:  # the first imports jinja2, which only a template needs; the second needs tritonserver
    from python_backend.serving.rows.templates import RowTemplate
    from python_backend.serving.triton import Call, Parameters

BYTES_PER_ROW = 128  # estimated overhead of a row's Python objects, in addition to the text


class RowReader:
    """Reads requests for one model; `sentences` take precedence over `tokens`."""

    def __init__(
        self,
        checkpoint: Path,
        limits: Limits,
        *,
        add_special_tokens: bool,
        skipped_pad_id: int | None = None,
        takes_pairs: bool = False,
        has_token_types: bool = False,
        append_eos: bool = False,
        template: RowTemplate | None = None,
        generation_prompt: bool = False,
        truncates: bool = True,
    ) -> None:
        """Create a reader; the tokenizer is loaded when the first sentence arrives.

        Args:
            checkpoint: folder with the tokenizer.
            limits: limits to enforce on rows.
            add_special_tokens: True: tokenise sentences as `tokenizer(text)` does, with special tokens. False: without
                special tokens, truncated to the first `max_length` tokens.
            skipped_pad_id: padding id that transformers skips when it looks for a row's last token. With
                `add_special_tokens`, sentences lose their trailing tokens with this id; None: nothing is removed.
            takes_pairs: whether a row may have a second text.
            append_eos: end a sentence that is no chat with the tokenizer's end-of-sequence token.
            has_token_types: whether the tokens of a pair carry their type (`tokenization.TYPE_SHIFT`).
            template: renders the text to score; such a model reads only sentences. None: the sentence, or the
                checkpoint's chat template.
            generation_prompt: end a chat with the prompt for the next reply.
            truncates: truncate sentences to `max_length`; False: a longer one is an error, because the end of the row
                is what is scored.
        """
        self._checkpoint = checkpoint
        self._limits = limits
        self._adds_special_tokens = add_special_tokens
        self._skipped_pad_id = skipped_pad_id
        self._takes_pairs, self._has_token_types = takes_pairs, has_token_types
        self._appends_eos = append_eos
        self._template = template
        self._generation_prompt = generation_prompt
        self._truncates = truncates

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        """Return the request's rows, as a generator because tokenising sentences is slow.

        Token rows are returned without yielding. For sentences, the generator first yields their estimated memory in
        bytes, before decoding any of them, and yields again after each sentence. The caller may continue it in another
        thread. Raises ContractError if the request is invalid.
        """
        sentences, pairs = call.array(SENTENCES), self.pairs(call)
        if sentences is None:
            if self._template is not None:
                raise ContractError(f"{TOKENS}: reward.template {NEEDS_MORE}; send {SENTENCES} and {METADATA}")
            arrays = (call.array(name) for name in (TOKENS, SEQUENCE_LENGTHS, PROMPT_LENGTHS))
            return scoring_rows(*arrays, limits=self._limits)
        if call.array(PROMPT_LENGTHS) is not None:
            raise ContractError(f"{PROMPT_LENGTHS}: only valid with {TOKENS}, but {SENTENCES} was sent")
        encoded_metadata = call.array(METADATA)
        yield text_bytes(sentences, encoded_metadata, self._limits, pairs) + BYTES_PER_ROW * sentences.size
        texts = sentence_texts(sentences)
        seconds = pair_texts(pairs, len(texts))
        metadata = metadata_rows(encoded_metadata, len(texts))
        rows = []
        for i, text in enumerate(texts):
            rows.append(self._tokenize(i, text, metadata[i], seconds[i]))
            yield len(text) + len(seconds[i])
        return ScoringRows(rows, max(row.size for row in rows))

    def pairs(self, call: Call) -> np.ndarray | None:
        """Return the second texts of the request's rows, if any. Raises ContractError if they have no place."""
        pairs = call.array(TEXT_PAIRS)
        if pairs is not None and not self._takes_pairs:
            raise ContractError(f"{TEXT_PAIRS}: this model scores one text per row, unless reward.text is pair")
        if pairs is not None and (call.array(SENTENCES) is None or call.array(TOKENS) is not None):
            raise ContractError(f"{TEXT_PAIRS}: only valid with {SENTENCES}, and not with {TOKENS}")
        return pairs

    def _tokenize(self, index: int, text: str, metadata: dict[str, Any], pair: str) -> np.ndarray:
        """Return token ids int64 `[length]`; `pair`: the second text, if not empty.

        They are truncated to the model's limit, unless that is an error.
        """
        messages = self._messages(index, metadata)
        if self._template is not None:
            text = self._template.render(index, text, metadata)
        elif messages is not None:
            conversation = [*messages, {"role": "assistant", "content": text}] if text else messages
            text = self._render(index, conversation, generation_prompt=self._generation_prompt)
        append_eos = self._appends_eos and messages is None
        if append_eos and not self.tokenizer.eos_token:
            raise ContractError(
                f"{SENTENCES}[{index}]: reward.append_eos is set, but the tokenizer of {self._checkpoint.name} has no "
                "end-of-sequence token; remove that setting, or give the tokenizer an eos_token"
            )
        row = np.asarray(self._encode(text, pair, append_eos=append_eos), dtype=np.int64)
        if row.size == 0:
            raise ContractError(
                f"{SENTENCES}[{index}]: {text[:80]!r} has no tokens, an empty sequence cannot be scored"
            )
        check_row(row % (1 << TYPE_SHIFT), index, self._limits)
        return row

    @staticmethod
    def _messages(index: int, metadata: dict[str, Any]) -> list[Any] | None:
        """Return the chat in the metadata, or None. Raises ContractError if it is not a list of messages."""
        if MESSAGES not in metadata:
            return None
        messages = metadata[MESSAGES]
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            where = f"{METADATA}[{index}].{MESSAGES}"
            raise ContractError(f'{where}: {str(messages)[:80]}, must be a list of {{"role": …, "content": …}}')
        return messages

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded when it is first used: clients that send tokens never need it."""
        return load_tokenizer(self._checkpoint)

    def _encode(self, text: str, pair: str = "", *, append_eos: bool = False) -> list[int]:
        # One token more than the limit is enough to see that a text is too long.
        max_length = (self._limits.max_length or LONGEST_ROW_TOKENS) + (not self._truncates)
        return encode_sentence(
            self.tokenizer,
            text,
            max_length,
            special_tokens=self._adds_special_tokens,
            skipped_pad_id=self._skipped_pad_id,
            pair=pair,
            token_types=self._has_token_types,
            append_eos=append_eos,
        )

    def _render(self, index: int, conversation: list[Any], *, generation_prompt: bool) -> str:
        """Render a conversation with the checkpoint's chat template."""
        where = f"{METADATA}[{index}].{MESSAGES}"
        if not self.tokenizer.chat_template:
            raise ContractError(
                f"{where}: the tokenizer of {self._checkpoint.name} has no chat template; "
                "save one in that folder (chat_template.jinja), or send the conversation as one text"
            )
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
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
