"""Reward functions: a function takes a `Sample`, or all samples of a group, and returns a number for each."""

from rlhf_triton.rewards.function import Sample, count

__all__ = ["Sample", "count"]
