"""Text that may leave a model: no lone surrogates, which Triton cannot encode, and no terminal control sequences."""

from __future__ import annotations

LONGEST_TEXT = 2000  # gRPC carries an error in a header, and its clients take 8 kB of headers


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return `text` with everything but printable characters, newlines and tabs escaped as in a Python literal.

    Longer texts are cut to `limit` characters. The result encodes as UTF-8, whatever the request contained.
    """
    if len(text) > limit:
        text = text[:limit] + " …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
