"""Exponential back-off, for every retry loop. Needs the standard library alone."""

import random

LONGEST_PAUSE_S = 8.0


def backoff_s(first_s: float, doublings: int) -> float:
    """Return `first_s` after so many doublings, at most `LONGEST_PAUSE_S`, with jitter against bursts."""
    return min(LONGEST_PAUSE_S, first_s * 2.0 ** min(doublings, 16)) * random.uniform(0.5, 1.0)
