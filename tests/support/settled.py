"""Triton's counters, once all earlier requests are in them."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass

QUIET_S = 0.3


@dataclass(frozen=True)
class ModelStatistics:
    """Counters of a model since it was first loaded; reloads do not reset them."""

    inference_count: int  # rows
    execution_count: int  # batches, as merged by the dynamic batcher
    success_count: int  # requests
    failure_count: int


def statistics(url, model):
    """Return the model's counters from Triton's statistics API at `host:port`, over HTTP."""
    with urllib.request.urlopen(f"http://{url}/v2/models/{model}/stats", timeout=120) as answer:
        (found,) = json.load(answer)["model_stats"]
    requests = found["inference_stats"]
    counts = (requests[outcome]["count"] for outcome in ("success", "fail"))
    return ModelStatistics(found["inference_count"], found["execution_count"], *counts)


def settled_statistics(url, model):
    """Return the model's counters once they no longer change: Triton counts a request after it has answered it."""
    found = statistics(url, model)
    since = time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(QUIET_S / 10)
        latest = statistics(url, model)
        if latest != found:
            found = latest
            since = time.monotonic()
    return found
