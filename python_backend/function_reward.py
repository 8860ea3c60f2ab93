"""A reward function as a Triton model: its rows go to worker processes, each request is answered when they are done.
Given: `tokens` (+ `sequence_lengths`) or `sentences`, and `metadata`. Returns: `reward_component` FP32 [B, 1], NaN for
a row that has no score, and `reward_error` BYTES [B, 1] with its cause. Imports no torch; waits for nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from python_backend.contract import (
    METADATA,
    REWARD_COMPONENT,
    REWARD_ERROR,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TOKENS,
    Limits,
    metadata_rows,
    scoring_rows,
    sentence_texts,
    texts_array,
)
from python_backend.function_pool import Outcome, WorkerPool
from python_backend.function_rewards import Sample
from python_backend.serving import Call, Parameters, log, log_error, refuse_numpy_2
from python_backend.tokenization import TextCodec

ANY_TOKEN = Limits(vocab_size=2**31)  # a policy's vocabulary may be padded beyond the tokenizer's


class TritonPythonModel:
    """Scores rows by one function."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load. Raises FunctionError if the function cannot be imported."""
        refuse_numpy_2()
        parameters = Parameters(args)
        self._codec = TextCodec(parameters.path("tokenizer"))
        self._most_waiting = parameters.number("max_waiting_rows")
        spec, workers = parameters.text("function"), parameters.number("workers")
        timeout_s = float(parameters.text("timeout_s"))
        memory_mib = parameters.number("memory_mib")
        self._pool = WorkerPool(spec, num_workers=workers, timeout_s=timeout_s, memory_mib=memory_mib)
        log(f"{parameters.model}: {spec} in {workers} worker processes, at most {timeout_s:g} s for a sample")

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point: hands the rows to the workers."""
        for request in requests:
            call = Call(request)
            try:
                self._hand_over(call)
            except Exception as error:  # process edge: one request's error is that request's answer
                _answer(call, [Outcome(error=str(error))] * _num_rows(call))

    def finalize(self) -> None:
        """Triton's entry point at unload, once every request has its answer: no worker is left behind."""
        self._pool.close()

    def _hand_over(self, call: Call) -> None:
        samples = self._samples(call)
        waiting = self._pool.num_waiting
        if waiting + len(samples) > self._most_waiting:
            raise RuntimeError(f"{waiting} samples wait for the function already, at most {self._most_waiting} may")
        pending = PendingCall(call, len(samples))
        for i, sample in enumerate(samples):
            self._pool.submit(sample, functools.partial(pending.done, i))

    def _samples(self, call: Call) -> list[Sample]:
        sentences = call.array(SENTENCES)
        if sentences is not None:
            texts = sentence_texts(sentences, ANY_TOKEN.max_sentence_bytes)
            rows = [self._codec.encode(text) for text in texts]
        else:
            tokens = scoring_rows(call.array(TOKENS), call.array(SEQUENCE_LENGTHS), limits=ANY_TOKEN).tokens
            rows = [row.tolist() for row in tokens]
            texts = [self._codec.decode(row) for row in rows]
        metadata = metadata_rows(call.array(METADATA), len(rows))
        return [Sample(*parts) for parts in zip(texts, rows, metadata, strict=True)]


class PendingCall:
    """A request whose rows are with the workers; answered from a thread of the pool."""

    def __init__(self, call: Call, num_rows: int) -> None:
        self._call = call
        self._outcomes = [Outcome()] * num_rows
        self._left = num_rows
        self._lock = threading.Lock()

    def done(self, row: int, outcome: Outcome) -> None:
        """Take a row's outcome; the last one answers the request."""
        with self._lock:
            self._outcomes[row] = outcome
            self._left -= 1
            if self._left:
                return
        try:
            _answer(self._call, self._outcomes)
        except Exception as error:  # thread edge: a worker's thread must outlive a caller that is gone
            log_error(f"an answer could not be sent: {type(error).__name__}: {error}")


def _answer(call: Call, outcomes: Sequence[Outcome]) -> None:
    """Never an error of the request: two steps of an ensemble that fail at once can crash tritonserver 2.51."""
    scores = np.asarray([[outcome.score] for outcome in outcomes], np.float64)
    with np.errstate(over="ignore"):  # beyond FP32: infinite, which the sum calls a failure
        arrays = {REWARD_COMPONENT: scores.astype(np.float32)}
    call.answer({**arrays, REWARD_ERROR: texts_array([outcome.error for outcome in outcomes])})


def _num_rows(call: Call) -> int:
    """Rows of a request that cannot be read: Triton gives all its tensors the same number."""
    arrays = (call.array(name) for name in (SENTENCES, TOKENS, SEQUENCE_LENGTHS, METADATA))
    return next(len(array) for array in arrays if array is not None)
