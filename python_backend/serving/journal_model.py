"""Serves critic_train and critic_save: writes each request to the journal and replies with the entry's result.

A waiter thread sends the reply once the sidecar has recorded the entry's result. Imports no torch.
"""

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.monitoring import tracing
from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.python_backend.serving.triton import (
    Call,
    MetricCounters,
    Unavailable,
    log_error,
)
from rlhf_triton.store.durable import refusal
from rlhf_triton.store.heartbeat import HEARTBEAT_TIMEOUT_S, HeartbeatWatch
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.ownership import Sender
from rlhf_triton.wire.contract import (
    IN_JOURNAL,
    ORIGIN_HEADER,
    RUN_ID,
    SENDER_HEADER,
    TRACEPARENT_HEADER,
    TRAINING_KEY_HEADER,
    WEIGHTS_VERSION,
    Arrays,
    ContractError,
    optional_run_id,
)

FOLLOWER_GRACE_S = 3.0  # a sidecar may be absent this long (a restart) before waiting callers get UNAVAILABLE
FAILURES = {
    "rlhf_steps_failed_total": "Steps (including rejected versions), saves and rewinds that failed in the sidecar"
}


class JournalServer:
    """Serves a model defined by two functions: `accept` journals a request, `reply` makes the output tensors.

    `execute` writes each request to the journal durably and returns. A waiter thread polls for results and replies to
    the callers; they receive UNAVAILABLE if the sidecar is missing or makes no progress.
    """

    def __init__(
        self,
        parameters: Parameters,
        accept: Callable[[Journal, Call, str | None, Sender | None], Entry],
        reply: Callable[[Result], Arrays],
    ) -> None:
        """Start the waiter thread.

        Args:
            accept: returns the journal entry of a request, given its run id and sender; raises ContractError if the
                request is invalid.
            reply: returns the output tensors for a result without an error, other than the served version.
        """
        self._accept = accept
        self._reply = reply
        self._model = parameters.model
        self.journal = Journal(parameters.path("journal"), parameters.text(RUN_ID))
        self._heartbeats = HeartbeatWatch(self.journal.heartbeat)
        self._key_hash = parameters.optional("training_key_sha256")
        self._failures = MetricCounters(parameters.model, FAILURES)
        self._waiting: list[tuple[Call, Entry, float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._waiter = threading.Thread(target=self._answer_loop, name="journal-waiter", daemon=True)
        self._waiter.start()
        try:
            tracing.start(parameters.model, parameters.optional("trace_endpoint"), self.journal.run_id)
        except RlhfError as error:  # a server without the extra still trains
            log_error(str(error))

    def execute(self, calls: Sequence[Call]) -> None:
        """Write the requests to the journal; the waiter thread replies."""
        for call in calls:
            try:
                self._check_sender(call)
                with tracing.span(f"{self._model}: journal", parent=traceparent_of(call)):
                    run_id = optional_run_id(RUN_ID, call.array(RUN_ID))
                    entry = self._accept(self.journal, call, run_id, Sender.parse(call.header(SENDER_HEADER)))
            except OSError as error:  # process edge: a disk error; nothing was accepted, so the caller may retry
                call.fail(Unavailable(f"the journal cannot be written: {reason_of(error)}"))
            except Exception as error:  # process edge: an error fails this request only
                call.fail(error)
            else:
                with self._lock:
                    self._waiting.append((call, entry, time.monotonic()))

    def finalize(self) -> None:
        """Fail waiting calls with UNAVAILABLE; their entries stay in the journal."""
        self._stop.set()
        self._waiter.join()
        tracing.stop()
        for call, entry, _ in self._waiting:
            call.fail(Unavailable(f"the server is stopping; {self._journalled(entry)}"))

    def _check_sender(self, call: Call) -> None:
        if call.header(ORIGIN_HEADER) is not None:
            raise ContractError(
                f"header {ORIGIN_HEADER}: web pages must not train; send the request without this header"
            )
        if self._key_hash is None:
            return
        sent = hashlib.sha256((call.header(TRAINING_KEY_HEADER) or "").encode()).hexdigest()
        if not hmac.compare_digest(sent, self._key_hash):
            raise ContractError(f"header {TRAINING_KEY_HEADER}: missing or wrong; send the server's training key")

    def _answer_loop(self) -> None:
        """Reply to calls whose result has been recorded, until `_stop` is set.

        Results are files, so they are polled, without holding the lock, so that `execute` can add calls.
        """
        while not self._stop.wait(0.005):
            with self._lock:
                waiting = list(self._waiting)
            for item in waiting:
                try:
                    if self._reply_if_done(*item):
                        with self._lock:
                            self._waiting.remove(item)
                except Exception as error:  # thread edge: if the waiter died, no caller would ever get a reply
                    log_error(f"journal: {item[1].name}: {type(error).__name__}: {error}")
                    self._stop.wait(1.0)  # and the call is tried again

    def _reply_if_done(self, call: Call, entry: Entry, since: float) -> bool:
        """Reply if the entry has a result; fail the call if none can be expected. Return whether one was sent."""
        result = self.journal.result(entry)
        if result is not None:
            if result.error:
                self._failures.add((1,))
                self._failures.publish()
                call.fail(RlhfError(result.error))
            else:
                call.answer({**self._reply(result), WEIGHTS_VERSION: np.asarray([result.weights_version], np.int64)})
            return True
        reason = self._failure_reason(time.monotonic() - since)
        if reason:
            call.fail(Unavailable(f"{reason}; {self._journalled(entry)}"))
        return reason is not None

    def _failure_reason(self, waited_s: float) -> str | None:
        """Return why a call cannot expect a result after waiting `waited_s` seconds.

        Returns None while the sidecar makes progress, and in the first `FOLLOWER_GRACE_S` seconds.
        """
        silence_s = self._heartbeats.silence_s()
        heartbeat = self._heartbeats.last
        if waited_s < FOLLOWER_GRACE_S:
            return None
        if not self.journal.is_followed() and silence_s > FOLLOWER_GRACE_S:
            return "no sidecar follows the journal: start `python -m rlhf_triton.trainer`"
        if heartbeat is None:
            return None
        # Every call waits for the full timeout, even if the silence started before the call.
        if min(silence_s, waited_s) > HEARTBEAT_TIMEOUT_S:
            cause = refusal(self.journal.root)  # on a full disk the sidecar cannot write its heartbeat either
            disk = f"; the journal's disk cannot be written: {cause.strerror}" if cause else ""
            return (
                f"the sidecar has made no progress for {silence_s:.0f} s (step {heartbeat.step}, "
                f"micro-batch {heartbeat.micro_batch}, {heartbeat.state}){disk}"
            )
        if heartbeat.trouble:
            return f"the sidecar cannot continue ({heartbeat.state}): {heartbeat.trouble}"
        return None

    def _journalled(self, entry: Entry) -> str:
        what = {
            "train": f"step {entry.step}",
            "save": f"the save after step {entry.step}",
            "rewind": f"the rewind from step {entry.step} to step {entry.target}",
        }[entry.kind]
        return f"{what} of run {self.journal.run_id!r} {IN_JOURNAL}: repeat the request to get its result"


def traceparent_of(call: Call) -> str | None:
    """Return the request's trace context; None if it is missing or malformed."""
    return tracing.parsed_traceparent(call.header(TRACEPARENT_HEADER))
