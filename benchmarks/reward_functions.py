"""Reward functions of the benchmarks. No large library, so that the reward processes start fast."""

from python_backend.rewards.function import Sample

WORD = "w7"
OPTIMUM = 1.0
DIFFICULTIES = {"d0": 0, "d1": 1, "d2": 2, "d3": 4, "d4": 9}  # words that must be right; a response has four


def share_of_word(sample: Sample) -> float:
    """Return the share of `WORD` among the words of the response; 0 for an empty response."""
    words = (sample.response or "").split()
    return words.count(WORD) / len(words) if words else 0.0


def is_solved(sample: Sample) -> bool:
    """Return whether as many first words of the response are right as the prompt's difficulty, its first word, needs.

    Half of the words are right at each place, other ones at the next: a difficulty begins like those below it.
    """
    words, needed = (sample.response or "").split(), DIFFICULTIES[(sample.prompt or "").split()[0]]
    right = [word.startswith("w") and int(word[1:]) >> place & 1 for place, word in enumerate(words)]
    return len(words) >= needed and all(right[:needed])


def variety(sample: Sample) -> float:
    """Return the share of distinct characters in the first 64 characters of the response; 0 for an empty response."""
    text = (sample.response or "")[:64]
    return len(set(text)) / len(text) if text else 0.0


def num_tokens(sample: Sample) -> float:
    """Return the number of tokens."""
    return float(len(sample.tokens))
