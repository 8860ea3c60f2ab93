"""Reload benchmark, part a (load): failures, p99 and longest pause of clients during swaps and Triton reloads."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.reload.service import SERVICES, CriticService, ReloadSetup, under_load
from benchmarks.reload.windows import Samples, Window, p99, quiet_windows, ratio
from benchmarks.support.benchmark import Target
from benchmarks.support.samples import Sample, median_of, select
from benchmarks.support.workload import model_title

MOST_P99 = {"swap": 1.5, "triton": 3.0}
WORDS = {"swap": "swaps", "triton": "Triton reloads"}
MOST_PAUSE_MS = 20.0
MARGIN_S = 0.05
SETTLE_S = 1.0
SWAP_EVERY_S = 0.5
DRAWS = 40
COLOURS = {"swap": "#009E73", "triton": "#E69F00"}
SHOWN_BLOCKS = 8
MOST_POINTS = 20_000


def measure(setup: ReloadSetup) -> dict[str, Any]:
    """Measure each model; return samples, reloads and blocks by model."""
    return {model: _measure_model(setup, model) for model in under_load(setup.settings.models)}


def _measure_model(setup: ReloadSetup, model: str) -> dict[str, Any]:
    settings = setup.settings
    reloads: list[Sample] = []
    blocks: list[dict[str, Any]] = []
    with SERVICES[settings.model](setup, "load", model) as service:
        before = service.failed_requests()
        setup.clients.ask("/start", {"url": service.url, "num_clients": settings.clients, "model": settings.model})
        time.sleep(SETTLE_S)
        for cycle in range(settings.cycles):
            for kind in ("quiet", "swap", "quiet", "triton"):
                begin = time.monotonic()
                reloads += _block(service, kind, cycle, settings)
                blocks.append({"kind": kind, "begin_s": begin, "end_s": time.monotonic()})
            counts = {how: len(select(reloads, reload=how)) for how in ("swap", "triton")}
            setup.say(f"a, {model}: {counts['swap']} swaps, {counts['triton']} Triton reloads")
        samples = setup.clients.ask("/stop", {})
        failed = service.failed_requests() - before
    return {
        "samples": samples,
        "reloads": reloads,
        "blocks": blocks,
        "failed_by_server": failed,
        "clients": settings.clients,
    }


def share_of_cycle(total: int, cycles: int, cycle: int) -> int:
    """Return how many of `total` reloads belong to cycle number `cycle`, if they are spread as evenly as possible."""
    return total * (cycle + 1) // cycles - total * cycle // cycles


def _block(service: CriticService, kind: str, cycle: int, settings: argparse.Namespace) -> list[Sample]:
    if kind == "quiet":
        time.sleep(settings.quiet_s)
        return []
    if kind == "triton":
        return [service.triton_reload() for _ in range(share_of_cycle(settings.triton_reloads, settings.cycles, cycle))]
    done = []
    for _ in range(share_of_cycle(settings.swaps, settings.cycles, cycle)):
        next_at = time.monotonic() + SWAP_EVERY_S
        done.append(service.publish())
        time.sleep(max(0.0, next_at - time.monotonic()))
    return done


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """Return, by model, failures, latencies with and without reloads, and silences with and without swaps.

    A silence is a time without any answer.
    """
    return {model: _summarise_model(found) for model, found in part.items()}


def _summarise_model(found: dict[str, Any]) -> dict[str, Any]:
    samples = Samples.of(found["samples"])
    quiet = _quiet(found["blocks"])
    swaps = select(found["reloads"], reload="swap")
    windows = {how: [(r["begin_s"], r["end_s"]) for r in select(found["reloads"], reload=how)] for how in MOST_P99}
    # Silences count while a version is verified and loaded, not while the publisher writes it.
    serving = [(r["end_s"] - (r["verify_ms"] + r["reload_ms"]) / 1e3, r["end_s"]) for r in swaps]
    around = samples.longest_silences(serving, margin_s=MARGIN_S)
    draws = [quiet_windows(serving, quiet, margin_s=MARGIN_S, seed=seed) for seed in range(DRAWS)]
    # Maxima are noisy: the median of those that occur by chance in as many windows without a swap.
    without = median_of(max(samples.longest_silences(drawn, margin_s=MARGIN_S)) for drawn in draws if drawn)
    longest = max(around, default=None)
    return {
        "requests": int(samples.start.size),
        "failed_by_clients": len(found["samples"]["failures"]),
        "failed_by_server": found["failed_by_server"],
        "versions_seen": int(np.unique(samples.version).size),
        **{how: _latencies(samples, windows[how], quiet) for how in MOST_P99},
        "silence_ms": {"swap": longest, "quiet": without},
        "pause_ms": None if longest is None or without is None else max(0.0, longest - without),
    }


def _quiet(blocks: Sequence[dict[str, Any]]) -> list[Window]:
    """Return the quiet blocks, except those that follow Triton reloads, since these begin with a backlog."""
    before = ["quiet", *(block["kind"] for block in blocks)]
    return [
        (block["begin_s"], block["end_s"])
        for block, kind in zip(blocks, before, strict=False)
        if block["kind"] == "quiet" and kind != "triton"
    ]


def _latencies(samples: Samples, windows: list[Window], quiet: list[Window]) -> dict[str, Any]:
    """Compare requests in flight during reloads with those in quiet windows of the same lengths, or in quiet blocks."""
    during = samples.in_flight(windows)
    # Only requests that lie entirely in quiet blocks: one at the end of a block may wait for the following reload.
    without = samples.within(quiet).in_flight(quiet_windows(windows, quiet, margin_s=0.0) or quiet)
    return {
        "reloads": len(windows),
        "requests": int(during.size),
        "p99_ms": p99(during),
        "quiet_p99_ms": p99(without),
        "p99_ratio": ratio(p99(during), p99(without)),
        "reload_s": median_of(end - begin for begin, end in windows),
    }


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the targets for each model."""
    found = []
    for model, of in summary.items():
        failed = of["failed_by_clients"] + of["failed_by_server"]
        detail = f"{of['requests']:,} requests, {of['swap']['reloads']} swaps, {of['triton']['reloads']} Triton reloads"
        found.append(Target(f"a, {model}: failed requests", failed, None, 0, detail))
        for how, most in MOST_P99.items():
            p99s = of[how]
            detail = f"{_ms(p99s['p99_ms'])} against {_ms(p99s['quiet_p99_ms'])} without"
            found.append(
                Target(f"a, {model}: p99 during {WORDS[how]} / without", p99s["p99_ratio"], None, most, detail)
            )
        silence = of["silence_ms"]
        detail = f"longest silence {_ms(silence['swap'])}; in as many moments without a swap {_ms(silence['quiet'])}"
        found.append(Target(f"a, {model}: longest pause of a swap, ms", of["pause_ms"], None, MOST_PAUSE_MS, detail))
    return found


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"


