"""Splits the rows of a process reward into steps, as published models expect.

A step ends after a separator, or where the row's metadata says. The text after the last separator is a further step,
unless it is blank. Published models are trained with a mark after every step, so the last step gets one as well.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_triton.checkpoints.special_tokens import is_special
from rlhf_triton.checkpoints.tokenization import Encoded, encode_bare_text, single_tokens
from rlhf_triton.python_backend.serving.requests import RowReader, messages_in
from rlhf_triton.rewards.replies import split_reply
from rlhf_triton.rewards.sample import PROMPT_KEY, RESPONSE_KEY
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import METADATA, SENTENCES, ContractError, RowSteps, ScoringRows, TokenRow
from rlhf_triton.wire.texts import metadata_rows

if TYPE_CHECKING:
    from rlhf_triton.python_backend.serving.triton import Call

INCOMPLETE = "\ufffd"  # decoded from a part of a character's bytes
MAX_SPELLED = 8  # tokens that are decoded together: a character has up to 4 bytes


class Span(NamedTuple):
    """Character positions of a step in a text."""

    start: int
    content_end: int  # start of the separator
    end: int


@dataclass(eq=False)
class StepReader(RowReader):
    """Reads the rows of a process reward; see `RowReader`.

    Raises CheckpointError without `apart` if the mark is not one token.
    """

    _: KW_ONLY
    per_token: bool = False  # every token is a step
    separator: str | None = None  # None: each row's metadata has step_ends
    mark: str | None = None  # inserted after every step of a sentence, in place of the separator
    apart: bool = True  # tokenise prompt, steps and marks separately, as TRL does; otherwise the whole text at once
    checks_size: bool = True

    def __post_init__(self) -> None:
        self._mark = self.mark or self.separator
        self._pieces: dict[int, str] = {}
        # Whitespace around a mark may be part of the format, as in Math-Shepherd; the tag without it is scored.
        self._tag = (self._mark or "").strip() or self._mark
        if not self.apart and self._tag is not None:
            (self._tag_id,) = single_tokens(self.tokenizer, [self._tag])

    def read(self, call: Call) -> ScoringRows:
        """Return the request's rows and their steps; see `RowReader.read`."""
        rows = super().read(call)
        if call.array(SENTENCES) is not None:
            return rows
        if self.per_token:
            return ScoringRows(map(_every_token, rows.rows), rows.width)
        if self.mark not in (None, self.separator):
            raise ContractError(
                f"{contract.TOKENS}: reward.process.mark, which replaces the separator in texts, "
                f"{contract.NEEDS_MORE}; send {SENTENCES}"
            )
        token_rows = list(rows.rows)
        metadata = metadata_rows(call.array(METADATA), len(token_rows))
        size = sum(row.tokens.nbytes for row in token_rows)
        return ScoringRows(map(self._row_of_tokens, itertools.count(), token_rows, metadata), rows.width, size)

    def _row_of_tokens(self, index: int, given_row: TokenRow, metadata: Mapping[str, Any]) -> TokenRow:
        """Return the row to score, with a mark after its last step, and the steps of its response."""
        row = given_row.tokens
        start = given_row.prompt_length or 0
        step_ends = given_ends(index, metadata, start, row.size - 1)
        if step_ends is not None:
            return TokenRow(row, steps=RowSteps(step_ends, step_ends, step_ends))
        separator = self._separator(index)
        pieces = self._pieces_of(row[start:].tolist())
        text = "".join(pieces)
        after = np.cumsum([len(piece) for piece in pieces])
        spans = split_steps(text, 0, separator)
        ends = np.unique(np.searchsorted(after, [span.end for span in spans], side="left")) + start
        if not spans or spans[-1].content_end < spans[-1].end:  # no step, or the last one ends in a separator
            return TokenRow(row, steps=RowSteps(ends, ends, ends))
        # The last step ends with the row. Its score is read at a mark after its text. The mark replaces an
        # end-of-sequence token, because no published model is trained to score that.
        marked = [*row[: int(ends[-1]) + 1].tolist(), *encode_bare_text(self.tokenizer, separator)]
        ends[-1] = row.size - 1
        steps = RowSteps(np.append(ends[:-1], len(marked) - 1), ends, ends)
        return self._valid(index, marked)._replace(steps=steps)

    def row_of_text(self, index: int, text: str, metadata: dict[str, Any], pair: str) -> TokenRow:
        """Return the row of a sentence, with a mark after each step, and the steps."""
        if self.per_token:
            return _every_token(super().row_of_text(index, text, metadata, pair))
        messages = messages_in(index, metadata)
        if messages is None:
            start = response_start(index, text, metadata)
            prefix = text[:start]
        else:
            messages, reply = split_reply(messages, text, metadata)
            text = text if reply is None else self._content(index, reply)
            start = 0
            prefix = self._render(index, messages, metadata, generation_prompt=True)
        step_ends = given_ends(index, metadata, start + 1, len(text))
        if step_ends is None:
            spans = split_steps(text, start, self._separator(index))
            mark = self._mark
        else:
            ends = step_ends.tolist()
            spans = [Span(begin, end, end) for begin, end in zip([start, *ends], ends, strict=False)]
            mark = self.mark
        contents = [text[span.start : span.content_end] for span in spans]
        is_chat = messages is not None
        if not spans:
            row = self._encode(prefix + text[start:], is_chat=is_chat)
            at = list[int]()
        elif self.apart:
            row, at = self._encode_steps_apart(prefix, contents, mark, is_chat=is_chat)
        elif mark is None:
            raise ContractError(
                f"{METADATA}[{index}].{contract.STEP_ENDS}: needs reward.process.mark, which is not set"
            )
        else:
            row, at = self._encode_whole_text(index, prefix, contents, mark, is_chat=is_chat)
        read_at = np.asarray(at, np.int64)
        steps = RowSteps(read_at, read_at, np.asarray([span.end for span in spans], np.int64))
        return self._checked(index, row)._replace(steps=steps)

    def _encode_steps_apart(
        self, prefix: str, contents: Sequence[str], mark: str | None, *, is_chat: bool
    ) -> tuple[Encoded, list[int]]:
        """Return a row and the index of each step's last token, including its mark, as in TRL's `PRMTrainer`."""
        ids = encode_bare_text(self.tokenizer, prefix)
        at = list[int]()
        bos = self.tokenizer.bos_token_id
        if self.add_special_tokens and not is_chat and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        behind = encode_bare_text(self.tokenizer, mark or "")
        for content in contents:
            ids += [*encode_bare_text(self.tokenizer, content), *behind]
            at.append(len(ids) - 1)
        return Encoded(ids), at

    def _encode_whole_text(
        self, index: int, prefix: str, contents: Sequence[str], mark: str, *, is_chat: bool
    ) -> tuple[Encoded, list[int]]:
        """Return the row of the whole text and the index of each step's tag, found by its token id."""
        text = prefix
        ours = set()
        tag = str(self._tag)
        for content in contents:
            ours.add(len(text) + len(content) + mark.index(tag))
            text += content + mark
        row = self._encode(text, is_chat=is_chat)
        tags = [i for i, token in enumerate(row.ids) if token == self._tag_id]
        written = [match.start() for match in re.finditer(re.escape(tag), text)]
        # A mark of two line breaks behind a text that ends with one is found one character too early.
        if len(tags) != len(written) or not ours <= {*written}:
            raise ContractError(
                f"{SENTENCES}[{index}]: {tag!r} merges with the text before or behind it, so it is no separate token "
                "at the end of each step; set reward.process.mark to a token that does not merge with other text"
            )
        return row, [at for at, position in zip(tags, written, strict=True) if position in ours]

    def _separator(self, index: int) -> str:
        if self.separator is None:
            raise ContractError(
                f"{METADATA}[{index}].{contract.STEP_ENDS}: missing; a process reward without separator "
                f"{contract.NEEDS_MORE}; send it, or set reward.process.separator"
            )
        return self.separator

    def _pieces_of(self, tokens: list[int]) -> list[str]:
        """Return the text of each token; a character that several tokens spell belongs to the last of them."""
        pieces = [self._piece(token) for token in tokens]
        start = 0
        while start < len(tokens):
            end = start + 1
            text = pieces[start]
            complete = [text.rstrip(INCOMPLETE)]
            while text.endswith(INCOMPLETE) and end < min(len(tokens), start + MAX_SPELLED) and pieces[end]:
                end += 1
                text = self._decoded(tokens[start:end])
                complete.append(text.rstrip(INCOMPLETE))
            if text.endswith(INCOMPLETE):  # bytes that are no text
                start += 1
            else:
                pieces[start:end] = [now[len(before) :] for before, now in itertools.pairwise(["", *complete])]
                start = end
        return pieces

    def _piece(self, token: int) -> str:
        """Return the text of one token; "" for a special token, unless it contains the separator."""
        if token not in self._pieces:
            piece = self._decoded([token])
            has_role = token in self.tokenizer.all_special_ids and is_special(self.tokenizer, token)
            self._pieces[token] = "" if has_role and str(self.separator) not in piece else piece
        return self._pieces[token]

    def _decoded(self, tokens: list[int]) -> str:
        # Decoded after another token, because SentencePiece's decoder drops the space at the start of a text.
        anchor = encode_bare_text(self.tokenizer, "a")[-1:]
        return str(self.tokenizer.decode([*anchor, *tokens]).removeprefix(self.tokenizer.decode(anchor)))


