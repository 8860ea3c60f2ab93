"""The GPU check: what a part that fails or hangs leaves of the report, and the check itself on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import main, report
from benchmarks.gpu import check


def sample_of(name: str, tmp_path: Path, *, device: str = "cpu", limit_s: float = 120) -> dict[str, Any]:
    job = {"device": device, "small": True, "scratch": str(tmp_path), "tests": ""}
    return check.run_part(name, job, limit_s, tmp_path / f"{name}.log")


def test_a_part_that_fails_keeps_its_numbers_and_says_why(tmp_path: Path):
    sample = sample_of("environment", tmp_path, device="nowhere")
    assert [row["name"] for row in sample["rows"]] == ["GPUs"]
    assert sample["state"] == "FAILED"
    assert "nowhere" in sample["why"]
    assert check.has_failed({"samples": [sample]})
    result: dict[str, Any] = {"samples": [sample, sample_of("device_tests", tmp_path)]}
    text = report(check, result, tmp_path)
    assert "FAILED" in text
    assert "nowhere" in text
    assert "there is no GPU" in text


def test_a_part_that_hangs_is_stopped(tmp_path: Path):
    sample = sample_of("environment", tmp_path, limit_s=0.05)
    assert (sample["state"], sample["why"]) == ("TIMED OUT", "it did not end within 0 s")
    assert sample["seconds"] < 10


def test_a_number_outside_its_limits_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"name": "error", "value": 2.0, "low": None, "high": 1.0, "detail": "largest"}]
    monkeypatch.setattr(check, "read_jsonl", lambda path: rows)
    sample = sample_of("device_tests", tmp_path)
    assert sample["state"] == "OUTSIDE ITS LIMITS"
    assert check.has_failed({"samples": [sample]})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_pass_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Speeds and the peak of tiny models are only reported; all else has limits."""
    assert main(["gpu", "--device", "cpu", "--out", str(tmp_path), "--patience", "4", "--minutes", "14"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    skipped = {sample["part"]: sample["why"] for sample in result["samples"] if sample["state"] != "passed"}
    assert skipped == {"device_tests": "there is no GPU"}
    assert len(result["samples"]) == len(check.PARTS)
    text = (tmp_path / "report.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "its speeds say nothing about a real card" in text
