"""The reward of the learning measurement: the share of one word in the response. The largest is 1.
The standard library alone, as every reward function that starts fast.
"""

from __future__ import annotations

from python_backend.function_rewards import Sample

WORD = "w7"
OPTIMUM = 1.0


def share_of_word(sample: Sample) -> float:
    """Occurrences of the word over all words of the response; 0 of an empty one."""
    words = (sample.response or "").split()
    return words.count(WORD) / len(words) if words else 0.0
