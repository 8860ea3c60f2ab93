"""Variants of the served models for benchmarks: they count their forward passes, or sleep instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.support.forward import ForwardCounters
from python_backend.serving import critic, reward
from python_backend.serving.triton import Parameters


class CountedModel(reward.TritonPythonModel):
    """The reward model; counts its forward passes in the folder that the parameter `bench_counters` names."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self._computed = ForwardCounters(Parameters(args).path("bench_counters"))
        super().initialize(args)

    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        self._computed.add([row.size for row in rows], width)
        return super().launch(model, rows, width)


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
