"""Reads scoring requests: token rows as sent, or sentences tokenised with the model's own tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_triton.checkpoints.tokenization import MAX_ROW_TOKENS, Encoded, encode_bare_text, encode_text, is_encoder
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer, restore_token_types
from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.rewards.replies import split_reply, with_reply
from rlhf_triton.rewards.sample import REPLY_KEY
from rlhf_triton.wire.chats import render_row, texts_in
from rlhf_triton.wire.contract import (
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
    TokenRow,
    check_row,
    check_size,
    scoring_rows,
    sentence_texts,
)
from rlhf_triton.wire.messages import BadMessages, plain_messages
from rlhf_triton.wire.texts import metadata_rows, pair_texts, text_bytes

if TYPE_CHECKING:  # the first imports jinja2, which only a template needs; the second needs tritonserver
    from rlhf_triton.python_backend.serving.templates import RowTemplate
    from rlhf_triton.python_backend.serving.triton import Call

logger = logging.getLogger(__name__)
BYTES_PER_ROW = 128  # estimated overhead of a row's Python objects, in addition to the text
CHARACTERS_PER_TOKEN = 128  # at most: no published vocabulary has longer entries


@dataclass(eq=False)
class RowReader:
    """Reads requests for one model; `sentences` take precedence over `tokens`."""

    checkpoint: Path  # folder with the tokenizer, which is loaded with the first sentence or by `load_tokenizer`
    limits: Limits
    _: KW_ONLY
    add_special_tokens: bool
    """Tokenise sentences with special tokens, as `tokenizer(text)` does. A chat gets its template's special tokens
    only, unless the model is an encoder; see `is_encoder`."""
    skipped_pad_id: int | None = None
    """Padding id that transformers skips when it looks for a row's last token: sentences lose their trailing tokens
    with this id; None: nothing is removed."""
    takes_pairs: bool = False  # a row may have a second text
    append_eos: bool = False  # append the tokenizer's end-of-sequence token to sentences, not to chats
    template: RowTemplate | None = None
    """Renders the text to score; the model then reads only sentences. None: score the sentence itself, or a chat
    rendered with the checkpoint's chat template."""
    generation_prompt: bool = False  # end a chat with the prompt for the next reply
    checks_size: bool = False  # limit tokenised sentences like `tokens`, because the reply has a number per token
    owner: str = "reward model"  # role of the model, for error messages

    def read(self, call: Call) -> ScoringRows:
        """Return the request's rows. Raises ContractError if the request is invalid."""
        sentences = call.array(SENTENCES)
        pairs = self.pairs(call)
        if sentences is None:
            if self.template is not None:
                raise ContractError(f"{TOKENS}: reward.template {NEEDS_MORE}; send {SENTENCES} and {METADATA}")
            arrays = (call.array(name) for name in (TOKENS, SEQUENCE_LENGTHS, PROMPT_LENGTHS))
            return scoring_rows(*arrays, limits=self.limits)
        if call.array(PROMPT_LENGTHS) is not None:
            raise ContractError(f"{PROMPT_LENGTHS}: only valid with {TOKENS}, but {SENTENCES} was sent")
        metadata = call.array(METADATA)
        size = text_bytes(sentences, metadata, self.limits, pairs) + BYTES_PER_ROW * sentences.size
        return ScoringRows(self._tokenized(sentences, pairs, metadata), unread_bytes=size)

    def _tokenized(
        self, sentences: np.ndarray, pairs: np.ndarray | None, encoded_metadata: np.ndarray | None
    ) -> Iterator[TokenRow]:
        texts = sentence_texts(sentences)
        seconds = pair_texts(pairs, len(texts))
        width = 0
        for i, metadata in enumerate(metadata_rows(encoded_metadata, len(texts))):
            row = self.row_of_text(i, texts[i], metadata, seconds[i])
            width = max(width, row.tokens.size)
            yield row
        if self.checks_size:
            check_size(SENTENCES, len(texts), width, self.limits)

    def pairs(self, call: Call) -> np.ndarray | None:
        """Return the second texts of the request's rows, or None. Raises ContractError if they are not allowed."""
        pairs = call.array(TEXT_PAIRS)
        if pairs is not None and not self.takes_pairs:
            raise ContractError(f"{TEXT_PAIRS}: this model scores one text per row, unless reward.text is pair")
        if pairs is not None and (call.array(SENTENCES) is None or call.array(TOKENS) is not None):
            raise ContractError(f"{TEXT_PAIRS}: only valid with {SENTENCES}, and not with {TOKENS}")
        return pairs

    def row_of_text(self, index: int, text: str, metadata: dict[str, Any], pair: str) -> TokenRow:
        """Return the row of one sentence; `pair`: its second text, or "". Raises ContractError."""
        return self._checked(index, self.encoded(index, text, metadata, pair))

    def encoded(self, index: int, text: str, metadata: dict[str, Any], pair: str = "") -> Encoded:
        """Return the tokens of one sentence; `pair`: its second text, or "". Raises ContractError."""
        text, pair = self.rendered(index, text, metadata, pair)
        if self.append_eos and MESSAGES not in metadata:
            end = self.tokenizer.eos_token
            last = pair or text
            if not end:
                raise ContractError(
                    f"{SENTENCES}[{index}]: reward.append_eos is set, but the tokenizer of {self.checkpoint.name} has "
                    "no end-of-sequence token; remove that setting, or give the tokenizer an eos_token"
                )
            last += "" if last.endswith(end) else end
            text, pair = (text, last) if pair else (last, "")
        is_chat = MESSAGES in metadata and self.template is None and not pair
        num_characters = len(text) + len(pair)
        if num_characters > CHARACTERS_PER_TOKEN * self._max_length:  # tokenising it would delay other requests
            raise ContractError(
                f"{SENTENCES}[{index}]: {num_characters} characters, the model takes {self._max_length} tokens "
                "(max_length); shorten the text"
            )
        row = self._encode(text, pair, is_chat=is_chat)
        if not row.ids:
            raise ContractError(
                f"{SENTENCES}[{index}]: {text[:80]!r} has no tokens, and an empty row cannot be scored; send a text"
            )
        return row

    def _checked(self, index: int, row: Encoded) -> TokenRow:
        if len(row.ids) > self._max_length:
            raise ContractError(
                f"{SENTENCES}[{index}]: {len(row.ids)} tokens, the model takes {self._max_length} (max_length), and "
                "nothing is truncated; shorten the text"
            )
        return self._valid(index, row.ids, row.types)

    def rendered(self, index: int, text: str, metadata: dict[str, Any], pair: str = "") -> tuple[str, str]:
        """Return the text to tokenise for a row, and its second text or "". Raises ContractError."""
        messages = messages_in(index, metadata)
        reply_messages = messages_in(index, metadata, REPLY_KEY)
        if reply_messages is not None:
            metadata = {**metadata, REPLY_KEY: reply_messages}
        if self.template is not None:
            text, metadata = (text, metadata) if messages is None else with_reply(messages, text, metadata)
            return self.template.render(index, text, metadata), pair
        if messages is None:
            return text, pair
        before, reply = split_reply(messages, text or pair, metadata)
        if self.takes_pairs and not (text and pair) and reply is not None and (before or pair):
            pair = self._content(index, reply)
            reply = None
        conversation = before if reply is None else [*before, reply]
        return self._render(index, conversation, metadata, generation_prompt=self.generation_prompt), pair

    @staticmethod
    def _content(index: int, reply: dict[str, Any]) -> str:
        """Return a reply's content. Raises ContractError if the reply has other parts, which need a chat template."""
        for (_, key, *_), _ in texts_in([reply]):
            if key != "content":
                raise ContractError(
                    f"{METADATA}[{index}]: the reply has {key}, but this model reads only its content, without a chat "
                    "template; write everything into content"
                )
        return str(reply.get("content") or "")

    def _valid(self, index: int, ids: Sequence[int], types: Sequence[int] | None = None) -> TokenRow:
        row = TokenRow(np.asarray(ids, np.int64), types=None if types is None else np.asarray(types, np.int64))
        check_row(row.tokens, index, self.limits)
        return row

    @property
    def _max_length(self) -> int:
        return self.limits.max_length or MAX_ROW_TOKENS

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded on first use: clients that send tokens never need it."""
        tokenizer = load_tokenizer(self.checkpoint)
        if self.takes_pairs:
            restore_token_types(tokenizer, self.checkpoint)
        return tokenizer

    @functools.cached_property
    def _is_encoder(self) -> bool:
        return is_encoder(self.checkpoint)

    def load_tokenizer(self) -> None:
        """Read what texts need from the checkpoint now, because the folder may have another model by the first text."""
        _ = self.tokenizer, self._is_encoder

    def _encode(self, text: str, pair: str = "", *, is_chat: bool = False) -> Encoded:
        """Return the tokens of a text, or of a pair; nothing is truncated."""
        adds = self.add_special_tokens and (not is_chat or self._is_encoder)
        types = None
        if pair:
            encoded = self.tokenizer(text, pair, add_special_tokens=adds)
            ids = encoded["input_ids"]
            types = encoded.get("token_type_ids")
        else:
            ids = (encode_text if adds else encode_bare_text)(self.tokenizer, text)
        size = len(ids)
        while size > 1 and ids[size - 1] == self.skipped_pad_id:
            size -= 1
        return Encoded(ids[:size], types and types[:size])

    def _render(self, index: int, conversation: list[Any], metadata: dict[str, Any], *, generation_prompt: bool) -> str:
        """Render a conversation with the checkpoint's chat template."""
        where = f"{METADATA}[{index}]"
        if not self.tokenizer.chat_template:
            raise ContractError(
                f"{where}.{MESSAGES}: the tokenizer of {self.checkpoint.name} has no chat template; "
                "save one in that folder (chat_template.jinja), or send the conversation as one text"
            )
        try:
            return render_row(
                self.tokenizer,
                conversation,
                metadata,
                owner=self.owner,
                name=MESSAGES,
                rejected=f"{MESSAGES}: the chat template rejects the messages",
                generation_prompt=generation_prompt,
            )
        except BadMessages as error:
            raise ContractError(f"{where}.{error}") from error


def messages_in(index: int, metadata: dict[str, Any], key: str = MESSAGES) -> list[Any] | None:
    """Return the messages in a row's metadata, or None. Raises ContractError if they are not a valid message list."""
    try:
        return plain_messages(metadata[key]) if key in metadata else None
    except BadMessages as error:
        raise ContractError(f"{METADATA}[{index}].{key}{error}") from error


def read_limits(limits: Limits, parameters: Parameters) -> Limits:
    """Return the checkpoint's `limits` with the configured maximum row length and request size."""
    configured = parameters.optional("max_length")
    return row_limits(request_limits(limits, parameters), int(configured) if configured else None)


def row_limits(limits: Limits, max_length: int | None) -> Limits:
    """Return the checkpoint's `limits` with the smaller of its and the configured maximum row length.

    It is `MAX_ROW_TOKENS` if neither is set.
    """
    lengths = [length for length in (limits.max_length, max_length) if length]
    return dataclasses.replace(limits, max_length=min(lengths, default=MAX_ROW_TOKENS))


def request_limits(limits: Limits, parameters: Parameters) -> Limits:
    """Return `limits` with the configured maximum request size."""
    return dataclasses.replace(limits, max_request_tokens=parameters.number("max_request_tokens"))
