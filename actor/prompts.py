"""Prompts from JSONL, and the order in which the run takes them.
Given: a file with one {"text": …} a line. Returns: `Prompt`s; each step's share, the same for the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actor.rollout import Prompt


class PromptError(ValueError):
    """The prompt file cannot be used; the message names file, line and cause."""


def read_prompts(path: Path, tokenizer: Any, *, max_tokens: int, limit: int | None = None) -> list[Prompt]:
    """Read and tokenise; columns other than `text` and `prompt_id` become metadata.

    Raises:
        PromptError: unreadable file, a line that is no JSON object with `text`, an empty or too long prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand in a text
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts {path}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_parse(line, f"{path}:{number}", number, tokenizer, max_tokens))
    if not prompts:
        raise PromptError(f"{path} holds no prompt")
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


def _parse(line: str, where: str, number: int, tokenizer: Any, max_tokens: int) -> Prompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("text"), str):
        raise PromptError(f'{where}: must be an object with a "text", got {line[:80]!r}')
    tokens = np.asarray(tokenizer(data["text"], add_special_tokens=False)["input_ids"], dtype=np.int64)
    if not 0 < tokens.size <= max_tokens:
        raise PromptError(f"{where}: {tokens.size} tokens, must be 1 to {max_tokens} (actor.max_prompt_tokens)")
    metadata = {key: value for key, value in data.items() if key not in ("text", "prompt_id")}
    return Prompt(str(data.get("prompt_id", number)), data["text"], tokens, metadata)
