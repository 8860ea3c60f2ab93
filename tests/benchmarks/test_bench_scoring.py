"""The benchmark of scoring: what it sends, how much of it, and one whole run with every contender. Nothing is timed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.command import parse_arguments
from benchmarks.scoring import sweep
from benchmarks.scoring.cells import Pace, num_requests, plan_cells
from benchmarks.scoring.contenders import CONTENDERS
from benchmarks.scoring.processes import claim, pack, unpack
from benchmarks.support.benchmark import BenchError, Record
from benchmarks.support.forward import CountedReward, ForwardCounters, read_counters
from benchmarks.support.pytriton import stripped_width
from benchmarks.support.usage import cpu_seconds, difference, snapshot
from benchmarks.support.workload import (
    LONGEST,
    SHORTEST,
    SIZES,
    VOCAB_SIZE,
    as_requests,
    make_checkpoint,
    make_trace,
    rows_for_tokens,
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


def test_requests_hold_every_row_once_in_order():
    rows = make_trace(10)
    requests = as_requests(rows, 4)
    assert [len(request) for request in requests] == [4, 4, 2]
    assert all(a is b for a, b in zip([row for request in requests for row in request], rows, strict=True))


@pytest.mark.parametrize("tokens", [1, 1000, 100_000])
def test_rows_for_tokens_is_the_shortest_trace(tokens: int):
    num_rows = rows_for_tokens(tokens)
    assert trace_lengths(num_rows).sum() >= tokens
    assert num_rows == 1 or trace_lengths(num_rows - 1).sum() < tokens


@pytest.mark.parametrize(("name", "millions"), [("1m", (0.9, 1.5)), ("7m", (6.5, 7.5)), ("110m", (95, 120))])
def test_models_have_the_size_that_they_are_called_by(name: str, millions: tuple[float, float]):
    size = SIZES[name]
    body = size.layers * (4 * size.width**2 + 3 * size.width * size.feed_forward)
    assert millions[0] <= (body + VOCAB_SIZE * size.width) / 1e6 <= millions[1]


# ---- how much ----


def test_requests_fill_the_time_of_the_fastest():
    paces = [Pace(0.01, 0.02), Pace(0.02, 0.02)]
    assert num_requests(1, 8, paces, 1.0) == 100
    assert num_requests(1, 1, paces, 1.0) == 50  # one after the other, the fastest takes 0.02 s
    assert num_requests(8, 8, paces, 1.0) == 16  # two per worker
    assert num_requests(1, 64, paces, 1.0) == 300  # the headline is measured three times as long


def test_slow_contenders_make_a_cell_shorter_but_never_below_one_request_per_worker():
    slow = [Pace(0.01, 0.01), Pace(1.0, 1.0)]
    assert num_requests(1, 8, slow, 1.0) == 20
    assert num_requests(1, 32, slow, 1.0) == 32
    assert num_requests(8, 1, slow, 1.0) == 4


def test_cells_leave_out_what_a_model_or_a_limit_excludes():
    paces = {"ours": Pace(0.01, 0.01)}
    points = [(cell.rows, cell.concurrency) for cell in plan_cells(SETTINGS, SIZES["7m"], paces)]
    assert points == [(1, 1), (1, 64), (8, 1)]
    assert {cell.rows for cell in plan_cells(SETTINGS, SIZES["110m"], paces)} == {1}


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


def test_counters_add_up_over_instances(tmp_path: Path):
    first, second = ForwardCounters(tmp_path), ForwardCounters(tmp_path)
    first.add([3, 5], 5)
    second.add([2], 8)
    first.add([1], 1)
    found = read_counters(tmp_path)
    assert found == {"forward_tokens": 11, "computed_tokens": 19}


def test_padded_and_ragged_forwards_score_alike_and_count_what_they_compute(tiny: Path, tmp_path: Path):
    model = CountedReward(tiny, tmp_path, threads=1)
    rows = make_trace(4)
    lengths = np.asarray([row.size for row in rows])
    tokens = np.zeros((4, LONGEST), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    with torch.no_grad():
        expected = np.concatenate([load_reward(tiny).score([row]) for row in rows])
    np.testing.assert_allclose(model.score(rows), expected, atol=1e-4)
    np.testing.assert_allclose(model.score_padded(tokens, lengths), expected, atol=1e-4)
    assert np.ptp(expected) > 0.1  # rows differ, so a wrong row or position would show
    assert read_counters(tmp_path)["computed_tokens"] == 4 * int(lengths.max()) + 4 * LONGEST


def _claim_all(path: str, count: int, out: str) -> None:
    Path(out).write_text(json.dumps(list(claim(Path(path), count))))


@pytest.mark.slow
def test_every_micro_batch_is_claimed_once(tmp_path: Path):
    workers = [
        multiprocessing.get_context("spawn").Process(
            target=_claim_all, args=(str(tmp_path / "claims"), 2000, str(tmp_path / f"{i}.json"))
        )
        for i in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)  # each imports torch
    taken = [index for i in range(2) for index in json.loads((tmp_path / f"{i}.json").read_text())]
    assert Counter(taken) == Counter(range(2000))


def test_snapshot_of_a_process(tmp_path: Path):
    before = snapshot([os.getpid()], tmp_path)
    ForwardCounters(tmp_path).add([1, 2], 2)
    used = difference(snapshot([os.getpid()], tmp_path), before)
    assert (used["forward_tokens"], used["computed_tokens"]) == (3, 4)
    assert used["server_cpu_s"] >= 0
    assert cpu_seconds([]) == 0.0


def test_a_contender_that_scores_otherwise_stops_the_measurement(tmp_path: Path):
    bench = sweep.ModelBench(SETTINGS, Record(tmp_path, {}), None, SIZES["tiny"])  # type: ignore[arg-type]
    bench.check_rewards("first", [0.5, 1.0])
    bench.check_rewards("other", [0.5001, 1.0])
    with pytest.raises(BenchError, match="other scores"):
        bench.check_rewards("other", [0.6, 1.0])


# ---- the command ----


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_run_measures_every_contender_and_leaves_nothing_running(tmp_path: Path):
    command = [sys.executable, "-m", "tools", "bench", "scoring", "--out", str(tmp_path), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    swept = [sample for sample in result["samples"] if sample["purpose"] == "sweep"]
    points = {(s["contender"], s["rows"], s["concurrency"]) for s in swept}
    assert points == {(name, rows, c) for name in CONTENDERS for rows in (1, 8) for c in (1, 8)}
    padding = {row["contender"]: row["padding_share"] for row in result["summary"] if row["rows"] == 1}
    assert padding["one_forward"] == 0
    assert padding["pytriton_padded"] > padding["pytriton_stripped"] > padding["ours"]
    assert all(sample["server_cpu_s"] > 0 for sample in swept)
    assert "| ours " in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "report.md", "throughput.png", "servers"}
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
