"""The weighted sum of several rewards; a row with a missing component has no reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def weighted_sum(
    names: Sequence[str], weights: np.ndarray, components: np.ndarray, causes: Mapping[str, Sequence[str]]
) -> tuple[np.ndarray, list[str]]:
    """Return `(rewards, errors)` of B rows; a row has a reward if all its components and their sum are finite.

    NaN without a cause means that the function does not apply to the row: the component is left out of the sum. If no
    component applies, the row has no reward.

    Args:
        names: names of the C components, for error messages.
        weights: `[C]`.
        components: `[B, C]`, not finite where scoring failed.
        causes: component name -> B error messages, each empty if that row has a score. Components may be left out.

    Returns:
        rewards float32 `[B]`, NaN where there is an error; B errors, empty where there is a reward.
    """
    given = np.asarray([causes.get(name, ["no cause"] * len(components)) for name in names]).T != ""
    applies = given | ~np.isnan(components)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow becomes an error message below
        rewards = (np.where(applies, components, 0.0) @ weights).astype(np.float32)
    errors = []
    for i, row in enumerate(components):
        failed = [
            f"{name}: {causes.get(name, [''] * len(components))[i] or f'scored {row[j]:g}, must be finite'}"
            for j, name in enumerate(names)
            if applies[i, j] and not np.isfinite(row[j])
        ]
        if not applies[i].any():
            failed = ["no reward function applies to this row"]
        if not failed and not np.isfinite(rewards[i]):
            failed = [f"the weighted sum is {rewards[i]:g}, must be finite"]
        errors.append("; ".join(failed))
    return np.where([error == "" for error in errors], rewards, np.float32(np.nan)), errors
