"""What every model inside tritonserver shares: requests in, answers or that request's own error out.
Given: Triton's request objects. Returns: nothing; each request is answered through its response sender.
The only module that imports triton_python_backend_utils; it imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.batching import plan_micro_batches
from python_backend.contract import RUN_ID, TRAINING_KEY_HEADER, ContractError, Limits, ScoringRows
from python_backend.journal import Entry, Journal, Result

FOLLOWER_GRACE_S = 3.0  # a sidecar that is being restarted counts as there


class Parameters:
    """A model's `parameters` from config.pbtxt. Raises ValueError naming the model and the parameter."""

    def __init__(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.model = config["name"]
        self._values = {key: item["string_value"] for key, item in config.get("parameters", {}).items()}

    def text(self, name: str) -> str:
        """A parameter that must be there."""
        if not self._values.get(name):
            raise ValueError(
                f"{self.model}/config.pbtxt lacks the parameter {name}; render it with tools/render_configs.py"
            )
        return self._values[name]

    def optional(self, name: str) -> str | None:
        """A parameter, or None when absent or empty."""
        return self._values.get(name) or None

    def number(self, name: str) -> int:
        """A parameter that is a whole number."""
        try:
            return int(self.text(name))
        except ValueError as error:
            raise ValueError(f"{self.model}/config.pbtxt: parameter {name} is no whole number: {error}") from error

    def path(self, name: str) -> Path:
        """A path; relative ones start where tritonserver was started."""
        return Path(self.text(name)).absolute()


class StepFailed(RuntimeError):
    """The sidecar did what was journalled, and it failed; the message is the sidecar's."""


class Call:
    """One request and its way back."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._sender = request.get_response_sender()
        self.answered = False

    def array(self, name: str) -> np.ndarray | None:
        """An input tensor, or None."""
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        return None if tensor is None else tensor.as_numpy()

    def header(self, name: str) -> str | None:
        """A forwarded HTTP header; `name` in lower case, the client may have spelled it otherwise."""
        sent = json.loads(self._request.parameters() or "{}")
        return next((value for key, value in sent.items() if key.lower() == name), None)

    def answer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Send the outputs."""
        self._send(pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()]))

    def fail(self, error: Exception, *, unavailable: bool = False) -> None:
        """Send the error: a broken contract is the caller's (400), UNAVAILABLE may be retried (503)."""
        code = pb_utils.TritonError.INTERNAL
        message = str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
        if unavailable:
            code, message = pb_utils.TritonError.UNAVAILABLE, str(error)
        elif isinstance(error, ContractError):
            code, message = pb_utils.TritonError.INVALID_ARG, str(error)
        self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)))

    def _send(self, response: Any) -> None:
        if not self.answered:
            self.answered = True
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


@dataclass
class Scoring:
    """A request under way: its rows, what they scored so far, and the model that scores all of them."""

    call: Call
    rows: ScoringRows
    model: Any = None
    done: int = 0
    outputs: list[np.ndarray | None] = field(default_factory=list)


