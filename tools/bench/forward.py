"""The forward that all contenders share, and the count of what was really computed.
Given: a checkpoint, threads, a folder for counters. Returns: scores; and sums over all processes of a contender.
Every contender loads the model through this module, or counts through it, so none is handicapped.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from python_backend.allocator import use_allocator

FIELDS = ("forwards", "forward_rows", "forward_tokens", "computed_tokens")


@dataclass(frozen=True)
class Computed:
    """What a contender's processes have run so far."""

    forwards: int
    forward_rows: int
    forward_tokens: int
    """Tokens of the rows."""
    computed_tokens: int
    """Positions of the forwards, padding included."""


class Counters:
    """Counts of one model instance, in a file that other processes can read meanwhile."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.counters"
        self._counts = np.memmap(path, np.int64, "w+", shape=(len(FIELDS),))

    def add(self, lengths: Sequence[int], width: int) -> None:
        """One forward of rows of these lengths, padded to `width` tokens."""
        for field, more in enumerate((1, len(lengths), sum(lengths), len(lengths) * width)):
            self._counts[field] += more


def read_counters(folder: Path) -> Computed:
    """The sum over all instances that count in `folder`."""
    counts = [np.fromfile(path, np.int64) for path in sorted(folder.glob("*.counters"))]
    return Computed(*(int(n) for n in np.sum([np.zeros(len(FIELDS), np.int64), *counts], axis=0)))


class CountedReward:
    """The reward model of one instance outside tritonserver: by our forward, or by transformers' own."""

    def __init__(self, checkpoint: Path, counters: Path, *, threads: int, tuned: bool, lean: bool = False) -> None:
        import torch

        from python_backend.modeling import load_reward, quiet_transformers

        use_allocator("retain" if tuned else "default")
        torch.set_num_threads(threads)
        quiet_transformers()
        self._reward = load_reward(checkpoint)
        if not lean:
            self._reward.use_own_forward()
        self._counters = Counters(counters)

    def score(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Rewards `[n, 1]` of token rows `[length_i]`, padded to the longest of them."""
        lengths = [row.size for row in rows]
        self._counters.add(lengths, max(lengths))
        return self._reward.score(rows)

    def score_padded(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Rewards `[n, 1]` of `tokens` `[n, S]`, `lengths` `[n]`, computed at the full S."""
        self._counters.add(lengths.tolist(), tokens.shape[1])
        rows = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]
        return self._reward.score(rows, tokens.shape[1])
