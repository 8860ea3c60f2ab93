"""`python -m tools chaos --minutes`: its verdicts, and the short form of the soak test."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.command import main
from chaos.soak.verdict import (
    Ended,
    ProcessUsage,
    UsageSample,
    check_disk,
    check_processes,
    check_responses,
    check_survival,
    check_updates,
)
from python_backend.store.jsonl import write_jsonl

USAGE = ProcessUsage(pid=7, rss_mb=400.0, files=30, sockets=20, threads=9)
SAMPLE = UsageSample(0.0, 1, {"actor": USAGE}, 3.0, 4, 2, 900, 6, 40.0)


def calm(seconds: float, **last: Any) -> list[UsageSample]:
    """A sample each minute, with other values in the last quarter: of the actor's process, or of the whole sample."""
    own = {name: value for name, value in last.items() if name in ProcessUsage.__annotations__}
    rest = {name: value for name, value in last.items() if name not in own}
    changed = replace(SAMPLE, processes={"actor": replace(USAGE, **own)}, **rest)
    times = range(0, int(seconds) + 1, 60)
    return [replace(changed if t > seconds * 3 / 4 else SAMPLE, time_s=float(t)) for t in times]


def violations(samples: list[UsageSample]) -> list[str]:
    return [line for item in check_processes(samples) for line in item.violations]


# ---- growth ----


def test_what_is_flat_is_kept():
    assert violations(calm(1800)) == []
    assert check_disk(calm(1800)).kept


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"rss_mb": 450.0}, "actor had 400 MB, and 450 MB later"),
        ({"files": 40}, "actor had 30 files, and 40 later"),
        ({"threads": 20}, "actor had 9 threads, and 20 later"),
        ({"sockets": 500}, "actor had 500 sockets, expected at most 96"),
    ],
)
def test_what_grows_in_a_process_is_named(last: dict[str, Any], words: str):
    assert violations(calm(1800, **last)) == [words]


def test_caches_may_fill_in_a_short_test():
    assert violations(calm(240, rss_mb=450.0)) == []
    assert violations(calm(240, rss_mb=700.0)) == ["actor had 400 MB, and 700 MB later"]


def test_a_process_that_was_replaced_is_not_compared_with_its_predecessor():
    assert violations(calm(1800, rss_mb=900.0, pid=8)) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({"shared_memory_mb": 9.0}, "shared_memory_mb was 3, and 9 later"),
        ({"versions": 30}, "versions was 4, and 30 later"),
        ({"journal_entries": 100}, "journal_entries was 2, and 100 later"),
        ({"checkpoints": 20}, "checkpoints was 6, and 20 later"),
        ({"disk_mb": 80.0}, "disk_mb was 40, and 80 later"),
        ({"journal_results": 2000}, "the journal held 2000 results, expected at most 1100"),
    ],
)
def test_what_grows_on_disk_is_named(last: dict[str, Any], words: str):
    assert check_disk(calm(1800, **last)).violations == [words]


def test_nothing_measured_is_not_kept():
    assert not any(item.kept for item in [*check_processes([]), check_disk([])])


# ---- updates ----


def ended(step: int = 3, *, masked: int = 0, critic: int = 3, updates: int = 3, served: int = 3) -> Ended:
    return Ended({"step": step, "masked_samples": masked}, {"step": critic, "optimizer_step": updates}, served)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ended(), ""),
        (ended(critic=2), "the critic's checkpoint is of step 2, but the actor ended after step 3"),
        (ended(updates=4), "the number of the critic's optimizer steps is 4, but"),
        (ended(served=2), "the served version contains updates up to step 2, but"),
    ],
)
def test_each_step_trains_the_critic_once(tmp_path: Path, end: Ended, words: str):
    write_jsonl(tmp_path / "metrics.jsonl", ({"step": step} for step in (1, 2, 3)))
    write_jsonl(tmp_path / "critic.jsonl", [{"step": 1, "loss_mean": 0.5}])
    found = check_updates(end, tmp_path / "metrics.jsonl", tmp_path / "critic.jsonl").violations
    assert (words in " ".join(found)) if words else found == []


def test_steps_that_are_missing_or_failed_are_violations(tmp_path: Path):
    write_jsonl(tmp_path / "metrics.jsonl", ({"step": step} for step in (1, 3)))
    write_jsonl(tmp_path / "critic.jsonl", [{"step": 2, "error": "not finite"}])
    assert check_updates(ended(), tmp_path / "metrics.jsonl", tmp_path / "critic.jsonl").violations == [
        "metrics.jsonl has 2 steps from [1] to [3], expected 1 to 3",
        "step 2: not finite",
    ]


def test_masked_responses_and_processes_that_end_are_violations():
    assert check_responses(ended()).kept
    assert check_responses(ended(masked=2)).violations == ["2 responses were not scored"]
    kills = [{"victim": "actor", "until_s": 3.0}, {"victim": "critic", "until_s": None}]
    found = check_survival(kills, ["the actor ended"], ["shared memory x"]).violations
    assert found == ["no step within the time limit after the critic was killed", "the actor ended", "shared memory x"]


# ---- the command ----


def test_the_soak_test_takes_no_options_of_the_crash_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--minutes", "1", "--hung", "--out", str(tmp_path)])
    assert "--minutes takes no other arguments than --out and --seed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_soak(tmp_path: Path):
    """Three minutes of the whole loop, with kills; every promise is checked by `tools chaos` itself."""
    out = tmp_path / "soak"
    command = [sys.executable, "-m", "tools", "chaos", "--minutes", "3", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert result["kills"], done.stdout
    assert [verdict["violations"] for verdict in result["verdicts"]] == [[]] * 6
    assert (out / "soak.png").stat().st_size > 10_000
