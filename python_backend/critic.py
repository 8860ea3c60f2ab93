"""The critic inside tritonserver: serves the version that CURRENT names and changes it in place.
Given: `tokens` (+ `sequence_lengths`) or `sentences`. Returns: `values` FP32 [B, S], padded with 0 to the request's S,
and `weights_version` INT64 [B, 1]: one version per request.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from python_backend.allocator import use_allocator
from python_backend.contract import (
    AFTER_CRITIC,
    PROMPT_LENGTHS,
    RESPONSE_VALUES,
    VALUES,
    WEIGHTS_VERSION,
    ContractError,
    ScoringRows,
)
from python_backend.modeling import CriticModel, load_critic, quiet_transformers
from python_backend.reading import RowReader, read_limits
from python_backend.scoring import Scoring, ScoringModel
from python_backend.serving import (
    Call,
    Parameters,
    log,
    log_error,
    refuse_numpy_2,
)
from python_backend.weights import FIRST_VERSION, ServingRecord, WeightsStore

TOUCH_INTERVAL_S = 2.0


@dataclass(frozen=True)
class Version:
    """A critic and the number of its weights."""

    number: int
    critic: CriticModel


class TritonPythonModel(ScoringModel):
    """Scores rows by the current version; a watcher thread brings the next, taken up between micro-batches."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load: a Triton reload comes in here, in a fresh process."""
        refuse_numpy_2()
        quiet_transformers()
        parameters = Parameters(args)
        self.set_up(parameters)
        use_allocator(parameters.text("allocator"))
        self._threads = parameters.number("threads")
        torch.set_num_threads(self._threads)
        self._store = WeightsStore(parameters.path("store"))
        number = self._store.current()
        if number is None:
            raise RuntimeError(f"the weights store {self._store.root} is empty; {FIRST_VERSION}")
        folder = self._store.folder(number)
        critic = load_critic(
            folder,
            device=parameters.text("device"),
            dtype=parameters.text("dtype"),
            compile_forward=parameters.text("compile") == "true",
        )
        self._version = Version(number, critic)
        self.limits = read_limits(critic.limits, parameters)
        self._reader = RowReader(parameters.path("checkpoint"), self.limits)
        self._instance = args["model_instance_name"]
        self._store.forget_died()
        self._acknowledge(previous=None)
        self._poll_s = parameters.number("poll_interval_ms") / 1000
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weights-watcher", daemon=True)
        self._swaps = parameters.text("reload") == "swap"
        self._watcher.start()
        self.start()
        log(f"{parameters.model}: serving weights version {number}")

    def finalize(self) -> None:
        """Triton's entry point at unload."""
        super().finalize()
        self._stop.set()
        self._watcher.join()
        self._store.withdraw(self._instance, os.getpid())

    def prepare_worker(self) -> None:
        torch.set_num_threads(self._threads)  # torch keeps a part of this setting per thread

    def current_model(self) -> Version:
        return self._version

    def read(self, call: Call) -> ScoringRows:
        rows = self._reader.read(call)
        # A caller that names no outputs is asked for all of them by Triton, and gets those that it can have.
        if RESPONSE_VALUES in call.wanted and VALUES not in call.wanted and rows.prompt_lengths is None:
            raise ContractError(f"{PROMPT_LENGTHS}: missing; {RESPONSE_VALUES} needs it")
        return rows

    def forward(self, model: Version, rows: list[np.ndarray], width: int) -> list[np.ndarray]:
        return model.critic.values(rows, width)

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        wanted, rows = scoring.call.wanted, scoring.rows
        outputs = [output for output in scoring.outputs if output is not None]
        versions = np.full((len(outputs), 1), scoring.model.number, np.int64)
        answer = {WEIGHTS_VERSION: versions, AFTER_CRITIC: versions}
        if VALUES in wanted:
            answer[VALUES] = _padded(outputs, rows.width)
        if RESPONSE_VALUES in wanted and rows.prompt_lengths is not None:
            parts = [output[p - 1 : -1] for output, p in zip(outputs, rows.prompt_lengths.tolist(), strict=True)]
            answer[RESPONSE_VALUES] = _padded(parts, max(1, *(part.size for part in parts)))
        return answer

    def _watch(self) -> None:
        refused: int | None = None
        touched = time.monotonic()
        while not self._stop.wait(self._poll_s):
            try:
                number = self._store.current() if self._swaps else None
                if number is not None and number not in (self._version.number, refused):
                    refused = self._swap(number)
                if time.monotonic() - touched > TOUCH_INTERVAL_S:
                    touched = time.monotonic()
                    self._store.touch(self._instance, os.getpid())
            except Exception as error:  # process edge: a watcher that died would freeze the version for ever
                log_error(f"weights watcher: {type(error).__name__}: {error}")
                time.sleep(1.0)

    def _swap(self, number: int) -> int | None:
        """Rebind the served version; return `number` if it cannot be served."""
        start, previous = time.monotonic(), self._version
        try:
            critic = previous.critic.with_weights(self._store.folder(number))
        except Exception as error:  # whatever is wrong with it, the old version serves on and the sidecar is told
            log_error(f"weights version {number} refused: {error}")
            self._acknowledge(previous=previous.number, rejected=number, error=str(error))
            return number
        self._version = Version(number, critic)
        self._acknowledge(previous=previous.number, swap_ms=(time.monotonic() - start) * 1000)
        return None

    def _acknowledge(
        self,
        *,
        previous: int | None,
        swap_ms: float | None = None,
        rejected: int | None = None,
        error: str | None = None,
    ) -> None:
        record = ServingRecord(
            self._instance, socket.gethostname(), os.getpid(), self._version.number, previous, time.time(),
            swap_ms, rejected, error,
        )  # fmt: skip
        self._store.acknowledge(record)


def _padded(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Float32 `[B, width]` with 0 behind each row."""
    array = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        array[i, : row.size] = row
    return array
