"""Reward functions of the benchmarks and the fuzz test. No large library, so that the reward processes start fast."""

import os

from python_backend.rewards.function import Sample

WORD = "w7"
OPTIMUM = 1.0
DIFFICULTIES = {"d0": range(60), "d1": range(30), "d2": range(30, 40), "d3": range(40, 43), "d4": range(0)}


def share_of_word(sample: Sample) -> float:
    """Return the share of `WORD` among the words of the response; 0 for an empty response."""
    words = (sample.response or "").split()
    return words.count(WORD) / len(words) if words else 0.0


def is_solved(sample: Sample) -> bool:
    """Return whether the first word of the response is in the set of the prompt's difficulty, its first word."""
    words = (sample.response or "").split()
    return words[:1] in [[f"w{i}"] for i in DIFFICULTIES[(sample.prompt or "").split()[0]]]


def variety(sample: Sample) -> float:
    """Return the share of distinct characters in the first 64 characters of the response; 0 for an empty response."""
    text = (sample.response or "")[:64]
    return len(set(text)) / len(text) if text else 0.0


def num_tokens(sample: Sample) -> float:
    """Return the number of tokens, unless the metadata makes the function fail or fork, as the fuzz test does."""
    if sample.metadata.get("do") == "raise":
        raise ValueError("as the metadata says")
    if sample.metadata.get("do") == "fork":
        os.fork()  # both processes return
    return float(len(sample.tokens))
