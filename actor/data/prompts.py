"""Reads and tokenises the prompts of a run, and defines the order in which the run uses them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actor.data.prompt_files import PromptError, PromptRow, read_rows, source_of
from actor.data.rollout import Prompt

__all__ = ["MESSAGES_KEY", "PromptError", "read_prompts", "take"]

logger = logging.getLogger(__name__)
TooLong = Literal["error", "skip", "truncate"]
MESSAGES_KEY = "messages"  # metadata key of a chat; the server renders it with the reward model's own template


def read_prompts(
    path: Path, tokenizer: Any, *, max_tokens: int, too_long: TooLong = "error", limit: int | None = None,
    vocab_size: int | None = None,
) -> list[Prompt]:  # fmt: skip
    """Read and tokenise prompts from rows with `text`, or with chat `messages` that the tokenizer's template renders.

    A `prompt` column (the name in TRL) may hold either. All columns except the text and `prompt_id` become metadata,
    which also holds the chat messages, under `messages`.

    Args:
        max_tokens: maximum prompt length.
        too_long: what to do with a longer prompt: `error`, `skip`, or `truncate` to its last tokens; the last two are
            logged.
        limit: stop after this many prompts.
        vocab_size: number of the model's embeddings; a prompt with a token beyond them is an error. None: not checked.

    Raises:
        PromptError: the file is unreadable; a row is not a JSON object with one of the three columns; or a prompt is
            empty, too long, or has a token that the model has no embedding for.
    """
    prompts: list[Prompt] = []
    long: list[str] = []
    for row in read_rows(path):
        prompt = _prompt(row, tokenizer)
        size = prompt.tokens.size
        if not size or (size > max_tokens and too_long == "error"):
            raise PromptError(
                f"{row.where}: {size} tokens, but a prompt must have 1 to {max_tokens} (actor.prompts.max_tokens)"
            )
        if vocab_size is not None and (largest := int(prompt.tokens.max())) >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise PromptError(
                f"{row.where}: token {largest} ({token!r}) is outside the policy's {vocab_size} embeddings; remove it, "
                "or resize the embeddings to the tokenizer (resize_token_embeddings)"
            )
        if size > max_tokens:
            long.append(f"{row.number} ({size} tokens)")
            if too_long == "skip":
                continue
            prompt = replace(prompt, tokens=prompt.tokens[-max_tokens:])
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if long:
        done = "skipped" if too_long == "skip" else "truncated to their last tokens"
        logger.warning(
            "%s: %d prompts of more than %d tokens were %s: rows %s", path, len(long), max_tokens, done,
            ", ".join(long[:5]) + (", …" if len(long) > 5 else ""),
        )  # fmt: skip
    if not prompts:
        raise PromptError(f"{path} has no prompts" + (f" of at most {max_tokens} tokens" if long else ""))
    return prompts


def take(prompts: Sequence[Prompt], *, start: int, count: int, seed: int) -> list[Prompt]:
    """Return `count` prompts from the infinite sequence of shuffled epochs, beginning at position `start`."""
    taken = []
    for position in range(start, start + count):
        epoch, index = divmod(position, len(prompts))
        taken.append(prompts[_order(len(prompts), seed, epoch)[index]])
    return taken


_ORDERS: dict[tuple[int, int, int], np.ndarray] = {}  # holds the permutation of the current epoch only


def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    key = (count, seed, epoch)
    if key not in _ORDERS:
        _ORDERS.clear()
        _ORDERS[key] = np.random.default_rng([seed, epoch]).permutation(count)
    return _ORDERS[key]


def _prompt(row: PromptRow, tokenizer: Any) -> Prompt:
    columns, where = row.columns, row.where
    source = source_of(row)
    metadata = {name: value for name, value in columns.items() if name not in ("text", "prompt_id", source)}
    text = columns[source]
    if source == MESSAGES_KEY or (source == "prompt" and isinstance(text, list)):
        metadata[MESSAGES_KEY] = text
        text = _rendered(text, f"{where}: {source}", tokenizer)
    if not isinstance(text, str):
        raise PromptError(f"{where}: {source}: must be a string, got {text!r}")
    tokens = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    return Prompt(str(columns.get("prompt_id", row.number)), text, tokens, metadata)


def _rendered(messages: Any, where: str, tokenizer: Any) -> str:
    """Return the chat as text, rendered with the tokenizer's template up to the start of the reply."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{where}: the policy's tokenizer has no chat template; use a text prompt instead")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs and may raise anything
        raise PromptError(f"{where} cannot be rendered: {error}") from error
