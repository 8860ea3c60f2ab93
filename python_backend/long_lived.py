"""Keeps Python's garbage collector away from the million objects that imports of torch and transformers create.

They live until the process ends, so that examining them finds nothing: it costs half a second of such an import, one
second at the end of the process, which a reload or a stop waits for, and 0.2 s in each full collection in between.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

atexit.register(gc.freeze)  # the interpreter collects garbage when it ends, although the process is about to vanish


@contextlib.contextmanager
def long_lived_imports() -> Iterator[None]:
    """Collect no garbage inside the context, and never examine the objects that exist at its end.

    For imports only: whatever else is created inside is never freed if it becomes part of a reference cycle.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
