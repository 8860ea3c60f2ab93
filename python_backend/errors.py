"""Base class of all user-facing errors, so that an entry point can catch one type."""

from __future__ import annotations


class RlhfError(Exception):
    """An error that the user can fix; the message names what is wrong and what to do."""


class NotFinite(RlhfError, FloatingPointError):
    """Logits or a gradient hold NaN or infinity."""


REPORTED = (RlhfError, OSError)
"""Errors that an entry point reports in one sentence. Anything else is a bug and keeps its traceback."""
