"""Alias module for `python_backend.rewards.Sample`: existing reward files may still import it from here."""

from python_backend.rewards.function import Sample

__all__ = ["Sample"]
