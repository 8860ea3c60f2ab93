"""Follows the weights store for one serving instance: preloads announced versions and swaps to CURRENT.

`Follower.version` is replaced in a single assignment, so readers see either the old or the new version. Imports no
torch.
"""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.errors import reason_of
from rlhf_triton.store.serving_records import ServingRecord
from rlhf_triton.store.weights import FIRST_VERSION, WeightsError, WeightsStore
from rlhf_triton.wire.contract import VersionRange

TOUCH_INTERVAL_S = 2.0
POLL_S = 0.002  # between reads of CURRENT: short compared with a swap (44 ms or more), and each read is small
TROUBLE_PAUSE_S = 1.0  # pause after an error, so that a persistent error does not flood the log


@dataclass(frozen=True)
class Version:
    """A loaded model and the number of its weights version."""

    number: int
    model: Any
    stamp: tuple[int, ...] = ()  # the store's `file_stamp` when the version was loaded


class Follower:
    """One instance's view of the weights store.

    `version` is the version being served. Only `start` and the watcher thread assign it; any thread may read it.
    """

    version: Version

    def __init__(
        self,
        store: WeightsStore,
        instance: str,
        *,
        load: Callable[[Path, Any], Any],
        swaps: bool,
        name: str = "critic",
        log_error: Callable[[str], None],
        count: Callable[[int, bool], None] = lambda number, rejected: None,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            load: loads a model from a version's folder, given the model served now (None for the first).
            swaps: whether to swap in new versions; if False, only a reload through Triton serves them.
            name: name of the model in `rlhf-triton weights --model`.
            count: called with (version number, whether it was rejected) for the first version, and for each later
                version that was swapped in or rejected.
            freed: called after a replaced version's model was freed.
        """
        self._store = store
        self._instance = instance
        self._load = load
        self._rollback = f"`rlhf-triton weights rollback --model {name}` serves an older version"
        self._swaps = swaps
        self._log_error = log_error
        self._count = count
        self._freed = freed
        self.changed: Callable[[], None] = lambda: None
        """Called after a version was swapped in or rejected."""
        self._replaced: weakref.ref[Version] | None = None  # the previously served version, until it is freed
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weights-watcher", daemon=True)
        self._staged: Version | None = None
        self._unusable: dict[int, str] = {}  # version -> why it could not be loaded
        self._unwritten: ServingRecord | None = None  # record that could not be written yet

    def start(self) -> None:
        """Load the version that CURRENT names, write the serving record, and start the watcher thread.

        Raises:
            WeightsError: the store is empty, or the version that CURRENT names cannot be loaded; the message names the
                cause.
        """
        while True:
            self.version = self._first()
            self._write_record(ServingRecord.of_this_process(self._instance, self.version.number))
            # CURRENT may have moved during the load. A publisher moves CURRENT and then reads the records; an instance
            # writes its record and then reads CURRENT. So at least one of the two sees the other's change.
            if self._store.current() == self.version.number:
                break
        # Only now: while records of dead instances exist, the publisher (or `rlhf-triton serve`) requests a fresh
        # process, which is necessary until an instance has replaced the dead ones.
        self._store.records.forget_died()
        self._count(self.version.number, False)
        self._watcher.start()

    def stop(self, *, waits: bool = True) -> None:
        """Stop the watcher thread and delete this instance's serving record, so that no publish waits for it.

        `waits`: join the watcher thread. Pass False after a rank was lost: the watcher may then never end.
        """
        self._stop.set()
        if waits:
            self._watcher.join()
        self._store.records.withdraw(self._record)

    def is_arriving(self, demanded: VersionRange) -> bool:
        """Return whether CURRENT names a demanded version that the watcher will swap in."""
        number = self._store.current() if self._swaps else None
        return number is not None and number != self._record.rejected and demanded.includes(number)

    def _first(self) -> Version:
        while True:
            number = self._store.current()
            if number is None:
                raise WeightsError(f"the weights store {self._store.root} is empty; {FIRST_VERSION}")
            # `loading` keeps the store from pruning the version while its files are being read.
            self._write_record(ServingRecord.of_this_process(self._instance, None, loading=number))
            try:
                return Version(number, self._load_verified(number, None))
            except Exception as error:  # if CURRENT has moved meanwhile, try the new version instead
                if self._store.current() == number:
                    self._store.records.withdraw(self._record)
                    raise WeightsError(
                        f"weights version {number} cannot be served: {reason_of(error)}; {self._rollback}"
                    ) from error

    def _watch(self) -> None:
        touched = time.monotonic()
        while not self._stop.wait(POLL_S):
            try:
                if self._swaps:
                    self._poll_current()
                if self._unwritten is not None:
                    self._write_record(self._unwritten)
                if self._replaced is not None and self._replaced() is None:
                    self._replaced = None
                    self._freed()
                if time.monotonic() - touched > TOUCH_INTERVAL_S:
                    touched = time.monotonic()
                    self._store.records.touch(self._record)
            except Exception as error:  # thread edge: if the watcher died, this instance would never swap again
                self._log_error(f"weights watcher: {type(error).__name__}: {error}")
                self._stop.wait(TROUBLE_PAUSE_S)

    def _poll_current(self) -> None:
        number = self._store.current()
        if number is not None and number != self.version.number:
            self._swap(number)
            return
        announced = self._store.announced()
        excluded = {*self._unusable, *([self._staged.number] if self._staged else [])}
        if announced is not None and announced > self.version.number and announced not in excluded:
            self._stage(announced)
            if self._is_awaited(announced):
                error = self._unusable.get(announced)
                self._write_record(replace(self._record, staged=announced, staging_error=error, time=time.time()))

    def _is_awaited(self, number: int) -> bool:
        """Return whether the sidecar waits until this instance has staged the version."""
        try:
            return self._store.manifest(number).canary is not None
        except WeightsError:
            return False

    def _stage(self, number: int) -> None:
        """Load a version before CURRENT names it; a failure matters only if CURRENT later names that version."""
        self._staged = None
        try:
            stamp = self._store.file_stamp(number)
            self._staged = Version(number, self._load_verified(number, self.version.model), stamp)
        except Exception as error:  # any error: the old version keeps serving
            self._unusable[number] = str(error)

    def _load_verified(self, number: int, before: Any) -> Any:
        """Load a version after verifying its files' hashes: they may have been damaged since, or only on this host."""
        self._store.verify_hashes(self._store.manifest(number), digest_of_mapped)
        return self._load(self._store.folder(number), before)

    def _swap(self, number: int) -> None:
        """Serve version `number`, or record why this instance rejects it and keep serving the old one."""
        if self._record.rejected == number:  # already recorded; the sidecar moves CURRENT back
            return
        start = time.monotonic()
        previous = self.version.number
        stamp = self._store.file_stamp(number)
        if self._staged is None or (self._staged.number, self._staged.stamp) != (number, stamp):
            self._unusable.pop(number, None)  # an earlier attempt may have read an incomplete file: try again
            self._stage(number)
        staged = self._staged
        self._staged = None
        if staged is None:
            error = self._unusable[number]
            self._log_error(f"weights version {number} rejected: {error}")
            self._write_record(
                ServingRecord.of_this_process(self._instance, previous, previous=previous, rejected=number, error=error)
            )
        else:
            self._replaced = weakref.ref(self.version)
            self.version = staged
            swap_ms = (time.monotonic() - start) * 1000
            self._write_record(
                ServingRecord.of_this_process(self._instance, number, previous=previous, swap_ms=swap_ms)
            )
        self._count(number, staged is None)
        self.changed()

    def _write_record(self, record: ServingRecord) -> None:
        """Write the serving record; if that fails, log the error, and the watcher retries at its next poll."""
        self._record = self._unwritten = record
        try:
            self._store.records.put(record)
            self._unwritten = None
        except OSError as error:
            self._log_error(f"weights watcher: cannot write the serving record: {reason_of(error)}")
            self._stop.wait(TROUBLE_PAUSE_S if self._watcher.is_alive() else 0)
