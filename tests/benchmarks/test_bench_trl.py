"""The comparison with TRL: turns, ratios, and one whole quick run of our side; TRL is not installed here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.benchmark import BenchError, Record
from benchmarks.trl.comparison import REQUIREMENTS, SteppedTrainer, summarise, take_turns, targets
from benchmarks.trl.theirs import trl_arguments

ROOT = Path(__file__).resolve().parents[2]
CELL = {"model": "tiny", "algorithm": "grpo", "rows": 16, "new_tokens": 8}
TRAINER = """
import time
from benchmarks.trl.turns import ContenderTurns
turns = ContenderTurns()
print("a library's greeting")
for step in range({steps}):
    turns.begin()
    with turns.phase("generate"):
        time.sleep(0.01)
    turns.end(tokens=step)
raise SystemExit("out of memory")
"""


def start(tmp_path: Path, steps: int) -> SteppedTrainer:
    command = [sys.executable, "-c", TRAINER.format(steps=steps)]
    return SteppedTrainer("fake", command, tmp_path / "fake.log", {"PYTHONPATH": str(ROOT)})


def sample(contender: str, number: int, seconds: float, **phases: float) -> dict[str, Any]:
    return {
        **CELL,
        "contender": contender,
        "round": number,
        "seconds_per_step": seconds,
        "cpu_seconds_per_step": 2 * seconds,
        "peak_rss_mb": 100.0 + number,
        "tokens": 128,
        "phases": phases,
    }


def test_a_contender_steps_when_told_and_leaves_when_its_input_ends(tmp_path: Path) -> None:
    contender = start(tmp_path, steps=10)
    try:
        measured = contender.steps(3)
    finally:
        contender.stop()
    assert measured["tokens"] == 2
    assert measured["steps"] == 3
    assert 0.01 <= measured["phases"]["generate"] <= measured["seconds_per_step"]
    assert measured["peak_rss_mb"] > 1
    assert "greeting" in (tmp_path / "fake.log").read_text()  # and not among the answers


def test_a_contender_that_ends_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    contender = start(tmp_path, steps=1)
    try:
        with pytest.raises(BenchError, match=r"(?s)fake ended with exit code 1.*out of memory"):
            contender.steps(2)
    finally:
        contender.stop()


def test_turns_alternate_after_the_warm_up(tmp_path: Path) -> None:
    taken: list[tuple[str, int]] = []
    record = Record(tmp_path)

    def steps(name: str, seconds: float) -> Any:
        def take(count: int) -> dict[str, Any]:
            taken.append((name, count))
            return {"seconds_per_step": seconds}

        return take

    contenders = {"trl": steps("trl", 2.0), "ours": steps("ours", 1.0)}
    take_turns(contenders, argparse.Namespace(rounds=2, warmup=1, seconds=3.0), CELL, record)
    assert taken == [("trl", 1), ("ours", 1), ("trl", 3), ("ours", 3), ("ours", 3), ("trl", 3)]
    noted = [(sample["contender"], sample["round"]) for sample in record.result["samples"]]
    assert sorted(noted) == [("ours", 0), ("ours", 1), ("trl", 0), ("trl", 1)]


def test_the_ratio_is_of_samples_of_one_round() -> None:
    samples = [
        sample("trl", 0, 10.0, generate=4.0),
        sample("ours", 0, 9.0, generate=2.0),
        sample("trl", 1, 20.0, generate=8.0),
        sample("ours", 1, 16.0, generate=4.0),
        sample("trl", 2, 10.0, generate=4.0),
        sample("ours", 2, 8.4, generate=2.0),
    ]
    trl, ours = summarise({"samples": samples})
    assert ours["seconds_per_step"] == 9.0
    assert trl["phases"] == "generate 4.00"
    assert ours["peak_rss_mb"] == 102.0
    seconds, cpu = targets({"samples": samples})
    assert seconds.value == pytest.approx(0.84)  # the median of 0.9, 0.8 and 0.84
    assert (seconds.name, seconds.verdict) == ("tiny grpo 16x8: ours / TRL, seconds", "pass")
    assert (cpu.value, cpu.verdict) == (pytest.approx(0.84), "no target")


def test_trl_takes_one_optimizer_step_per_rollout() -> None:
    settings = {**CELL, "rows": 64, "folder": "f", "group": 8, "lr": 1e-6, "trl_micro_batch": 16}
    arguments = trl_arguments(settings)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 64
    assert arguments["generation_kwargs"] == {"min_new_tokens": arguments["max_completion_length"]}


def test_both_environments_have_the_same_torch_and_transformers() -> None:
    def pins(path: Path) -> set[str]:
        return {line.split(" ;")[0] for line in path.read_text().splitlines()}

    shared = pins(REQUIREMENTS) & pins(ROOT / "constraints.txt")
    assert {"torch", "transformers", "tokenizers"} <= {pin.split("==")[0] for pin in shared}