def draw(axes: Any, parts: dict[str, Any], summaries: dict[str, Any]) -> None:
    """Draw every request of the first blocks as a dot, and each reload as a band that ends in a line."""
    model, part = next(iter(parts.items()))
    summary = summaries[model]
    blocks = part["blocks"][:SHOWN_BLOCKS]
    begin, end = blocks[0]["begin_s"], blocks[-1]["end_s"]
    samples = Samples.of(part["samples"])
    inside = np.flatnonzero((samples.end >= begin) & (samples.end <= end))
    inside = inside[:: max(1, inside.size // MOST_POINTS)]
    axes.scatter(
        samples.end[inside] - begin, samples.latency_ms[inside], s=3, lw=0, color="#0072B2", alpha=0.5, rasterized=True
    )
    for how, colour in COLOURS.items():
        reloads = [r for r in part["reloads"] if r["reload"] == how and begin <= r["begin_s"] <= end]
        p99s = summary[how]
        label = f"{WORDS[how]}; p99 {_ms(p99s['p99_ms'])}, {_ms(p99s['quiet_p99_ms'])} without"
        for i, reload in enumerate(reloads):
            left, right = reload["begin_s"] - begin, reload["end_s"] - begin
            axes.axvspan(left, right, color=colour, alpha=0.14, lw=0, zorder=0)
            axes.axvline(right, color=colour, lw=1.0, label=None if i else label)
    failed = summary["failed_by_clients"] + summary["failed_by_server"]
    title = (
        f"{model_title(model)}, {part['clients']} clients: the first of {summary['swap']['reloads']} swaps and "
        f"{summary['triton']['reloads']} Triton reloads; {failed} of {summary['requests']:,} requests failed"
    )
    axes.set(title=title, yscale="log", xlim=(0, end - begin), xlabel="seconds", ylabel="latency of a request (ms)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
