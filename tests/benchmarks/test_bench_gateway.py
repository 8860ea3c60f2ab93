"""The benchmark of the gateway: one whole quick run, in which all contenders return the same rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import main
from benchmarks.gateway import CONTENDERS, TOLERANCE


@pytest.mark.slow
def test_a_quick_run_measures_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--out", str(tmp_path), "--quick"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(sample["contender"] for sample in result["samples"]) == sorted(CONTENDERS)
    assert all(sample["rows_per_s"] > 0 and sample["error"] <= TOLERANCE for sample in result["samples"])
    assert "rows/s, gateway_tokens / direct" in capsys.readouterr().out
