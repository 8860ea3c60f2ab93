"""Statistics of the benchmarks on samples made by hand: medians, matched ratios, targets, tables. Nothing is timed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command import BENCHMARKS, main, markdown, parse_arguments, targets_table
from benchmarks.scoring.sweep import summarise, targets
from benchmarks.step import phases
from benchmarks.support.benchmark import Target
from benchmarks.support.samples import pairs, ratio
from benchmarks.update import make_payload, padded_payload


def sample(contender: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """1000 tokens in 10 rows, one row a request, by the 7 M model at concurrency 64."""
    row = {
        "contender": contender,
        "model": "7m",
        "rows": 1,
        "concurrency": 64,
        "round": 1,
        "purpose": "sweep",
        "split": "2x1",
        "seconds": seconds,
        "sequences": 10,
        "tokens": 1000,
        "p50_ms": 100.0,
        "p99_ms": 200.0,
        "cpu_s": 3.0,
    }
    return {**row, **changes}


def in_rounds(contender: str, *seconds: float, **changes: Any) -> list[dict[str, Any]]:
    """One sample per round."""
    return [sample(contender, s, round=i, **changes) for i, s in enumerate(seconds, 1)]


def result_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"samples": samples}


def target(samples: list[dict[str, Any]], words: str) -> Target:
    result = result_of(samples)
    (found,) = [target for target in targets(result | {"summary": summarise(result)}) if words in target.name]
    return found


def test_ratios_are_of_matched_rounds():
    """The machine was slow in round 2 for both: the median of ratios is 2, the ratio of medians would be 1.5."""
    samples = [*in_rounds("ours", 1.0, 8.0, 2.0), *in_rounds("one_forward", 2.0, 16.0, 3.0)]
    assert ratio(samples, "one_forward", "ours", "seconds") == 2.0
    assert ratio(samples, "ours", "one_forward", "seconds") == 0.5


def test_rounds_that_one_of_them_lacks_do_not_count():
    samples = [*in_rounds("ours", 1.0, 1.0), sample("one_forward", 3.0, round=2)]
    assert [(a["seconds"], b["seconds"]) for a, b in pairs(samples, "ours", "one_forward")] == [(1.0, 3.0)]
    assert ratio(samples, "ours", "ideal", "seconds") is None


@pytest.mark.parametrize(("seconds", "verdict"), [(3.2, "miss"), (3.4, "pass")])
def test_ratio_bar(seconds: float, verdict: str):
    found = target([*in_rounds("ours", 1, 1, 1), *in_rounds("pytriton_padded", *[seconds] * 3)], "pytriton_padded")
    assert found.value == pytest.approx(seconds)
    assert found.verdict == verdict
    assert found.detail == "median of 3 matched rounds"


def test_what_was_not_measured_is_neither_pass_nor_miss():
    assert {found.verdict for found in targets({"samples": [], "summary": []})} == {"not measured"}


def test_never_slower_names_the_worst_point_and_leaves_out_ideal_and_low_concurrency():
    samples = [
        *in_rounds("ours", 1.0),
        *in_rounds("one_forward", 1.5),
        *in_rounds("ideal", 0.5),
        *in_rounds("ours", 1.0, concurrency=4),
        *in_rounds("one_forward", 0.1, concurrency=4),
        *in_rounds("ours", 1.0, concurrency=8),
        *in_rounds("one_forward", 0.8, concurrency=8),
    ]
    found = target(samples, "any other server")
    assert found.value == pytest.approx(0.8)
    assert found.verdict == "miss"
    assert found.detail == "worst at 7m, 1 x 8 against one_forward"


@pytest.mark.parametrize(("ours_ms", "verdict"), [(13.9, "pass"), (14.1, "miss")])
def test_latency_alone_may_exceed_theirs_by_delay_and_margin(ours_ms: float, verdict: str):
    samples = [sample("ours", 1, concurrency=1, p50_ms=ours_ms), sample("one_forward", 1, concurrency=1, p50_ms=10.0)]
    assert target(samples, "concurrency 1").verdict == verdict


def test_summary_and_tables():
    samples = [*in_rounds("ours", 1.0, 2.0, 3.0), *in_rounds("one_forward", 2.0, 4.0, 6.0, p50_ms=None)]
    ours, other = summarise(result_of(samples))
    assert ours["tokens_per_s"] == 500.0
    assert ours["sequences_per_s"] == 5.0
    assert ours["cpu_ms_per_token"] == 3.0
    assert (ours["rounds"], ours["ours_over_this"]) == (3, 1.0)
    assert (other["ours_over_this"], other["p50_ms"]) == (2.0, None)
    lines = markdown([ours, other]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "| ours " in lines[2]
    assert "–" in lines[3]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_the_parts_that_the_runner_calls(name: str, capsys: pytest.CaptureFixture[str]):
    benchmark = importlib.import_module(BENCHMARKS[name][0])
    assert all(callable(getattr(benchmark, part)) for part in ("measure", "summarise", "targets"))
    settings, quick = (parse_arguments(name, benchmark, ["--out", "x", *more]) for more in ([], ["--quick"]))
    assert set(benchmark.OPTIONS) < set(vars(settings))
    assert any(getattr(settings, key) != getattr(quick, key) for key in benchmark.OPTIONS)
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(name, benchmark, ["--help"])
    assert re.match(rf"usage: .* {name}\s", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["scoring", "--contenders", "ours,theirs"], "unknown 'theirs'; known: ideal, ours"),
        (["reload", "--parts", "a,z"], "unknown 'z'"),
        (["learning", "--algorithms", "ppo,trpo"], "unknown 'trpo'; known: ppo, reinforce++, rloo, grpo"),
    ],
)
def test_unknown_names_are_refused_before_anything_starts(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([*arguments, "--out", str(tmp_path / "out")])
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_targets_table_says_what_was_promised():
    found = [Target("a", 1.0, 0.9, 1.1, "x"), Target("b", None, 2.0), Target("c", 1234.5, None, 1.3), Target("d", 2.0)]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(targets_table(found)).splitlines()[2:]
    ]
    assert rows == [
        ["pass", "a", "0.9 to 1.1", "x", "1"],
        ["not measured", "b", ">= 2", "", "–"],
        ["miss", "c", "<= 1.3", "", "1,234"],
        ["no target", "d", "", "", "2"],
    ]


def test_a_step_is_compared_within_a_round() -> None:
    def block(mode: str, number: int, seconds: float, **lengths: float) -> dict[str, Any]:
        spans = [[name, 1.0, 1.0 + length] for name, length in lengths.items()]
        return {
            "mode": mode,
            "round": number,
            "steps": 2,
            "seconds": seconds,
            "cpu_seconds": 1.5 * seconds,
            "spans": spans,
        }

    own = {"generate": 4.0, "logprobs": 1.0, "init_logprobs": 1.0, "train_time": 2.0}
    samples = [block("serial", i, seconds, **own, scoring=2.0) for i, seconds in enumerate((10.0, 20.0, 10.0))]
    samples += [block("overlapped", i, seconds, generate=5.0) for i, seconds in enumerate((8.0, 12.0, 9.0))]
    overlapped, path, cores = phases.targets({"samples": samples})
    assert overlapped.value == 0.8  # the median of 0.8, 0.6 and 0.9, each of one round
    assert path.value == pytest.approx(4.0 / 5.0)  # scoring is not the actor's own, and a block has two steps
    assert cores.value == 0.75


def test_padding_lengthens_rows_and_trains_nothing() -> None:
    payload = make_payload(16)
    padded = padded_payload(payload)
    assert padded.mask.sum() == payload.mask.sum()
    assert padded.lengths.tolist() == [payload.lengths.max()] * 16
    assert padded.tokens.sum() == payload.tokens.sum()
