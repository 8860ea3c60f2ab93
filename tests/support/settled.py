"""Triton's counters, once all earlier requests are in them."""

from __future__ import annotations

import time
from dataclasses import dataclass

QUIET_S = 0.3


@dataclass(frozen=True)
class ModelStatistics:
    """Counters of a model since it was first loaded; reloads do not reset them."""

    inference_count: int  # rows
    execution_count: int  # batches, as merged by the dynamic batcher
    success_count: int  # requests
    failure_count: int


def statistics(control, model):
    """Return the model's counters from Triton's statistics API."""
    (found,) = control._call(model, control._client.get_inference_statistics, model).model_stats
    requests = found.inference_stats
    return ModelStatistics(found.inference_count, found.execution_count, requests.success.count, requests.fail.count)


def settled_statistics(control, model):
    """Return the model's counters once they no longer change: Triton counts a request after it has answered it."""
    found = statistics(control, model)
    since = time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(QUIET_S / 10)
        latest = statistics(control, model)
        if latest != found:
            found = latest
            since = time.monotonic()
    return found
