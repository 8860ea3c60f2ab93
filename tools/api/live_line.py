"""Shows how far a process is, in one line that is replaced: in a notebook, or in a terminal."""

import shutil
import sys
from collections.abc import Callable
from typing import Any


class LiveLine:
    """A context manager; at its end the line stays."""

    def __init__(self) -> None:
        self._shown = ""
        self._update = _notebook_display()
        self._is_terminal = self._update is None and sys.stderr.isatty()

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown:
            print(file=sys.stderr)

    def show(self, text: str) -> None:
        """Replace the line; where lines cannot be replaced, as in a file, print another."""
        if text == self._shown:
            return
        self._shown = text
        if self._update is not None:
            self._update(text)
        elif self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def keep(self, text: str) -> None:
        """Print a permanent line above the live one."""
        shown = self._shown
        self._shown = ""
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(f"{clear}{text}", file=sys.stderr, flush=True)
        if self._is_terminal and shown:
            self.show(shown)


def _notebook_display() -> Callable[[str], Any] | None:
    """Return what shows a text in a notebook's cell, in the place of the one before; None outside of notebooks."""
    ipython: Any = sys.modules.get("IPython")  # a notebook has imported it
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    handle = ipython.display.display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)
