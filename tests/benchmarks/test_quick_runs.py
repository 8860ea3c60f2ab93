"""One whole quick run of each benchmark: it measures all contenders, reports, and leaves nothing running."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCORING = ["gateway_tokens", "ideal", "one_forward", "ours", "pytriton_stripped", "serve_rm"]
GPU_PARTS = ["environment", "device_tests", "tritonserver"]  # tests/device has the others
PICTURES = {"scoring": "throughput.png", "reload": "reload.png"}


@pytest.mark.parametrize(
    ("name", "options", "contenders", "target"),
    [
        ("scoring", ["--contenders", ",".join(SCORING)], SCORING, "through the gateway"),
        ("trl", ["--contenders", "ours"], ["ours"], "tiny ppo 16x8: ours / TRL"),
        ("reload", [], [], "swap / hash + load + canary"),
        ("gpu", ["--device", "cpu", "--parts", ",".join(GPU_PARTS)], sorted(GPU_PARTS), ""),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_run(name: str, options: list[str], contenders: list[str], target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_triton.tools", "bench", name, "--out", str(tmp_path), "--quick", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target in done.stdout
    assert done.stdout.strip() == (tmp_path / "report.md").read_text().strip()
    result = json.loads((tmp_path / "result.json").read_text())
    key = {"gpu": "part"}.get(name, "contender")
    assert sorted({sample[key] for sample in result["samples"]}) == contenders
    CHECKS.get(name, lambda result: None)(result)
    assert name not in PICTURES or (tmp_path / PICTURES[name]).stat().st_size > 5_000
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running


def every_cell_is_measured(result: dict[str, Any]) -> None:
    swept = [sample for sample in result["samples"] if sample["purpose"] == "sweep"]
    assert {(sample["rows"], sample["concurrency"]) for sample in swept} == {(8, 1), (8, 8)}
    assert all(sample["cpu_s"] > 0 for sample in swept)


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
    assert result["summary"].keys() == {"load", "publish"}


def every_part_passed_that_needs_no_gpu(result: dict[str, Any]) -> None:
    states = {sample["part"]: sample["state"] for sample in result["samples"]}
    assert states == {**dict.fromkeys(GPU_PARTS, "passed"), "device_tests": "skipped"}
    assert "its speeds say nothing about a real card" in result["note"]


CHECKS = {
    "scoring": every_cell_is_measured,
    "trl": no_response_ended_early,
    "reload": no_request_failed,
    "gpu": every_part_passed_that_needs_no_gpu,
}
