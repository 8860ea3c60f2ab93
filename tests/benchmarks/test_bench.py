"""Tiny runs of `python -m benchmarks`: each benchmark measures every contender, reports, and leaves no process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def bench(out, *arguments, code=0):
    """Run a benchmark; return result.json and what was printed."""
    command = [sys.executable, "-m", "benchmarks", *arguments, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 2:
        return {}, done.stderr
    assert done.stdout == (out / "report.md").read_text()
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(out) not in running
    return json.loads((out / "result.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_scoring_compares_contenders_in_alternating_rounds(tmp_path):
    names = ["ours", "pytriton_padded"]
    few = ["--models", "tiny", "--seconds", "0.1", "--repeats", "2"]
    result, report = bench(tmp_path, "scoring", *few, "--contenders", *names)
    assert [sample["contender"] for sample in result["samples"]] == [*names, *names[::-1]]
    ours, padded = result["rows"]
    assert (ours["contender"], ours["ours_times_as_fast"], ours["p99_of_ours"]) == ("ours", 1.0, 1.0)
    seconds = {(sample["contender"], sample["round"]): sample["seconds"] for sample in result["samples"]}
    ratios = [seconds["pytriton_padded", number] / seconds["ours", number] for number in (0, 1)]
    assert padded["ours_times_as_fast"] == pytest.approx(sum(ratios) / 2)  # the median of two
    assert all(row["cpu_ms_per_token"] > 0 and row["p50_ms"] <= row["p99_ms"] for row in result["rows"])
    assert all(row["difference"] < 1e-4 for row in result["rows"])
    assert "| tiny | pytriton_padded |" in report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_reload_counts_failures_and_times_swaps(tmp_path):
    result, _ = bench(tmp_path, "reload", "--models", "tiny", "--cycles", "1")
    swaps, reloads, publish = result["rows"]
    assert (swaps["reloads"], reloads["reloads"], publish["reloads"]) == (8, 2, 20)
    assert [swaps["failed_by_clients"], swaps["failed_by_server"]] == [0, 0]
    assert swaps["versions_seen"] > 1
    assert min(swaps["p99_ms"], swaps["p99_ms_without"], reloads["p99_ms"]) > 0
    alone = publish["hash_ms"] + publish["load_ms"] + publish["canary_ms"]
    assert publish["ratio"] == pytest.approx(publish["reload_ms"] / alone)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_trl_measures_grpo_and_ppo_and_reports_a_missing_environment(tmp_path):
    few = ["--models", "tiny", "--cells", "16x8", "--rounds", "1"]
    result, _ = bench(tmp_path / "out", "trl", *few, "--contenders", "ours")
    assert [row["algorithm"] for row in result["rows"]] == ["grpo", "ppo"]
    assert all(row["ours_seconds"] > 0 and row["ours_over_trl"] is None for row in result["rows"])
    assert all(sample["cpu_seconds"] > 0 for sample in result["samples"])
    _, error = bench(tmp_path / "none", "trl", *few, "--environment", str(tmp_path), code=2)
    assert "make trl-environment" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_staleness_trains_each_run_once(tmp_path):
    few = ["--steps-ahead", "1", "--corrections", "none", "--seeds", "0", "--steps", "1", "--start-accuracy", "0"]
    result, report = bench(tmp_path, "staleness", *few)
    assert [(row["steps ahead"], row["correction"]) for row in result["rows"]] == [(0, ""), (1, "none")]
    assert all(0 <= row["seed 0"] == row["mean"] <= 1 for row in result["rows"])
    assert "| algorithm | steps ahead | correction | seed 0 | mean | seconds a step |" in report
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    assert len(runs) == 2
    again, _ = bench(tmp_path, "staleness", *few)
    assert again["samples"] == result["samples"]
    assert {path: path.stat().st_mtime_ns for path in runs} == runs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_gpu_runs_on_a_cpu_and_fails_on_a_timeout(tmp_path):
    result, report = bench(tmp_path, "gpu", "--device", "cpu", "--parts", "environment", "scoring")
    assert [sample["state"] for sample in result["samples"]] == ["passed"] * 2
    assert "its speeds say nothing about a real GPU" in report
    assert any(row["number"] == "tiny: tokens/s" and row["value"] > 0 for row in result["rows"])
    late, report = bench(tmp_path / "late", "gpu", "--device", "cpu", "--parts", "swap", "--minutes", "0.01", code=1)
    assert "TIMED OUT" in report
    assert late["samples"][0]["numbers"] == []


def test_trl_environment_pins_our_torch_and_transformers():
    files = ("benchmarks/trl_requirements.txt", "constraints.txt")
    theirs, ours = ({line.split(" ;")[0] for line in (ROOT / file).read_text().splitlines()} for file in files)
    assert {"torch", "transformers", "tokenizers"} <= {pin.split("==")[0] for pin in theirs & ours}
