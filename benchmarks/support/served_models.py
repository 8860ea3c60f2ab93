"""Variants of the served models for benchmarks: they count, respond late, or sleep instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.support.forward import ForwardCounters
from python_backend.models.batching import plan_micro_batches
from python_backend.serving import critic, reward
from python_backend.serving.round_robin import run_to_end
from python_backend.serving.triton import Call, Parameters
from python_backend.wire.contract import REWARDS


class CountedModel(reward.TritonPythonModel):
    """The reward model; counts its forward passes in the folder that the parameter `bench_counters` names."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self._computed = ForwardCounters(Parameters(args).path("bench_counters"))
        super().initialize(args)

    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        self._computed.add([row.size for row in rows], width)
        return super().launch(model, rows, width)


class LateModel(CountedModel):
    """Responds to the requests of a merged batch only when the whole batch is done, as a plain Triton model does."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        super().initialize(args)
        parameters = Parameters(args)
        self._late_budget = parameters.number("token_budget")
        self._late_rows = parameters.number("micro_batch_rows")

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point: score all requests, then respond to all of them."""
        calls = [Call(request) for request in requests]
        read = [run_to_end(self.read(call)).tokens for call in calls]
        rows = [row for request in read for row in request]
        lengths = [row.size for row in rows]
        scores = np.empty((len(rows), 1), np.float32)
        model = self.current_model()
        for batch in plan_micro_batches(lengths, token_budget=self._late_budget, max_rows=self._late_rows):
            width = max(lengths[i] for i in batch)
            scores[batch] = np.stack(self.launch(model, [rows[i] for i in batch], width)())[:, :1]
        ends = np.cumsum([len(request) for request in read])[:-1]
        for call, part in zip(calls, np.split(scores, ends), strict=True):
            call.answer({REWARDS: part})


class Waiting:
    """Mix-in: the forward pass sleeps `bench_seconds_per_token` per position, padding included, and returns zeros."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self._pause = float(Parameters(args).text("bench_seconds_per_token"))
        super().initialize(args)  # type: ignore[misc]

    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        time.sleep(self._pause * len(rows) * width)
        return lambda: [np.zeros(row.size, np.float32) for row in rows]


class WaitingReward(Waiting, reward.TritonPythonModel):
    """The reward model with a forward pass that sleeps."""

    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        outputs = super().launch(model, rows, width)
        return lambda: [each[:1] for each in outputs()]


class WaitingCritic(Waiting, critic.TritonPythonModel):
    """The critic with a forward pass that sleeps."""