def split_steps(text: str, start: int, separator: str) -> list[Span]:
    """Return the steps of `text` from `start` on; separators with only whitespace between them count as one."""
    spans = []
    begin = start
    at = start
    while (separator_start := text.find(separator, at)) >= 0:
        at = separator_start + len(separator)
        if text[begin:separator_start].strip():
            spans.append(Span(begin, separator_start, at))
            begin = at
    if text[begin:].strip():
        spans.append(Span(begin, len(text), len(text)))
    return spans


def given_ends(index: int, metadata: Mapping[str, Any], first: int, last: int) -> np.ndarray | None:
    """Return the row's `step_ends` as int64 `[K]`, None if there are none. Raises ContractError if they are invalid."""
    ends = metadata.get(contract.STEP_ENDS)
    if ends is None:
        return None
    where = f"{METADATA}[{index}].{contract.STEP_ENDS}"
    if not isinstance(ends, list) or not ends or not all(type(end) is int for end in ends):
        raise ContractError(f"{where}: {str(ends)[:80]}, must be a list of integers")
    for before, end in zip([first - 1, *ends], ends, strict=False):
        if not before < end <= last:
            raise ContractError(
                f"{where}: {end}, must be between {first} and {last}, and above the previous one: {str(ends)[:80]}"
            )
    return np.asarray(ends, np.int64)


def response_start(index: int, text: str, metadata: Mapping[str, Any]) -> int:
    """Return the start of the response in a sentence, from `response` or `prompt` in the metadata; default: 0."""
    for key, fits, side in ((RESPONSE_KEY, text.endswith, "end"), (PROMPT_KEY, text.startswith, "start")):
        part = metadata.get(key)
        if isinstance(part, str) and fits(part):
            return len(text) - len(part) if side == "end" else len(part)
        if part is not None:
            raise ContractError(f"{METADATA}[{index}].{key}: {str(part)[:80]!r} is not the {side} of the sentence")
    return 0


def _every_token(row: TokenRow) -> TokenRow:
    """Return the row with a step at each token after its prompt."""
    at = np.arange(row.prompt_length or 0, row.tokens.size)
    return row._replace(steps=RowSteps(at, at, at))
