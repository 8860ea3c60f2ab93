"""Counters of a reward function."""

import collections
import math
import re
import threading

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_counts: dict[str, float] = collections.defaultdict(float)
_lock = threading.Lock()  # a function may use its own threads


def count(name: str, amount: float = 1) -> None:
    """Add to the counter `name` of this function: `rlhf_reward_function_total{counter="name"}` in the metrics.

    The server receives the count with the result of the sample being scored. If a worker process is killed while it
    scores a sample, that sample's counts are lost.

    Raises ValueError if `name` is not 1 to 40 characters of a-z, 0-9 and _, or `amount` is negative or not finite.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: a counter's name has 1 to 40 characters from a-z, 0-9 and _")
    if not (math.isfinite(amount) and amount >= 0):
        raise ValueError(f"counter {name}: {amount}, must be finite and at least 0")
    with _lock:
        _counts[name] += amount


def take_counts() -> dict[str, float]:
    """Return the counts since the last call."""
    with _lock:
        counts = dict(_counts)
        _counts.clear()
    return counts
