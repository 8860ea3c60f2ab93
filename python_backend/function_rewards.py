"""The former place of `python_backend.rewards.Sample`, which reward files may still import."""

from python_backend.rewards.function import Sample

__all__ = ["Sample"]
