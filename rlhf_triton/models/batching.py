"""Token-budget micro-batch planner, and padding of rows.

Rows are sorted by length and grouped so that the number of rows times the longest length of a group stays within a
budget. Losses are weighted by token, so the plan does not change a training result beyond rounding.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike


def plan_micro_batches(lengths: Sequence[int], *, token_budget: int, max_rows: int) -> list[list[int]]:
    """Group rows into micro-batches, shortest rows first.

    Args:
        lengths: length of each row in tokens, >= 1.
        token_budget: maximum tokens of one micro-batch, padding included; a longer row gets a micro-batch of its own.
        max_rows: maximum rows of one micro-batch.

    Returns:
        Row indices of each micro-batch, ascending by length; rows of equal length keep their order.

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


def padded_rows(rows: Sequence[np.ndarray], width: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Stack rows into one array `[B, width]`, padded on the right with 0."""
    array = np.zeros((len(rows), width), dtype)
    for i, row in enumerate(rows):
        array[i, : row.size] = row
    return array
