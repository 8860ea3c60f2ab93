"""The base class of every error that the project raises for a person to read."""

from __future__ import annotations


class RlhfError(Exception):
    """Something that a person can put right; the message names what is wrong and what to do."""


class NotFinite(RlhfError, FloatingPointError):
    """Logits or a gradient hold NaN or infinity."""


REPORTED = (RlhfError, OSError)
"""What an entry point reports in one sentence; anything else is a defect and keeps its traceback."""
