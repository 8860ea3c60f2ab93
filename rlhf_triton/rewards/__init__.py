"""Reward functions: a function receives a `Sample`, or all samples of a group, and returns one number per sample."""

from rlhf_triton.rewards.function import Sample, count

__all__ = ["Sample", "count"]
