"""What the reload measurement makes of its samples: windows, silences, slopes, targets and the picture. No times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.reload import load, publish, training
from benchmarks.reload.windows import Samples, quiet_windows
from benchmarks.support.benchmark import Target


def raw(start_s: list[float], latency_ms: list[float], version: int = 0) -> dict[str, Any]:
    return {"start_s": start_s, "latency_ms": latency_ms, "version": [version] * len(start_s), "failures": []}


def ticking(begin: float, end: float, every_s: float, latency_ms: float = 5.0) -> dict[str, Any]:
    """A request ends every `every_s`."""
    starts = np.arange(begin, end, every_s).tolist()
    return raw(starts, [latency_ms] * len(starts))


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    return {key: [item for part in parts for item in part[key]] for key in parts[0]}


# ---- windows ----


def test_samples_come_in_the_order_of_their_answers():
    samples = Samples.of({"start_s": [1.0, 1.1], "latency_ms": [500.0, 10.0], "version": [3, 4]})
    assert samples.end.tolist() == pytest.approx([1.11, 1.5])
    assert samples.version.tolist() == [4, 3]
    assert samples.latency_ms == pytest.approx([10.0, 500.0])


def test_in_flight_is_who_overlaps_a_window_each_once():
    samples = Samples.of(raw([0.0, 1.0, 2.0, 3.0], [500.0, 600.0, 700.0, 800.0]))
    assert samples.in_flight([(1.5, 2.1)]) == pytest.approx([600.0, 700.0])
    assert samples.in_flight([(1.5, 2.1), (1.55, 2.5)]) == pytest.approx([600.0, 700.0])
    assert samples.in_flight([(0.6, 0.9)]).size == 0


def test_a_silence_counts_whole_although_the_window_cuts_it():
    samples = Samples.of(raw([0.0, 0.1, 0.9, 1.0], [0.0] * 4))
    assert samples.longest_silences([(0.5, 0.6)], margin_s=0.05) == pytest.approx([800.0])
    assert samples.longest_silences([(0.95, 0.96)], margin_s=0.01) == pytest.approx([100.0])
    assert samples.longest_silences([(5.0, 6.0)], margin_s=0.0) == [0.0]


def test_quiet_windows_lie_within_quiet_times_and_are_as_long():
    like = [(0.0, 0.5), (7.0, 7.25)]
    found = quiet_windows(like, [(10.0, 10.3), (20.0, 22.0)], margin_s=0.05)
    assert [end - begin for begin, end in found] == pytest.approx([0.5, 0.25])
    assert all(begin >= 20.05 and end <= 21.95 for begin, end in found)
    assert quiet_windows([(0.0, 3.0)], [(20.0, 22.0)], margin_s=0.05) == []


# ---- parts ----


def timed(reload: str, begin: float, end: float, version: int, **parts: float) -> dict[str, Any]:
    none = {"publish_ms": 0.0, "verify_ms": 0.0, "reload_ms": (end - begin) * 1e3}
    return {"reload": reload, "begin_s": begin, "end_s": end, "version": version, **none, **parts}


def load_part(*, swap_gap_s: float = 0.0, failures: int = 0) -> dict[str, Any]:
    """Ten seconds of quiet, five of swaps, ten of quiet, ten of two Triton reloads, twice as slow."""
    samples = joined(
        ticking(0, 12.5, 0.01), ticking(12.5 + swap_gap_s, 25, 0.01), ticking(25, 35, 0.01, latency_ms=10.0)
    )
    samples["failures"] = [(1.0, "refused")] * failures
    blocks = [("quiet", 0, 10), ("swap", 10, 15), ("quiet", 15, 25), ("triton", 25, 35)]
    reloads = [timed("swap", at, at + 0.1, i + 1, reload_ms=50.0, publish_ms=50.0) for i, at in enumerate((11, 12.45))]
    reloads += [timed("triton", at, at + 4.5, 2) for at in (25.2, 30.2)]
    return {
        "samples": samples,
        "reloads": reloads,
        "failed_by_server": 0,
        "clients": 4,
        "blocks": [{"kind": kind, "begin_s": begin, "end_s": end} for kind, begin, end in blocks],
    }


def target(targets: list[Target], words: str) -> Target:
    (found,) = [target for target in targets if words in target.name]
    return found


def load_targets(part: dict[str, Any]) -> list[Target]:
    return load.targets(load.summarise({"1m": part}))


def test_load_compares_with_quiet_times():
    found = load_targets(load_part())
    assert target(found, "p99 during swaps").value == pytest.approx(1.0)
    assert target(found, "p99 during Triton").value == pytest.approx(2.0)
    assert target(found, "longest pause").value == pytest.approx(0.0, abs=1e-6)
    assert {b.verdict for b in found} == {"pass"}


@pytest.mark.parametrize(("gap_s", "verdict"), [(0.015, "pass"), (0.025, "miss")])
def test_a_pause_at_a_swap_is_found(gap_s: float, verdict: str):
    found = target(load_targets(load_part(swap_gap_s=gap_s)), "longest pause")
    assert found.value == pytest.approx(gap_s * 1e3, abs=0.01)
    assert found.verdict == verdict


def test_one_failed_request_is_a_miss():
    assert target(load_targets(load_part(failures=1)), "failed").verdict == "miss"
    assert target(load_targets({**load_part(), "failed_by_server": 1}), "failed").verdict == "miss"


def publish_part() -> dict[str, Any]:
    swap = {
        "publish_ms": 30.0,
        "to_served_ms": 24.0,
        "reload_ms": 9.0,
        "hash_ms": 5.0,
        "load_ms": 10.0,
        "canary_ms": 5.0,
    }
    return {"1m": {"parameters": 1, "swaps": [swap] * 3, "loads": [{"reload_ms": 3000.0, "fresh_ms": 2000.0}] * 3}}


def test_publish_divides_by_the_sum_of_its_steps():
    found = publish.targets(publish.summarise(publish_part()))
    assert target(found, "swap").value == pytest.approx(1.2)
    assert target(found, "Triton").value == pytest.approx(1.5)
    assert [b.verdict for b in found] == ["pass", "miss"]


def training_part() -> list[dict[str, Any]]:
    runs = []
    for size, update_s, latency_ms in ((1, 2.0, 100.0), (2, 4.0, 100.0), (4, 8.0, 130.0)):
        samples = ticking(0, 10, 0.05, latency_ms)
        runs.append({"size": size, "model": "7m", "window": (1.0, 1.0 + update_s), "samples": samples})
    return runs


def test_training_compares_sizes_of_the_update():
    summary = training.summarise(training_part())
    assert summary["x4"]["p99_ms"] == pytest.approx(130.0)
    found = target(training.targets(summary), "p99")
    assert found.value == pytest.approx(1.3)
    assert found.verdict == "miss"


# ---- the report ----
