"""The check of a real card, on the simulated one: it finds its way, and nothing meets on two devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import main

PARTS = ["environment", "device_tests", "served_score", "scoring", "swap", "ppo_step", "planner", "mixed_requests"]


@pytest.mark.timeout(900)
def test_the_gpu_check_passes(tmp_path: Path):
    """Without the part `tritonserver`: a real server sees that there is no GPU."""
    tests = "tests/device/test_critic_training.py -k llama -p simulated_cuda.plugin"
    options = ["--quick", "--patience", "4", "--minutes", "14", "--parts", ",".join(PARTS), "--tests", tests]
    status = main(["gpu", "--device", "cuda", "--out", str(tmp_path), *options])
    samples = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert {sample["part"]: (sample["state"], sample["why"]) for sample in samples} == dict.fromkeys(
        PARTS, ("passed", "")
    )
    assert status == 0