class ScoringModel:
    """Base of reward and critic: many ragged requests in, sorted micro-batches, each request answered when it is done.

    A subclass sets `limits` and defines `current_model`, `read`, `forward` and `reply`.
    """

    limits: Limits

    def set_up(self, parameters: Parameters) -> None:
        """Read what both models share."""
        self._token_budget = parameters.number("token_budget")
        self._max_rows = parameters.number("micro_batch_rows")

    def current_model(self) -> Any:
        """The module that new requests are scored by."""
        raise AssertionError("defined by the subclass")

    def read(self, call: Call) -> ScoringRows:
        """The request's rows. Raises ContractError."""
        raise AssertionError("defined by the subclass")

    def forward(self, model: Any, rows: list[np.ndarray]) -> list[np.ndarray]:
        """One output array per row, from one forward."""
        raise AssertionError("defined by the subclass")

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        """The response tensors of a request whose rows are all done."""
        raise AssertionError("defined by the subclass")

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point: answers each request through its sender."""
        waiting = []
        for request in requests:
            call = Call(request)
            try:
                rows = self.read(call)
            except Exception as error:  # process edge: one request's error is that request's answer
                call.fail(error)
            else:
                waiting.append(Scoring(call, rows, outputs=[None] * len(rows.tokens)))
        while waiting:
            waiting = self._score_until_reload(waiting)

    def _score_until_reload(self, waiting: list[Scoring]) -> list[Scoring]:
        """Score `waiting` by one model; when a new one arrives, finish what was begun and return the rest."""
        model = self.current_model()
        plan = self._plan(waiting)
        while plan:
            if self.current_model() is not model:
                begun = [s for s in waiting if s.done and not s.call.answered]
                for batch in self._plan(begun):
                    self._run(model, batch)
                return [s for s in waiting if not s.call.answered]
            self._run(model, plan.pop(0))
        return []

    def _plan(self, scorings: list[Scoring]) -> list[list[tuple[Scoring, int]]]:
        rows = [(s, i) for s in scorings for i, output in enumerate(s.outputs) if output is None]
        lengths = [s.rows.tokens[i].size for s, i in rows]
        plan = plan_micro_batches(lengths, token_budget=self._token_budget, max_rows=self._max_rows)
        return [[rows[index] for index in batch] for batch in plan]

    def _run(self, model: Any, batch: list[tuple[Scoring, int]]) -> None:
        batch = [(s, i) for s, i in batch if not s.call.answered]
        if not batch:
            return
        try:
            outputs = self.forward(model, [s.rows.tokens[i] for s, i in batch])
        except Exception as error:  # process edge: the requests of this forward fail, the others go on
            for scoring, _ in batch:
                scoring.call.fail(error)
            return
        for (scoring, i), output in zip(batch, outputs, strict=True):
            scoring.model = model
            scoring.outputs[i] = output
            scoring.done += 1
            if scoring.done == len(scoring.outputs):
                scoring.call.answer(self.reply(scoring))


class JournalModel:
    """Base of critic_train and critic_save: accept durably, return at once, answer when the sidecar has served it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        parameters = Parameters(args)
        self.parameters = parameters
        self.journal = Journal(parameters.path("journal"), parameters.text(RUN_ID))
        self._silence_s = float(parameters.text("heartbeat_timeout_s"))
        self._key_hash = parameters.optional("training_key_sha256")
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
                call.fail(RuntimeError(f"the journal cannot be written: {error}"), unavailable=True)
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
            call.fail(RuntimeError(f"the server is stopping; {self._journalled(entry)}"), unavailable=True)

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
            try:
                finished = [item for item in waiting if self._settle(*item)]
            except Exception as error:  # thread edge: a waiter that died would leave every caller without an answer
                log_error(f"journal: {type(error).__name__}: {error}")
                self._stop.wait(1.0)
                continue
            if finished:
                with self._lock:
                    self._waiting = [item for item in self._waiting if item not in finished]

    def _settle(self, call: Call, entry: Entry, since: float) -> bool:
        result = self.journal.result(entry)
        if result is not None:
            if result.error:
                call.fail(StepFailed(result.error))
            else:
                call.answer(self.reply(result))
            return True
        trouble = self._trouble(time.monotonic() - since)
        if trouble:
            call.fail(RuntimeError(f"{trouble}; {self._journalled(entry)}"), unavailable=True)
        return trouble is not None

    def _trouble(self, waited_s: float) -> str | None:
        if waited_s < FOLLOWER_GRACE_S:
            return None
        heartbeat = self.journal.heartbeat()
        silence_s = waited_s if heartbeat is None else time.time() - heartbeat.time
        if not self.journal.is_followed() and silence_s > FOLLOWER_GRACE_S:
            return "no sidecar follows the journal: start `python -m trainer`"
        if min(silence_s, waited_s) > self._silence_s and heartbeat is not None:
            return (
                f"the sidecar has made no progress for {silence_s:.0f} s (step {heartbeat.step}, "
                f"micro-batch {heartbeat.micro_batch}, {heartbeat.state})"
            )
        return None

    def _journalled(self, entry: Entry) -> str:
        what = f"step {entry.step}" if entry.kind == "train" else f"the {entry.kind} after step {entry.step}"
        return (
            f"{what} of run {self.journal.run_id!r} is journalled and will be done: repeat the request for its answer"
        )


def log(message: str) -> None:
    """One line into the server's log."""
    pb_utils.Logger.log_info(message)


def log_error(message: str) -> None:
    """One error line into the server's log."""
    pb_utils.Logger.log_error(message)


def refuse_numpy_2() -> None:
    """NumPy 2 returns empty outputs from this backend. Raises RuntimeError."""
    if int(np.__version__.split(".")[0]) >= 2 and os.environ.get("TRITON_SERVER_VERSION") is None:
        raise RuntimeError(f"NumPy {np.__version__} returns empty outputs in this tritonserver; install numpy<2")
