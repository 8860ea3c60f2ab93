"""Reward functions: a function takes a `Sample` and returns a number."""

from python_backend.rewards.function import Sample

__all__ = ["Sample"]
