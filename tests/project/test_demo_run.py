"""The whole demo in short form: one command, real server, sidecar and PPO, and every file that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
HELD_OUT = 32


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    overrides = {
        "run.dir": folder / "run",
        "actor.steps": STEPS,
        "actor.rollout_size": 32,
        "actor.validation.size": HELD_OUT,
        "actor.checkpoint_every": 2,
    }
    command = [sys.executable, "-m", "examples.demo", "sentences", "--quick", "--cache-dir", str(folder / "prepared")]
    done = subprocess.run(
        [*command, *(f"{key}={value}" for key, value in overrides.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_summary_says_what_happened(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == summary["weights_version"] == summary["critic_updates"] == STEPS
    assert summary["reloads_swap"] == STEPS
    assert summary["reloads_triton"] in (1, 2)  # after step 2 and the last; a save during a reload needs no other
    assert summary["failed_requests"] == summary["server_failures"] == summary["masked_samples"] == 0
    assert None not in summary.values()
    assert 0 < summary["peak_rss_mb"] < 6000
    assert {"gold_before", "gold_after", "gold_ci95"} <= summary.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_files_are_complete(run_dir: Path) -> None:
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for when in ("before", "after"):
        assert len({line["prompt_id"] for line in samples if line["when"] == when}) == HELD_OUT
    assert {"prompt_id", "when", "prompt", "response", "reward"} <= set(samples[0])
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    report = (run_dir / "report.html").read_text()
    assert "<script" not in report
    assert "The gold score, which PPO never saw," in report
    assert 'src="http' not in report
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert {path.name for path in (run_dir / "logs").iterdir()} >= {"actor.log", "sidecar.log", "tritonserver.log"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_final_policy_is_an_ordinary_checkpoint(run_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    assert len(tokenizer) <= model.config.vocab_size
