"""The measurement of a PPO step: what its ratios are made of, and one whole quick run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step.phases import cores_bound, critical_path, median_phase, mode_ratio


def block(mode: str, number: int, seconds: float, **phases: float) -> dict[str, Any]:
    spans = [[name, 1.0, 1.0 + length] for name, length in phases.items()]
    return {
        "mode": mode,
        "round": number,
        "steps": 2,
        "seconds": seconds,
        "cpu_seconds": 1.5 * seconds,
        "spans": spans,
    }


def test_what_the_figures_are_made_of() -> None:
    samples = [
        block("serial", 0, 10.0, generate=4.0, logprobs=1.0, init_logprobs=1.0, train_time=2.0, scoring=2.0),
        block("overlapped", 0, 8.0, generate=5.0, scoring=5.0),
        block("serial", 1, 20.0, generate=8.0, train_time=4.0, scoring=8.0),
        block("overlapped", 1, 12.0, generate=10.0),
        block("serial", 2, 10.0, generate=4.0, logprobs=1.0, init_logprobs=1.0, train_time=2.0, scoring=2.0),
        block("overlapped", 2, 9.0, generate=6.0),
    ]
    serial = samples[::2]
    assert mode_ratio(samples, "overlapped", "serial") == 0.8  # the median of 0.8, 0.6 and 0.9, each of one round
    assert median_phase(serial, "scoring") == 1.0  # of a step, and a block has two
    assert critical_path(samples) == 2.0 + 0.5 + 0.5 + 1.0  # scoring is not the actor's own
    assert cores_bound(samples) == 0.75


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_measures_draws_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools", "bench", "step", "--out", str(tmp_path), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    samples = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert [(s["contest"], s["mode"]) for s in samples] == [
        ("computed", "overlapped"),
        ("computed", "serial"),
        ("computed", "padded"),
        ("waited", "overlapped"),
        ("waited", "serial"),
    ]
    phases = {"generate", "scoring", "logprobs", "init_logprobs", "critic_update", "train_time"}
    for sample in samples:
        assert phases <= {name for name, _, _ in sample["spans"]}
        if sample["mode"] != "overlapped":  # one thing after the other
            ordered = sorted((start, end) for name, start, end in sample["spans"] if name in phases)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    assert (tmp_path / "step.png").stat().st_size > 10_000
    assert "overlapped / serial over padded PyTriton" in done.stdout
