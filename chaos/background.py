"""Work that goes on in the background of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """A thread that runs `work` and keeps the error that ends it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """`work` returns soon after `given_up` is set."""
        super().__init__(target=work, name=name, daemon=True)
        self.error: BaseException | None = None
        self.given_up = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # thread edge: the main thread reports it
            self.error = error

    def give_up(self) -> None:
        """Set `given_up`, and wait for the thread if it has been started."""
        self.given_up.set()
        if self.is_alive():
            self.join()
