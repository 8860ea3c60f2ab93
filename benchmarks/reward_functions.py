"""The benchmarks' reward function. No large library, so that its process starts fast."""

from rlhf_triton.rewards.function import Sample


def variety(sample: Sample) -> float:
    """Return the share of distinct characters in the first 64 characters of the response; 0 for an empty response."""
    text = (sample.response or "")[:64]
    return len(set(text)) / len(text) if text else 0.0
