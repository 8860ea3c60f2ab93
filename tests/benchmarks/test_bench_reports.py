"""What the benchmarks make of samples made by hand: matched ratios, windows, targets and tables. Nothing is timed."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import reload, scoring, trl
from benchmarks.command import BENCHMARKS, main, markdown, parse_arguments, targets_table
from benchmarks.measurement import Sample, Target, pairs, ratio
from benchmarks.reload import Samples, quiet_windows


def one(targets: list[Target], words: str) -> Target:
    (found,) = [target for target in targets if words in target.name]
    return found


# ---- every benchmark ----


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


def test_unknown_names_are_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["scoring", "--contenders", "ours,theirs", "--out", str(tmp_path / "out")])
    assert "unknown 'theirs'; known: ideal, ours" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table_of_targets_has_verdicts_and_limits():
    found = [Target("a", 1.0, 0.9, 1.1, "x"), Target("b", None, 2.0), Target("c", 1234.5, None, 1.3), Target("d", 2.0)]
    lines = markdown(targets_table(found)).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["pass", "a", "0.9 to 1.1", "x", "1"],
        ["not measured", "b", ">= 2", "", "–"],
        ["miss", "c", "<= 1.3", "", "1,234"],
        ["no target", "d", "", "", "2"],
    ]


# ---- scoring ----


def in_rounds(contender: str, *seconds: float, **changes: Any) -> list[Sample]:
    """A sample per round: 1000 tokens in 10 rows, one row a request, by the 7 M model at concurrency 64."""
    row = {"contender": contender, "model": "7m", "rows": 1, "concurrency": 64, "purpose": "sweep", "split": "2x1"}
    row |= {"sequences": 10, "tokens": 1000, "p50_ms": 100.0, "p99_ms": 200.0, "cpu_s": 3.0, "difference": 1e-6}
    row |= changes
    return [{"round": i, "seconds": s, **row} for i, s in enumerate(seconds, 1)]


def scoring_target(samples: list[Sample], words: str) -> Target:
    result = {"samples": samples}
    return one(scoring.targets(result | {"summary": scoring.summarise(result)}), words)


def test_ratios_are_of_matched_rounds():
    """The machine was slow in round 2 for both: the median of ratios is 2, the ratio of medians would be 1.5."""
    samples = [*in_rounds("ours", 1.0, 8.0, 2.0), *in_rounds("one_forward", 2.0, 16.0, 3.0)]
    assert ratio(samples, "one_forward", "ours", "seconds") == 2.0
    assert ratio(samples, "ours", "ideal", "seconds") is None
    lacking = [*in_rounds("ours", 1.0, 1.0), *in_rounds("one_forward", 0.0, 3.0)[1:]]
    assert [(a["seconds"], b["seconds"]) for a, b in pairs(lacking, "ours", "one_forward")] == [(1.0, 3.0)]


def test_scoring_targets():
    padded = [*in_rounds("ours", 1, 1, 1), *in_rounds("pytriton_padded", 3.2, 3.4, 3.2)]
    found = scoring_target(padded, "pytriton_padded")
    assert (found.value, found.verdict) == (pytest.approx(3.2), "miss")
    assert found.detail == "median of 3 matched rounds"
    late = [*in_rounds("ours", 1, p99_ms=210.0), *in_rounds("vllm", 1.2)]
    assert (scoring_target(late, "7m: ours / vllm").verdict, scoring_target(late, "7m: p99").verdict) == (
        "pass",
        "miss",
    )
    assert {target.verdict for target in scoring.targets({"samples": [], "summary": []})} == {"not measured"}
    samples = [
        *in_rounds("ours", 1.0),
        *in_rounds("one_forward", 1.5),
        *in_rounds("ideal", 0.5),
        *in_rounds("ours", 1.0, concurrency=4),
        *in_rounds("one_forward", 0.1, concurrency=4),
        *in_rounds("ours", 1.0, concurrency=8),
        *in_rounds("one_forward", 0.8, concurrency=8),
    ]
    slower = scoring_target(samples, "any other server")  # neither `ideal` nor a low concurrency counts
    assert (slower.value, slower.detail) == (pytest.approx(0.8), "worst at 7m, 1 x 8 against one_forward")


@pytest.mark.parametrize(("ours_ms", "verdict"), [(13.9, "pass"), (14.1, "miss")])
def test_latency_of_one_request_may_exceed_theirs_by_delay_and_margin(ours_ms: float, verdict: str):
    samples = in_rounds("ours", 1, concurrency=1, p50_ms=ours_ms) + in_rounds(
        "one_forward", 1, concurrency=1, p50_ms=10
    )
    assert scoring_target(samples, "concurrency 1").verdict == verdict


def test_the_summary_has_medians_and_is_a_table():
    samples = [*in_rounds("ours", 1.0, 2.0, 3.0), *in_rounds("one_forward", 2.0, 4.0, 6.0, p50_ms=None)]
    ours, other = scoring.summarise({"samples": samples})
    assert (ours["tokens_per_s"], ours["sequences_per_s"], ours["cpu_ms_per_token"]) == (500.0, 5.0, 3.0)
    assert (ours["rounds"], other["ours_over_this"], other["p50_ms"]) == (3, 2.0, None)
    assert (ours["difference"], other["ours_p99_over_this"]) == (1e-6, 1.0)
    lines = markdown([ours, other]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "–" in lines[3]


def test_a_cell_lasts_as_long_as_asked_unless_that_is_too_long_for_all():
    settings = parse_arguments("scoring", scoring, ["--out", "unused", "--concurrency", "1,64"])

    def planned(*row_s: float) -> dict[tuple[int, int], int]:
        return {(cell.rows, cell.concurrency): cell.num_requests for cell in scoring.plan_cells(settings, row_s)}

    assert planned(0.01, 0.02) == {(1, 1): 100, (1, 64): 300, (8, 1): 13}  # the headline cell three times as long
    assert planned(0.01, 1.0)[1, 1] == 20  # 20 s for all contenders together
    assert planned(1.0, 1.0)[1, 64] == 64  # one request per worker


# ---- TRL ----


def test_trl_is_compared_within_a_round():
    def sample(contender: str, number: int, seconds: float, generate: float) -> Sample:
        cell = {"model": "tiny", "algorithm": "grpo", "rows": 16, "new_tokens": 8}
        found = {**cell, "contender": contender, "round": number, "seconds_per_step": seconds, "tokens": 128}
        usage = {"cpu_seconds_per_step": 2 * seconds, "peak_rss_mb": 100.0 + number}
        return {**found, **usage, "phases": {"generate": generate}}

    theirs = [sample("trl", i, seconds, 4.0) for i, seconds in enumerate((10.0, 20.0, 10.0))]
    samples = [*theirs, *(sample("ours", i, seconds, 2.0) for i, seconds in enumerate((7.5, 12.0, 6.9)))]
    of_trl, ours = trl.summarise({"samples": samples})
    assert (ours["seconds_per_step"], ours["peak_rss_mb"], of_trl["phases"]) == (7.5, 102.0, "generate 4.00")
    seconds, cpu = trl.targets({"samples": samples})
    assert seconds.value == pytest.approx(0.69)  # the median of 0.75, 0.6 and 0.69
    assert (seconds.name, seconds.verdict) == ("tiny grpo 16x8: ours / TRL, seconds", "pass")
    assert (cpu.value, cpu.verdict) == (pytest.approx(0.69), "no target")


# ---- reload ----


def ticking(begin: float, end: float, every_s: float, latency_ms: float = 5.0) -> dict[str, Any]:
    """A request begins every `every_s`."""
    starts = np.arange(begin, end, every_s).tolist()
    count = len(starts)
    return {"start_s": starts, "latency_ms": [latency_ms] * count, "version": [0] * count, "failures": []}


def test_windows_of_requests():
    samples = Samples.of({"start_s": [1.0, 1.1], "latency_ms": [500.0, 10.0], "version": [3, 4]})
    assert samples.end.tolist() == pytest.approx([1.11, 1.5])  # in the order of the answers
    assert samples.version.tolist() == [4, 3]
    latencies = {"start_s": [0.0, 1.0, 2.0, 3.0], "latency_ms": [500.0, 600.0, 700.0, 800.0], "version": [0] * 4}
    samples = Samples.of(latencies)
    assert samples.in_flight([(1.5, 2.1), (1.55, 2.5)]) == pytest.approx([600.0, 700.0])  # each once
    assert samples.in_flight([(0.6, 0.9)]).size == 0


def test_quiet_windows_lie_within_quiet_times_and_are_as_long():
    found = quiet_windows([(0.0, 0.5), (7.0, 7.25)], [(10.0, 10.3), (20.0, 22.0)])
    assert [end - begin for begin, end in found] == pytest.approx([0.5, 0.25])
    assert all(begin >= 20.0 and end <= 22.0 for begin, end in found)
    assert quiet_windows([(0.0, 3.0)], [(20.0, 22.0)]) == []


@pytest.mark.parametrize("failures", [(0, 0), (1, 0), (0, 1)])
def test_targets_under_load(failures: tuple[int, int]):
    """Ten seconds of quiet, five of swaps, ten of quiet, ten of two Triton reloads, twice as slow."""
    by_clients, by_server = failures
    pieces = ticking(0, 25, 0.01), ticking(25, 35, 0.01, latency_ms=10.0)
    samples = {key: [item for piece in pieces for item in piece[key]] for key in pieces[0]}
    samples["failures"] = [(1.0, "refused")] * by_clients
    blocks = [("quiet", 0, 10), ("swap", 10, 15), ("quiet", 15, 25), ("triton", 25, 35)]
    reloads = [{"reload": "swap", "begin_s": at, "end_s": at + 0.1} for at in (11, 12.45)]
    reloads += [{"reload": "triton", "begin_s": at, "end_s": at + 4.5} for at in (25.2, 30.2)]
    part = {
        "samples": samples,
        "reloads": reloads,
        "failed_by_server": by_server,
        "blocks": [{"kind": kind, "begin_s": begin, "end_s": end} for kind, begin, end in blocks],
    }
    found = reload.load_targets("1m", reload.summarise_load(part))
    assert one(found, "p99 during swaps").value == pytest.approx(1.0)
    assert one(found, "p99 during Triton").value == pytest.approx(2.0)
    missed = [target.name for target in found if target.verdict == "miss"]
    assert missed == (["a, 1m: failed requests"] if any(failures) else [])


def test_publishing_is_divided_by_the_sum_of_its_steps():
    swap = {
        "publish_ms": 30.0,
        "to_served_ms": 24.0,
        "reload_ms": 9.0,
        "hash_ms": 5.0,
        "load_ms": 10.0,
        "canary_ms": 5.0,
    }
    part = {"parameters": 1, "swaps": [swap] * 3}
    (found,) = reload.publish_targets("1m", reload.summarise_publish(part))
    assert (found.value, found.verdict) == (pytest.approx(1.2), "pass")
