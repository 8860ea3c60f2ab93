"""Counts the reward model's forward passes; `read_counters` adds up the counts of all processes of one contender."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from python_backend.serving.allocator import keep_freed_memory

FIELDS = ("forward_tokens", "computed_tokens")
"""Number of tokens in the rows, and number of positions that were computed, padding included."""


class ForwardCounters:
    """Counters of one model instance, in a memory-mapped file that other processes can read at any time."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.counters"
        self._counts = np.memmap(path, np.int64, "w+", shape=(len(FIELDS),))

    def add(self, lengths: Sequence[int], width: int) -> None:
        """Count one forward pass over rows of these lengths, padded to `width` tokens."""
        self._counts[:] += np.asarray([sum(lengths), len(lengths) * width])


def read_counters(folder: Path) -> dict[str, int]:
    """Return the sum of each field over all instances whose counters are in `folder`."""
    counts = [np.fromfile(path, np.int64) for path in sorted(folder.glob("*.counters"))]
    return dict(zip(FIELDS, np.sum([np.zeros(len(FIELDS), np.int64), *counts], axis=0).tolist(), strict=True))


class CountedReward:
    """A reward model outside tritonserver that counts its forward passes.

    With `lean` it computes the project's forward pass, otherwise transformers' own.
    """

    def __init__(self, checkpoint: str | Path, counters: str | Path, *, threads: int, lean: bool = False) -> None:
        import torch

        from python_backend.models.modeling import load_reward, quiet_transformers

        keep_freed_memory()
        torch.set_num_threads(threads)
        quiet_transformers()
        self._reward = load_reward(Path(checkpoint))
        if not lean:
            self._reward.use_own_forward()
        self._counters = ForwardCounters(Path(counters))

    def score(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return rewards `[n, 1]` of token rows `[length_i]`, which are padded to the longest row."""
        lengths = [row.size for row in rows]
        self._counters.add(lengths, max(lengths))
        return self._reward.score(rows)

    def score_padded(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return rewards `[n, 1]` of `tokens` `[n, S]` with `lengths` `[n]`, computed over all S positions."""
        self._counters.add(lengths.tolist(), tokens.shape[1])
        rows = [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]
        return self._reward.score(rows, tokens.shape[1])
