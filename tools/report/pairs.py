"""The held-out texts of a run before and after training, as pairs, and gains over them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from python_backend.store.jsonl import each_line


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One held-out prompt, continued by the initial and by the final policy.

    A text is prompt + response. For a chat it is the response alone, and `prompt` is the last message.
    """

    prompt_id: str
    prompt: str
    response_before: str
    response_after: str
    text_before: str
    text_after: str
    reward_before: float | None
    reward_after: float | None
    is_chat: bool = False


Scored = tuple[Pair, float, float]  # with the scores of its two texts, before and after


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The mean gain over the held-out prompts with its 95 % interval, by paired bootstrap."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> "Gain":
        """Return the gain over these pairs. Raises ValueError if there are none."""
        before, after = [item[1] for item in scored], [item[2] for item in scored]
        low, high = paired_ci95(before, after)
        return cls(mean=statistics.fmean(after) - statistics.fmean(before), low=low, high=high)


def read_pairs(run_dir: Path) -> list[Pair]:
    """Return the pairs in samples.jsonl, in its order. Raises ValueError if a text is repeated or has no partner."""
    path = run_dir / "samples.jsonl"
    sides: dict[str, dict[str, dict[str, Any]]] = {"before": {}, "after": {}}
    for row in each_line(path, required=True):
        side = sides.get(row["when"])
        if side is None:
            raise ValueError(f"{path}: 'when' is {row['when']!r}, not 'before' or 'after'")
        if row["prompt_id"] in side:
            raise ValueError(f"{path}: prompt_id {row['prompt_id']!r} occurs twice with when={row['when']!r}")
        side[row["prompt_id"]] = row
    before, after = sides["before"], sides["after"]
    unpaired = sorted(before.keys() ^ after.keys())
    if unpaired or not before:
        found = f"{len(before)} texts before, {len(after)} after"
        raise ValueError(f"{path} has {found}; texts without a counterpart: {', '.join(unpaired[:5]) or 'none'}")
    # If no response has a leading space, the decoder strips it; without one, prompt and response would run together.
    stripped = not any(row["response"][:1].isspace() for side in sides.values() for row in side.values())
    return [_pair(row, after[prompt_id], " " if stripped else "") for prompt_id, row in before.items()]


def _pair(before: dict[str, Any], after: dict[str, Any], glue: str) -> Pair:
    prompt = before["prompt"]
    if after["prompt"] != prompt:
        raise ValueError(f"prompt {before['prompt_id']!r} differs: {prompt!r} before, {after['prompt']!r} after")
    is_chat = "question" in before
    start = "" if is_chat else prompt + glue
    return Pair(
        prompt_id=before["prompt_id"],
        prompt=before.get("question", prompt),
        response_before=before["response"],
        response_after=after["response"],
        text_before=start + before["response"],
        text_after=start + after["response"],
        reward_before=before["reward"],
        reward_after=after["reward"],
        is_chat=is_chat,
    )


def rewarded(pairs: Sequence[Pair]) -> list[Scored]:
    """Return the pairs that have both rewards, with these."""
    scored = ((pair, pair.reward_before, pair.reward_after) for pair in pairs)
    return [(pair, before, after) for pair, before, after in scored if before is not None and after is not None]


def paired_ci95(
    before: Sequence[float], after: Sequence[float], *, num_resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Return (low, high), the 95 % percentile bootstrap interval of mean(after - before) over the pairs.

    Raises ValueError if `before` and `after` differ in length or are empty.
    """
    if len(before) != len(after) or len(before) == 0:
        raise ValueError(f"scores must be paired: {len(before)} before, {len(after)} after")
    differences = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(differences), size=(num_resamples, len(differences)))
    low, high = np.percentile(differences[picks].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def distinct2(texts: Sequence[str]) -> float | None:
    """Return the ratio of distinct word bigrams to all word bigrams; None if no text has two words."""
    words = [text.split() for text in texts]
    bigrams = [pair for row in words for pair in pairwise(row)]
    return len(set(bigrams)) / len(bigrams) if bigrams else None
