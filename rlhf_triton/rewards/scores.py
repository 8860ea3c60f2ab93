"""Which return values of reward functions are valid."""

import math
from collections.abc import Mapping, Set
from typing import Any

from rlhf_triton.errors import BadScore

NOT_APPLICABLE = object()  # score of a sample to which the function does not apply


def group_scores(value: Any, size: int) -> list[Any]:
    """Convert the result of a groupwise function to a list. Raises BadScore unless it has `size` items, one per row.

    A set has no order, so its items belong to no rows.
    """
    if isinstance(value, (str, bytes, Mapping, Set)) or not hasattr(value, "__iter__"):
        raise BadScore(f"the function returned {value!r:.80}, but it must return {size} numbers, one per response")
    scores = list(value)
    if len(scores) != size:
        raise BadScore(f"the function returned {len(scores)} scores for a group of {size}")
    return scores


def checked(value: Any) -> float:
    """Return a score as a float. Raises BadScore if it is not a number, or not finite."""
    if isinstance(value, (str, bytes)) or value is None:
        raise BadScore(f"the function returned {value!r:.80}, but it must return a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadScore(f"the function returned {value!r:.80}, but it must return a number") from error
    if not math.isfinite(number):
        raise BadScore(f"the function returned {number}, but it must return a finite number")
    return number
