"""Sanitises text before it leaves a model.

Triton cannot encode lone surrogates, and control sequences in a log or an error message would reach a terminal.
"""

from __future__ import annotations

LONGEST_TEXT = 2000  # gRPC sends an error in a header, and its clients accept 8 kB of headers


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return `text` with everything but printable characters, newlines and tabs escaped as in a Python literal.

    Texts longer than `limit` characters are truncated first. The result can always be encoded as UTF-8.
    """
    if len(text) > limit:
        text = text[:limit] + " …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
