"""One whole quick run of each benchmark: it measures all contenders, reports, and leaves nothing running."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCORING = ["gateway_tokens", "ideal", "one_forward", "ours", "pytriton_stripped", "serve_rm"]
GPU_PARTS = ["environment", "device_tests", "tritonserver", "planner"]  # tests/device has the others
PICTURES = {"scoring": "throughput.png", "step": "step.png", "learning": "learning.png", "reload": "reload.png"}


@pytest.mark.parametrize(
    ("name", "options", "contenders", "target"),
    [
        ("generation", [], ["generate", "slots-4"], "tiny: identical greedy responses, share"),
        ("update", ["--threads", "1"], ["ours", "padded"], "tiny: ours / padded to the longest, times as fast"),
        ("scoring", ["--contenders", ",".join(SCORING)], SCORING, "through the gateway"),
        ("step", [], ["overlapped", "serial"], "overlapped / serial"),
        ("learning", [], ["guided", "rloo"], "share of the optimum, worst seed"),
        ("trl", ["--contenders", "ours"], ["ours"], "tiny ppo 16x8: ours / TRL"),
        ("reload", ["--model", "reward"], [], "p99 while the critic trains"),
        ("gpu", ["--device", "cpu", "--parts", ",".join(GPU_PARTS)], sorted(GPU_PARTS), ""),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_run(name: str, options: list[str], contenders: list[str], target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools", "bench", name, "--out", str(tmp_path), "--quick", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target in done.stdout
    assert done.stdout.strip() == (tmp_path / "report.md").read_text().strip()
    result = json.loads((tmp_path / "result.json").read_text())
    key = {"step": "mode", "learning": "algorithm", "gpu": "part"}.get(name, "contender")
    assert sorted({sample[key] for sample in result["samples"]}) == contenders
    CHECKS.get(name, lambda result: None)(result)
    assert name not in PICTURES or (tmp_path / PICTURES[name]).stat().st_size > 5_000
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running


def greedy_responses_are_identical(result: dict[str, Any]) -> None:
    assert result["greedy_identical"] == {"tiny": 1.0}


def every_cell_is_measured(result: dict[str, Any]) -> None:
    swept = [sample for sample in result["samples"] if sample["purpose"] == "sweep"]
    assert {(sample["rows"], sample["concurrency"]) for sample in swept} == {(8, 1), (8, 8)}
    assert all(sample["cpu_s"] > 0 for sample in swept)


def phases_follow_each_other_unless_overlapped(result: dict[str, Any]) -> None:
    phases = {"generate", "scoring", "logprobs", "init_logprobs", "critic_update", "train_time"}
    for sample in result["samples"]:
        assert phases <= {name for name, _, _ in sample["spans"]}
        ordered = sorted((start, end) for name, start, end in sample["spans"] if name in phases)
        serial = all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
        assert serial or sample["mode"] == "overlapped"


def no_response_ended_early(result: dict[str, Any]) -> None:
    for sample, is_ppo in zip(result["samples"], (False, True), strict=True):
        assert sample["tokens"] == 16 * 8
        assert {"generate", "train_time", "step_time"} <= sample["phases"].keys()
        assert ("init_logprobs" in sample["phases"]) == is_ppo


def no_request_failed(result: dict[str, Any]) -> None:
    load = result["summary"]["load"]["tiny"]
    assert load["failed_by_clients"] == load["failed_by_server"] == 0
    assert (load["swap"]["reloads"], load["triton"]["reloads"]) == (4, 1)
    assert load["versions_seen"] > 1
    demands = result["summary"]["demands"]["tiny"]
    assert (demands["failed"], demands["swaps"], demands["with"]["older"]) == (0, 4, 0)
    assert demands["without"]["older"] > 0, "no server was late, which shows nothing"
    assert result["summary"].keys() == {"load", "publish", "training", "demands"}


def every_part_passed_that_needs_no_gpu(result: dict[str, Any]) -> None:
    states = {sample["part"]: sample["state"] for sample in result["samples"]}
    assert states == {**dict.fromkeys(GPU_PARTS, "passed"), "device_tests": "skipped"}
    assert "its speeds say nothing about a real card" in result["note"]


CHECKS = {
    "generation": greedy_responses_are_identical,
    "scoring": every_cell_is_measured,
    "step": phases_follow_each_other_unless_overlapped,
    "trl": no_response_ended_early,
    "reload": no_request_failed,
    "gpu": every_part_passed_that_needs_no_gpu,
}
