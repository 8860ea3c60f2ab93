"""Texts of rows, decoded with the policy's tokenizer, and the tokens at which characters of these texts end."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import RolloutRow, text_indices
from rlhf_triton.rewards.replies import last_reply
from rlhf_triton.rewards.sample import MESSAGES_KEY

BLOCK = 32  # tokens decoded at once


class RowText(NamedTuple):
    """The texts of a row.

    For a text, prompt and response concatenate to the row's text. For a chat with an environment, the response is the
    policy's last message, and the prompt has all messages before it.
    """

    prompt: Prompt
    response: str
    reply: Sequence[Mapping[str, Any]] = ()  # messages from the policy's first one on; () without an environment


def read_text(row: RolloutRow, tokenizer: Any) -> RowText:
    """Return the texts of a row."""
    prompt = row.prompt
    start = _reply_start(row)
    ids = row.tokens.tolist()
    if not (row.turns and _is_chat(row)):
        text_ids = [ids[index] for index in text_indices(row, tokenizer)]
        before, whole = ("", "") if _is_chat(row) else (_decode(tokenizer, part) for part in (ids[:start], text_ids))
        is_continued = whole.startswith(before) and before
        return RowText(prompt, whole[len(before) :] if is_continued else _decode(tokenizer, text_ids[start:]))
    last = last_reply(row.messages)
    messages = [*prompt.metadata[MESSAGES_KEY], *row.messages[row.num_prompt_messages : last]]
    metadata = {**prompt.metadata, MESSAGES_KEY: messages}
    text = _decode(tokenizer, ids[:start])
    return RowText(
        dataclasses.replace(prompt, text=text, metadata=metadata), row.messages[last]["content"], row.messages
    )


def tokens_at(row: RolloutRow, ends: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Return the indices of the tokens that contain the characters `ends` of the sentence that the server received."""
    first = _reply_start(row)
    places = text_indices(row, tokenizer)
    shift = 0
    if _is_chat(row):
        places = [index for index in places if index >= first]
    else:
        shift = len(_decode(tokenizer, row.tokens[:first].tolist())) - len(row.prompt.text)
    counts = tokens_covering((ends + shift).clip(0).tolist(), tokenizer, row.tokens[places].tolist())
    # The end tokens of the response, which have no text, belong to its last step.
    at = [first, *places]
    return np.array([len(row.tokens) - 1 if count is None else max(first, at[count]) for count in counts], np.int64)


def tokens_covering(ends: Sequence[int], tokenizer: Any, ids: Sequence[int]) -> list[int | None]:
    """Return, for each number of characters, how many of the tokens `ids` it takes to reach it; None if it takes all.

    Each block of tokens is decoded together with the block before it, because a token's text depends on its neighbours.
    """

    def characters(block: int, last: int) -> int:
        return len(_decode(tokenizer, ids[max(0, block - 1) * BLOCK : last]))

    def least(end: int) -> int:
        block = max(0, bisect_left(reached, end) - 1)
        span = range(min((block + 1) * BLOCK, len(ids)))
        return bisect_left(span, end, lo=block * BLOCK, key=lambda n: before[block] + characters(block, n))

    # characters before each block's context, and before each block
    before = [0]
    reached = [0]
    for block in range(-(-len(ids) // BLOCK)):
        stop = min((block + 1) * BLOCK, len(ids))
        reached.append(before[block] + characters(block, stop))
        before.append(reached[-1] - characters(block + 1, stop))
    return [None if end >= reached[-1] else least(end) for end in ends]


def _is_chat(row: RolloutRow) -> bool:
    return MESSAGES_KEY in row.prompt.metadata


def _reply_start(row: RolloutRow) -> int:
    """Return the index of the response's first token; in a chat with an environment, of the policy's last turn."""
    return row.turns[-1].start if row.turns and _is_chat(row) else len(row.prompt.tokens)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode([*ids], skip_special_tokens=False))
