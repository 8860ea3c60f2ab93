"""Reward functions of the benchmarks. They import no large library, so that the reward processes start fast."""

from __future__ import annotations

from python_backend.rewards.function import Sample

WORD = "w7"
OPTIMUM = 1.0


def share_of_word(sample: Sample) -> float:
    """Return the share of `WORD` among the words of the response; 0 for an empty response."""
    words = (sample.response or "").split()
    return words.count(WORD) / len(words) if words else 0.0


def variety(sample: Sample) -> float:
    """Return the share of distinct characters in the first 64 characters of the response; 0 for an empty response."""
    text = (sample.response or "")[:64]
    return len(set(text)) / len(text) if text else 0.0
