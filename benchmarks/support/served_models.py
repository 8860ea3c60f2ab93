"""Variants of the served models for benchmarks: they count their forward passes, or sleep instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.support.forward import ForwardCounters
from python_backend.serving import critic, reward
from python_backend.serving.scoring import Engine, Wait
from python_backend.serving.triton import triton_model
from python_backend.wire.contract import TokenRow

Serve = Callable[[Mapping[str, str]], Engine]


def counted(serve: Serve) -> Serve:
    """Return `serve` with a forward pass that is counted in the folder that the parameter `bench_counters` names."""

    def serve_counted(args: Mapping[str, str]) -> Engine:
        engine = serve(args)
        forward, counters = engine.forward, ForwardCounters(engine.compute.parameters.path("bench_counters"))

        def count(model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
            counters.add([row.tokens.size for row in rows], width)
            return forward(model, rows, width)

        engine.forward = count
        return engine

    return serve_counted


def waiting(serve: Serve, outputs: Callable[[TokenRow], int]) -> Serve:
    """Return `serve` with a forward pass that sleeps instead of computing.

    It sleeps `bench_seconds_per_token` per position, padding included, and returns `outputs` zeros for each row.
    """

    def serve_waiting(args: Mapping[str, str]) -> Engine:
        engine = serve(args)
        pause = float(engine.compute.parameters.text("bench_seconds_per_token"))

        def wait(model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
            time.sleep(pause * len(rows) * width)
            return lambda: [np.zeros(outputs(row), np.float32) for row in rows]

        engine.forward = wait
        return engine

    return serve_waiting


CountedModel = triton_model(counted(reward.serve))
WaitingReward = triton_model(waiting(reward.serve, lambda row: 1))
WaitingCritic = triton_model(waiting(critic.serve, lambda row: row.tokens.size))
