"""The benchmark `gpu` on simulated GPUs (`simulated_cuda`): every part passes, and no operation mixes two devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["environment", "served_score", "scoring", "swap", "ppo_step"]


@pytest.mark.timeout(900)
def test_all_parts_of_bench_gpu_pass_on_a_simulated_gpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick", "--device", "cuda"]
    command += ["--parts", *PARTS, "--minutes", "12", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert [sample["part"] for sample in samples] == PARTS
    assert all(sample["numbers"] for sample in samples)
