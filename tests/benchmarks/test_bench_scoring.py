"""The benchmark of scoring: what it sends, how much of it, and one whole run with every contender. Nothing is timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.command import parse_arguments
from benchmarks.scoring import sweep
from benchmarks.scoring.processes import load_contender, pack, unpack
from benchmarks.scoring.pytriton import stripped_width
from benchmarks.support.benchmark import BenchError, Record
from benchmarks.support.workload import (
    LONGEST,
    SHORTEST,
    SIZES,
    VOCAB_SIZE,
    make_checkpoint,
    make_trace,
    trace_lengths,
)
from python_backend.models.modeling import load_reward

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = parse_arguments("scoring", sweep, ["--out", "unused", "--concurrency", "1,64"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(SIZES["tiny"], folder)
    return folder


# ---- the trace ----


def test_lengths_are_log_normal_within_their_limits():
    lengths = trace_lengths(20_000)
    assert (lengths.min(), lengths.max()) == (SHORTEST, LONGEST)
    middle = lengths[(lengths > SHORTEST) & (lengths < LONGEST)]
    assert np.log(np.median(lengths)) == pytest.approx(4.8, abs=0.02)
    assert 150 < lengths.mean() < 175
    assert middle.size > 18_000


def test_a_shorter_trace_is_a_prefix_of_a_longer_one():
    short, long = make_trace(5), make_trace(50)
    assert all(np.array_equal(a, b) for a, b in zip(short, long[:5], strict=True))
    assert [row.size for row in long] == trace_lengths(50).tolist()
    assert all(row.min() >= 3 and row.max() < VOCAB_SIZE for row in long)


# ---- how much ----


# ---- the parts ----


def test_packed_rows_come_back():
    rows = make_trace(3)
    assert all(np.array_equal(a, b) for a, b in zip(unpack(pack(rows)), rows, strict=True))
    (alone,) = unpack(pack(rows[:1]))
    assert alone.dtype == np.int64
    assert np.array_equal(alone, rows[0])


@pytest.mark.parametrize(
    ("longest", "multiple", "computed"), [(17, 16, 32), (32, 16, 32), (500, 16, 500), (17, 0, 500)]
)
def test_stripped_width(longest: int, multiple: int, computed: int):
    assert stripped_width(longest, multiple, 500) == computed


def test_a_contender_that_scores_otherwise_stops_the_measurement(tmp_path: Path):
    bench = sweep.ModelBench(SETTINGS, Record(tmp_path), None, SIZES["tiny"])  # type: ignore[arg-type]
    bench.check_rewards("first", [0.5, 1.0])
    bench.check_rewards("other", [0.5001, 1.0])
    with pytest.raises(BenchError, match="other scores"):
        bench.check_rewards("other", [0.6, 1.0])


# ---- the command ----


# ---- the cells ----


def test_a_cell_takes_the_fastest_contender_as_long_as_asked_unless_that_is_too_long_for_all() -> None:
    def planned(*row_s: float) -> dict[tuple[int, int], int]:
        return {
            (cell.rows, cell.concurrency): cell.num_requests for cell in sweep.plan_cells(SETTINGS, SIZES["7m"], row_s)
        }

    assert planned(0.01, 0.02) == {(1, 1): 100, (1, 64): 300, (8, 1): 13}  # the headline cell three times as long
    assert planned(0.01, 1.0)[1, 1] == 20  # 20 s for all contenders together
    assert planned(1.0, 1.0)[1, 64] == 64  # one request per worker
    assert {cell.rows for cell in sweep.plan_cells(SETTINGS, SIZES["110m"], [1.0])} == {1}


def test_padded_and_ragged_forward_passes_score_alike(tiny: Path) -> None:
    rows = make_trace(4)
    expected = np.concatenate([load_reward(tiny).score([row]) for row in rows])
    score = load_contender(str(tiny), threads=1)
    np.testing.assert_allclose(score(rows), expected, atol=1e-4)
    np.testing.assert_allclose(score(rows, LONGEST), expected, atol=1e-4)
    assert np.ptp(expected) > 0.1  # rows differ, so a wrong row or position would show
