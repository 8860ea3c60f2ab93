"""Exponential back-off for all retry loops. Imports only the standard library."""

import random

MAX_PAUSE_S = 8.0


def backoff_s(first_s: float, doublings: int) -> float:
    """Return `min(first_s * 2**doublings, MAX_PAUSE_S)` times a random factor between 0.5 and 1."""
    return min(MAX_PAUSE_S, first_s * 2.0 ** min(doublings, 16)) * random.uniform(0.5, 1.0)
