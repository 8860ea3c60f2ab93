"""The measurement of generation: all contenders write what they are told to, and one whole quick run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import main
from benchmarks.generation import response_lengths


def test_lengths_are_given_and_vary() -> None:
    varied = response_lengths("varied", 200, 128)
    assert response_lengths("equal", 3, 9) == [9, 9, 9]
    assert max(varied) == 128
    assert 1 <= min(varied) < 30
    assert 0.2 < sum(varied) / 200 / 128 < 0.5  # most end long before the longest


def test_a_quick_run_measures_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generation", "--out", str(tmp_path), "--quick"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert {sample["contender"] for sample in result["samples"]} == {"generate", "slots-4"}
    assert result["greedy_identical"] == {"tiny": 1.0}
    assert "tiny: identical greedy responses, share" in capsys.readouterr().out
    assert result["targets"][-1]["verdict"] == "pass"
