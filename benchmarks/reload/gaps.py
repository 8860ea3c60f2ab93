"""Reload benchmark, part c (gaps): longest time without an answer during a swap and during a load over HTTP."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
import uuid
from typing import Any

from benchmarks.reload.critic_service import LOAD_TIMEOUT_S, CriticService
from benchmarks.reload.setup import ReloadSetup, under_load
from benchmarks.reload.windows import Samples, Window, ratio
from benchmarks.support.benchmark import Target
from python_backend.store.control_key import HEADER, control_key
from python_backend.wire.contract import CRITIC

LEAST_TIMES = 20.0
PAUSE_S = 0.5
MARGIN_S = 0.05
WAYS = ("swap", "http")


def measure(setup: ReloadSetup) -> dict[str, Any]:
    """Reload in both ways alternately, with as many clients as part a (load)."""
    settings = setup.settings
    windows: list[dict[str, Any]] = []
    with CriticService(setup, "gaps", under_load(settings.models)[0]) as service:
        setup.clients.ask("/start", {"url": service.url, "num_clients": settings.clients})
        for number in range(settings.gap_reloads):
            for way in WAYS:
                time.sleep(PAUSE_S)
                begin, end = _reload(service, way)
                windows.append({"way": way, "begin_s": begin, "end_s": end})
            setup.say(f"c: {number + 1} swaps, {number + 1} loads over HTTP")
        time.sleep(PAUSE_S)
        return {"windows": windows, "samples": setup.clients.ask("/stop", {}), "clients": settings.clients}


def _reload(service: CriticService, way: str) -> Window:
    if way == "http":
        return load_over_http(service.url, control_key(service.config.run.weights_dir))
    done = service.publish()
    return done["begin_s"], done["end_s"]


def load_over_http(url: str, key: str) -> Window:
    """Load the critic over HTTP, on the port of the inference requests; return begin and end. Real runs use gRPC."""
    with urllib.request.urlopen(f"http://{url}/v2/models/{CRITIC}/config", timeout=LOAD_TIMEOUT_S) as answer:
        config = json.load(answer)
    config["parameters"]["weights_version"] = {"string_value": f"http-{uuid.uuid4().hex[:8]}"}
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    request = urllib.request.Request(f"http://{url}/v2/repository/models/{CRITIC}/load", body, {HEADER: key})
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S):
        return begin, time.monotonic()


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """Return, for each way, the medians over its reloads of the longest silence and the longest wait of a request.

    A silence is a time without any answer. Silence and wait differ over HTTP: a load blocks one of the server's HTTP
    threads, and with it the clients that this thread serves, which may be all clients or a few.
    """
    samples = Samples.of(part["samples"])
    found: dict[str, Any] = {"failed": len(part["samples"]["failures"])}
    for way in WAYS:
        windows = [(w["begin_s"], w["end_s"]) for w in part["windows"] if w["way"] == way]
        silences = samples.longest_silences(windows, margin_s=MARGIN_S)
        waits = [float(samples.in_flight([window]).max(initial=0.0)) for window in windows]
        medians = {"silence_ms": statistics.median(silences), "wait_ms": statistics.median(waits)}
        found[way] = {**medians, "longest_silence_ms": max(silences), "reloads": len(windows)}
    return found


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the ratios of a load over HTTP to a swap: longest gap between answers, and longest wait of a request."""
    found = []
    for key, words in (("silence_ms", "longest gap between answers"), ("wait_ms", "longest wait of a request")):
        ways = ", ".join(f"{way} {summary[way][key]:,.0f} ms" for way in WAYS)
        times = ratio(summary["http"][key], summary["swap"][key])
        detail = f"medians of {summary['http']['reloads']}: {ways}"
        found.append(Target(f"c: {words}, HTTP / swap", times, LEAST_TIMES, None, detail))
    return found
