"""The weighted sum of several rewards; a row that lacks one of them has no reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def weighted_sum(
    names: Sequence[str], weights: np.ndarray, components: np.ndarray, causes: Mapping[str, Sequence[str]]
) -> tuple[np.ndarray, list[str]]:
    """`(rewards, errors)` of B rows: a row whose every component is finite has a reward, any other a cause.

    Args:
        weights: `[C]`.
        components: `[B, C]`.
        causes: for each component, if known, the B causes of failure, empty where there is none.

    Returns:
        rewards float32 `[B]`, NaN where there is an error; B errors, empty where there is a reward.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told below
        rewards = (components.astype(np.float64) @ weights).astype(np.float32)
    errors = []
    for i, row in enumerate(components):
        failed = [
            f"{name}: {causes.get(name, [''] * len(components))[i] or f'scored {row[j]:g}, must be finite'}"
            for j, name in enumerate(names)
            if not np.isfinite(row[j])
        ]
        if not failed and not np.isfinite(rewards[i]):
            failed = [f"the weighted sum is {rewards[i]:g}, must be finite"]
        errors.append("; ".join(failed))
    return np.where([error == "" for error in errors], rewards, np.float32(np.nan)), errors
