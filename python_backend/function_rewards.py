"""Alias module for `rlhf_triton.rewards.Sample`: existing reward files may still import it from here."""

from rlhf_triton.rewards.function import Sample

__all__ = ["Sample"]
