"""Part c, second half: the longest silence during a reload - a swap, a load call over gRPC, the same over HTTP.
Given: a `Stage`. Returns: every request, and when each reload was under way.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
import uuid
from typing import Any

from python_backend.contract import CRITIC
from python_backend.control_key import HEADER, control_key
from tools.bench.reload_stage import LOAD_TIMEOUT_S, Bed, Stage
from tools.bench.reload_windows import Samples, Window, ratio
from tools.bench.report import Bar

LEAST_TIMES = 20.0
PAUSE_S = 0.5
MARGIN_S = 0.05
WAYS = ("swap", "grpc", "http")


def measure(stage: Stage) -> dict[str, Any]:
    """The three ways in turn, under the load of part a."""
    settings = stage.settings
    windows: list[dict[str, Any]] = []
    with Bed(stage, "gaps", settings.under_load[0]) as bed:
        stage.clients.start(bed.url, settings.clients)
        for number in range(settings.gap_reloads):
            for way in WAYS:
                time.sleep(PAUSE_S)
                begin, end = _reload(bed, way)
                windows.append({"way": way, "begin_s": begin, "end_s": end})
            stage.say(f"c: {number + 1} swaps, loads over gRPC and loads over HTTP")
        time.sleep(PAUSE_S)
        return {"windows": windows, "samples": stage.clients.stop(), "clients": settings.clients}


def _reload(bed: Bed, way: str) -> Window:
    if way == "http":
        return load_over_http(bed.url, control_key(bed.config.run.weights_dir))
    done = bed.publish() if way == "swap" else bed.triton_reload()
    return done.begin_s, done.end_s


def load_over_http(url: str, key: str) -> Window:
    """The same load call that ours sends over gRPC, to the HTTP port where the inference requests arrive too."""
    with urllib.request.urlopen(f"http://{url}/v2/models/{CRITIC}/config", timeout=LOAD_TIMEOUT_S) as answer:
        config = json.load(answer)
    config["parameters"]["weights_version"] = {"string_value": f"http-{uuid.uuid4().hex[:8]}"}
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    request = urllib.request.Request(f"http://{url}/v2/repository/models/{CRITIC}/load", body, {HEADER: key})
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S):
        return begin, time.monotonic()


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """By way, over its reloads: the longest silence, the longest wait of one request, and how long the reload took.

    They differ over HTTP: a load call blocks one of the server's HTTP threads and the clients that this thread
    serves, which may be all of them or a few.
    """
    samples = Samples.of(part["samples"])
    found: dict[str, Any] = {"failed": len(part["samples"]["failures"])}
    for way in WAYS:
        windows = [(w["begin_s"], w["end_s"]) for w in part["windows"] if w["way"] == way]
        silences = samples.longest_silences(windows, margin_s=MARGIN_S)
        waits = [float(samples.under_way([window]).max(initial=0.0)) for window in windows]
        found[way] = {
            "silence_ms": statistics.median(silences), "longest_silence_ms": max(silences),
            "wait_ms": statistics.median(waits), "longest_wait_ms": max(waits), "reloads": len(windows),
            "reload_s": statistics.median(end - begin for begin, end in windows),
        }  # fmt: skip
    return found


def bars(summary: dict[str, Any]) -> list[Bar]:
    """How many times as long a load over HTTP keeps everybody waiting, and whoever waits longest."""
    found = []
    for key, words in (("silence_ms", "longest gap between answers"), ("wait_ms", "longest wait of a request")):
        http = summary["http"][key]
        ways = ", ".join(f"{way} {summary[way][key]:,.0f} ms" for way in WAYS)
        grpc_times = ratio(http, summary["grpc"][key]) or 0
        detail = f"medians of {summary['http']['reloads']}: {ways}; HTTP / gRPC {grpc_times:,.0f}"
        found.append(Bar(f"c: {words}, HTTP / swap", ratio(http, summary["swap"][key]), LEAST_TIMES, None, detail))
    return found
