"""Follows CURRENT for one serving instance: loads announced versions, serves CURRENT, records what it serves.

`version` is rebound in one assignment, so a reader never sees a mixture. Imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.store.serving_records import ServingRecord
from python_backend.store.weights import FIRST_VERSION, WeightsError, WeightsStore

TOUCH_INTERVAL_S = 2.0
EXPECTING_POLL_S = 0.001  # while a version is loaded and CURRENT has not moved yet
EXPECTING_S = 5.0
TROUBLE_PAUSE_S = 1.0
ROLLBACK_HINT = "`python -m tools weights rollback` serves an older version"


@dataclass(frozen=True)
class Version:
    """A critic and the number of its weights."""

    number: int
    critic: Any
    stamp: tuple[int, ...] = ()  # of its file: one that was written to since is not what was loaded


class Follower:
    """One instance's view of the store. `version` is what it serves; other threads only read it."""

    version: Version

    def __init__(
        self,
        store: WeightsStore,
        instance: str,
        *,
        load: Callable[[Path, Any], Any],
        swaps: bool,
        poll_s: float,
        log_error: Callable[[str], None],
        count: Callable[[int, bool], None] = lambda number, rejected: None,
    ) -> None:
        """
        Args:
            load: makes a critic of a version's folder, given the critic served now (None for the first).
            swaps: take up new versions; otherwise a fresh process does.
            poll_s: pause between two looks at CURRENT.
            count: told the number of each version that was taken up, or rejected.
        """
        self._store = store
        self._instance = instance
        self._load = load
        self._swaps = swaps
        self._poll_s = poll_s
        self._log_error = log_error
        self._count = count
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weights-watcher", daemon=True)
        self._staged: Version | None = None
        self._unusable: dict[int, str] = {}  # versions that could not be loaded, and why
        self._untold: ServingRecord | None = None  # what the disk has not taken yet
        self._expecting_until = 0.0

    def start(self) -> None:
        """Load what CURRENT names, say so, and follow it from now on.

        Raises:
            WeightsError: the store is empty or its version cannot be loaded; the message names the cause.
        """
        while True:
            self.version = self._first()
            self._tell(ServingRecord.of_this_process(self._instance, self.version.number))
            # Whoever moves CURRENT looks at the records afterwards: one of us two sees the other.
            if self._store.current() == self.version.number:
                break
        self._store.records.forget_died()  # now that their place is taken: until then somebody is to ask for a process
        self._count(self.version.number, False)
        self._watcher.start()

    def stop(self) -> None:
        """Serve no more."""
        self._stop.set()
        self._watcher.join()
        self._store.records.withdraw(self._record)

    def _first(self) -> Version:
        while True:
            number = self._store.current()
            if number is None:
                raise WeightsError(f"the weights store {self._store.root} is empty; {FIRST_VERSION}")
            self._tell(
                ServingRecord.of_this_process(self._instance, None, loading=number)
            )  # keeps it from being pruned
            try:
                return Version(number, self._load(self._store.folder(number), None))
            except Exception as error:  # another version may be named by now; otherwise it is told with a way out
                if self._store.current() == number:
                    self._store.records.withdraw(self._record)
                    raise WeightsError(
                        f"weights version {number} cannot be served: {error}; {ROLLBACK_HINT}"
                    ) from error

    def _watch(self) -> None:
        touched = time.monotonic()
        while not self._stop.wait(self._pause_s()):
            try:
                if self._swaps:
                    self._look()
                if self._untold is not None:
                    self._tell(self._untold)
                if time.monotonic() - touched > TOUCH_INTERVAL_S:
                    touched = time.monotonic()
                    self._store.records.touch(self._record)
            except Exception as error:  # thread edge: a watcher that died would freeze the version for ever
                self._log_error(f"weights watcher: {type(error).__name__}: {error}")
                self._stop.wait(TROUBLE_PAUSE_S)

    def _pause_s(self) -> float:
        return EXPECTING_POLL_S if time.monotonic() < self._expecting_until else self._poll_s

    def _look(self) -> None:
        number = self._store.current()
        if number is not None and number != self.version.number:
            self._swap(number)
            return
        announced = self._store.announced()
        known = {*self._unusable, *([self._staged.number] if self._staged else [])}
        if announced is not None and announced > self.version.number and announced not in known:
            self._stage(announced)

    def _stage(self, number: int) -> None:
        """Load a version that is not served yet; a version that cannot be is told when CURRENT names it."""
        self._staged = None
        try:
            stamp = self._stamp(number)
            self._staged = Version(number, self._load(self._store.folder(number), self.version.critic), stamp)
            self._expecting_until = time.monotonic() + EXPECTING_S
        except Exception as error:  # whatever is wrong with it, the old version serves on
            self._unusable[number] = str(error)

    def _stamp(self, number: int) -> tuple[int, ...]:
        try:
            status = (self._store.folder(number) / WEIGHTS_FILE).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _swap(self, number: int) -> None:
        """Rebind the served version, or say why it cannot be served."""
        if self._record.rejected == number:
            return
        start, previous = time.monotonic(), self.version.number
        if self._staged is None or (self._staged.number, self._staged.stamp) != (number, self._stamp(number)):
            self._unusable.pop(number, None)  # it may have been announced before it was whole
            self._stage(number)
        staged, self._staged = self._staged, None
        self._expecting_until = 0.0
        if staged is None:
            error = self._unusable[number]
            self._log_error(f"weights version {number} refused: {error}")
            self._tell(
                ServingRecord.of_this_process(self._instance, previous, previous=previous, rejected=number, error=error)
            )
        else:
            self.version = staged
            swap_ms = (time.monotonic() - start) * 1000
            self._tell(ServingRecord.of_this_process(self._instance, number, previous=previous, swap_ms=swap_ms))
        self._count(number, staged is None)

    def _tell(self, record: ServingRecord) -> None:
        """Write down what is served; on a full disk it is tried again at the next look."""
        self._record = self._untold = record
        try:
            self._store.records.put(record)
            self._untold = None
        except OSError as error:
            self._log_error(f"weights watcher: what is served cannot be written down: {error}")
            self._stop.wait(TROUBLE_PAUSE_S if self._watcher.is_alive() else 0)
