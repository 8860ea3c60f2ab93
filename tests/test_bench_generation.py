"""The measurement of generation: all contenders write what they are told to, and one whole quick run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.generation import main, response_lengths, speedup


def test_lengths_are_given_and_vary() -> None:
    varied = response_lengths("varied", 200, 128)
    assert response_lengths("equal", 3, 9) == [9, 9, 9]
    assert max(varied) == 128
    assert 1 <= min(varied) < 30
    assert 0.2 < sum(varied) / 200 / 128 < 0.5  # most end long before the longest


def test_ratios_are_of_samples_of_one_round() -> None:
    seconds = [("generate", 0, 2.0), ("slots-4", 0, 1.0), ("generate", 1, 9.0), ("slots-4", 1, 3.0)]
    samples = [{"contender": name, "round": number, "seconds": value} for name, number, value in seconds]
    assert speedup(samples, "slots-4") == 2.5
    assert speedup(samples, "generate") == 1.0


def test_a_quick_run_measures_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--quick"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert {sample["contender"] for sample in result["samples"]} == {"generate", "slots-4"}
    assert result["greedy_identical"] == {"tiny": 1.0}
    assert "100% of the greedy responses are identical" in capsys.readouterr().out
