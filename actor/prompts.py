"""Prompts from JSONL, and the order in which the run takes them.
Given: a file with one {"text": …} or {"messages": […]} a line. Returns: `Prompt`s; each step's share of them, the same
for the same seed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actor.rollout import Prompt

logger = logging.getLogger(__name__)
TooLong = Literal["error", "skip", "truncate"]
MESSAGES_KEY = "messages"  # a chat prompt; the server renders it, with the reply, by the reward's own template


class PromptError(ValueError):
    """The prompt file cannot be used; the message names file, line and cause."""


def read_prompts(
    path: Path, tokenizer: Any, *, max_tokens: int, too_long: TooLong = "error", limit: int | None = None
) -> list[Prompt]:
    """Read and tokenise lines with a `text`, or with chat `messages`, which the tokenizer's template renders.

    Columns other than `text` and `prompt_id` become metadata, `messages` too.

    Args:
        max_tokens: longest prompt.
        too_long: what to do with a longer one: `error`, `skip`, or `truncate` to its last tokens; both are logged.
        limit: stop after so many prompts.

    Raises:
        PromptError: unreadable file, a line that is no JSON object with one of the two, an empty or too long prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a text
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts {path}: {error}") from error
    prompts: list[Prompt] = []
    long: list[str] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _parse(line, where, number, tokenizer)
        size = prompt.tokens.size
        if not size or (size > max_tokens and too_long == "error"):
            raise PromptError(f"{where}: {size} tokens, must be 1 to {max_tokens} (actor.max_prompt_tokens)")
        if size > max_tokens:
            long.append(f"line {number} ({size} tokens)")
            if too_long == "skip":
                continue
            prompt = replace(prompt, tokens=prompt.tokens[-max_tokens:])
        prompts.append(prompt)
    if long:
        done = "left out" if too_long == "skip" else "cut to their last tokens"
        logger.warning(
            "%s: %d prompts of more than %d tokens were %s: %s", path, len(long), max_tokens, done,
            ", ".join(long[:5]) + (", …" if len(long) > 5 else ""),
        )  # fmt: skip
    if not prompts:
        raise PromptError(f"{path} holds no prompt" + (f" of at most {max_tokens} tokens" if long else ""))
    return prompts


def take(prompts: Sequence[Prompt], *, start: int, count: int, seed: int) -> list[Prompt]:
    """`count` prompts from position `start` of the endless sequence of shuffled epochs."""
    taken = []
    for position in range(start, start + count):
        epoch, index = divmod(position, len(prompts))
        taken.append(prompts[_order(len(prompts), seed, epoch)[index]])
    return taken


_ORDERS: dict[tuple[int, int, int], np.ndarray] = {}


def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    key = (count, seed, epoch)
    if key not in _ORDERS:
        _ORDERS.clear()
        _ORDERS[key] = np.random.default_rng([seed, epoch]).permutation(count)
    return _ORDERS[key]


def _parse(line: str, where: str, number: int, tokenizer: Any) -> Prompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict) or not {"text", MESSAGES_KEY} & data.keys():
        raise PromptError(f'{where}: must be an object with a "text" or "messages", got {line[:80]!r}')
    text = data["text"] if "text" in data else _rendered(data[MESSAGES_KEY], where, tokenizer)
    if not isinstance(text, str):
        raise PromptError(f"{where}: text: {text!r}, must be a string")
    tokens = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    metadata = {key: value for key, value in data.items() if key not in ("text", "prompt_id")}
    return Prompt(str(data.get("prompt_id", number)), text, tokens, metadata)


def _rendered(messages: Any, where: str, tokenizer: Any) -> str:
    """The chat as the tokenizer's template writes it, up to where the reply begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{where}: {MESSAGES_KEY}: the policy's tokenizer has no chat template; send a text instead")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs: they raise what they like
        raise PromptError(f"{where}: {MESSAGES_KEY} cannot be rendered: {error}") from error
