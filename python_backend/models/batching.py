"""Token-budget micro-batches, rows sorted by length and cut so that rows x longest stays within a budget; padding.

The same plan serves requests and cuts training batches; losses are token-weighted, so it never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike


def plan_micro_batches(lengths: Sequence[int], *, token_budget: int, max_rows: int) -> list[list[int]]:
    """Cut rows into micro-batches, shortest rows first.

    Args:
        lengths: tokens of each row, >= 1.
        token_budget: most tokens of one micro-batch, padding included; a longer row is alone.
        max_rows: most rows of one micro-batch.

    Returns:
        Row indices, ascending by length; equal lengths keep their order.

    Raises:
        ValueError: `token_budget` or `max_rows` below 1.
    """
    if token_budget < 1 or max_rows < 1:
        raise ValueError(f"token_budget ({token_budget}) and max_rows ({max_rows}) must be at least 1")
    plan: list[list[int]] = []
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) == max_rows or (len(batch) + 1) * lengths[row] > token_budget):
            plan.append(batch)
            batch = []
        batch.append(row)
    if batch:
        plan.append(batch)
    return plan


def padded_width(longest: int, multiple: int, limit: int | None) -> int:
    """The width of a forward in tokens: its longest row, rounded up to a multiple, but not above the model's limit."""
    width = -(-longest // multiple) * multiple
    return max(longest, width if limit is None else min(width, limit))


def padded_rows(rows: Sequence[np.ndarray], width: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Return `[B, width]` with 0 behind each row."""
    array = np.zeros((len(rows), width), dtype)
    for i, row in enumerate(rows):
        array[i, : row.size] = row
    return array
