"""The base of critic_train and critic_save: a request becomes a journal entry, its result the reply.

A waiter thread replies once the sidecar has served the entry. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from python_backend.serving.triton import Call, MetricCounters, Parameters, StepFailed, Unavailable, log_error
from python_backend.store.durable import refusal
from python_backend.store.heartbeat import HeartbeatWatch
from python_backend.store.journal import Entry, Journal, Result
from python_backend.wire.contract import RUN_ID, TRAINING_KEY_HEADER, ContractError

FOLLOWER_GRACE_S = 3.0  # a sidecar that is being restarted counts as there
FAILURES = {
    "rlhf_steps_failed_total": "Steps, saves and rewinds that the sidecar answered with an error, as a rejected version"
}


class JournalModel:
    """Base of critic_train and critic_save: accept durably, return at once, answer when the sidecar has served it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        parameters = Parameters(args)
        self.parameters = parameters
        self.journal = Journal(parameters.path("journal"), parameters.text(RUN_ID))
        self._heartbeats = HeartbeatWatch(self.journal.heartbeat)
        self._silence_s = float(parameters.text("heartbeat_timeout_s"))
        self._key_hash = parameters.optional("training_key_sha256")
        self._failures = MetricCounters(parameters.model, FAILURES)
        self._waiting: list[tuple[Call, Entry, float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._waiter = threading.Thread(target=self._answer_loop, name="journal-waiter", daemon=True)
        self._waiter.start()

    def accept(self, call: Call) -> Entry:
        """Check the request and write it to the journal. Raises ContractError."""
        raise AssertionError("defined by the subclass")

    def reply(self, result: Result) -> Mapping[str, np.ndarray]:
        """The response tensors of a result."""
        raise AssertionError("defined by the subclass")

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point."""
        for request in requests:
            call = Call(request)
            try:
                self._check_key(call)
                entry = self.accept(call)
            except OSError as error:  # process edge: the disk refused, nothing was accepted
                call.fail(Unavailable(f"the journal cannot be written: {error}"))
            except Exception as error:  # process edge: this request's answer
                call.fail(error)
            else:
                with self._lock:
                    self._waiting.append((call, entry, time.monotonic()))

    def finalize(self) -> None:
        """Triton's entry point at unload: whoever still waits is told that nothing is lost."""
        self._stop.set()
        self._waiter.join()
        for call, entry, _ in self._waiting:
            call.fail(Unavailable(f"the server is stopping; {self._journalled(entry)}"))

    def _check_key(self, call: Call) -> None:
        if self._key_hash is None:
            return
        sent = hashlib.sha256((call.header(TRAINING_KEY_HEADER) or "").encode()).hexdigest()
        if not hmac.compare_digest(sent, self._key_hash):
            raise ContractError(f"header {TRAINING_KEY_HEADER}: missing or wrong")

    def _answer_loop(self) -> None:
        while not self._stop.wait(0.005):
            with self._lock:
                waiting = list(self._waiting)
            finished = [item for item in waiting if self._try_to_settle(*item)]
            if finished:
                with self._lock:
                    self._waiting = [item for item in self._waiting if item not in finished]

    def _try_to_settle(self, call: Call, entry: Entry, since: float) -> bool:
        try:
            return self._settle(call, entry, since)
        except Exception as error:  # thread edge: a waiter that died would leave every caller without an answer
            log_error(f"journal: {entry.name}: {type(error).__name__}: {error}")
            self._stop.wait(1.0)
            return False

    def _settle(self, call: Call, entry: Entry, since: float) -> bool:
        result = self.journal.result(entry)
        if result is not None:
            if result.error:
                self._failures.add((1,))
                self._failures.publish()
                call.fail(StepFailed(result.error))
            else:
                call.answer(self.reply(result))
            return True
        trouble = self._trouble(time.monotonic() - since)
        if trouble:
            call.fail(Unavailable(f"{trouble}; {self._journalled(entry)}"))
        return trouble is not None

    def _trouble(self, waited_s: float) -> str | None:
        silence_s = self._heartbeats.silence_s()
        heartbeat = self._heartbeats.last
        if waited_s < FOLLOWER_GRACE_S:
            return None
        if not self.journal.is_followed() and silence_s > FOLLOWER_GRACE_S:
            return "no sidecar follows the journal: start `python -m trainer`"
        if heartbeat is None:
            return None
        if min(silence_s, waited_s) > self._silence_s:
            cause = refusal(self.journal.root)  # a full disk takes no heartbeat either
            disk = f"; the journal's disk refuses: {cause.strerror}" if cause else ""
            return (
                f"the sidecar has made no progress for {silence_s:.0f} s (step {heartbeat.step}, "
                f"micro-batch {heartbeat.micro_batch}, {heartbeat.state}){disk}"
            )
        if heartbeat.trouble:
            return f"the sidecar cannot go on ({heartbeat.state}): {heartbeat.trouble}"
        return None

    def _journalled(self, entry: Entry) -> str:
        what = f"step {entry.step}" if entry.kind == "train" else f"the {entry.kind} after step {entry.step}"
        return (
            f"{what} of run {self.journal.run_id!r} is journalled and will be done: repeat the request for its answer"
        )
