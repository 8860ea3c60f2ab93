"""Reward functions: a function receives a `Sample`, or all samples of a group, and returns one number per sample."""

from rlhf_triton.rewards.counters import count
from rlhf_triton.rewards.sample import Sample

__all__ = ["Sample", "count"]
