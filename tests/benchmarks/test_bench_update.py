"""The benchmark of the critic's update: the contenders differ in padding alone, and one whole quick run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.command import main
from benchmarks.update import make_payload, padded_payload
from python_backend.wire.training_payload import TrainPayload


def test_padding_lengthens_rows_and_trains_nothing():
    fields = [np.asarray(values, np.float32) for values in ([1, 2, 3], [4, 5, 6], [1, 1, 1])]
    payload = TrainPayload(np.asarray([7, 8, 9, 10, 11]), np.asarray([2, 3]), *fields)
    padded = padded_payload(payload)
    assert padded.lengths.tolist() == [3, 3]
    assert padded.tokens.tolist() == [7, 8, 0, 9, 10, 11]
    assert padded.returns.tolist() == [1, 0, 2, 3]
    assert padded.prev_values.tolist() == [4, 0, 5, 6]
    assert padded.mask.tolist() == [1, 0, 1, 1]


def test_padding_keeps_what_is_trained():
    payload = make_payload(16)
    padded = padded_payload(payload)
    assert padded.mask.sum() == payload.mask.sum()
    assert padded.lengths.tolist() == [payload.lengths.max()] * 16


def test_a_quick_run_measures_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["update", "--out", str(tmp_path), "--quick", "--threads", "1"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [sample["contender"] for sample in result["samples"]] == ["ours", "padded"]
    assert {sample["model"] for sample in result["samples"]} == {"tiny"}
    assert result["tokens"] == 1970
    assert "tiny: ours / padded to the longest, times as fast" in capsys.readouterr().out
