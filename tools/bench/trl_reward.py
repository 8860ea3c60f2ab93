"""Reward of the comparison with TRL, which both sides evaluate: cheap, and different from response to response."""

from __future__ import annotations

from python_backend.function_rewards import Sample


def variety(sample: Sample) -> float:
    """Share of distinct characters among the first 64 of the response; 0 for an empty one."""
    text = (sample.response or "")[:64]
    return len(set(text)) / len(text) if text else 0.0
