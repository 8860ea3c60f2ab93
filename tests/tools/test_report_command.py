"""`python -m tools report` on folders that the actor's recorder writes, while it writes them and afterwards."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_run import RecordedRun

from python_backend.store.run_lock import only_actor, only_run
from tools.report.command import main, short_names
from tools.report.curves import line_style
from tools.report.data import load_run

IMAGES = re.compile(r'src="[^"]*"')
REFRESH = '<meta http-equiv="refresh"'


def page_of(*run_dirs: Path, out: Path) -> str:
    """The page of these runs, without its pictures."""
    assert main([*map(str, run_dirs), "--out", str(out)]) == 0
    return IMAGES.sub("", out.read_text(encoding="utf-8"))


def grpo(folder: Path) -> Path:
    """A whole run with a reward function: no critic, no validation, no reference."""
    return RecordedRun(folder).start().steps(1, 2, 3, 4).finished(4)


def test_a_run_has_nothing_of_what_it_does_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = page_of(grpo(tmp_path / "run"), out=tmp_path / "page.html")
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    assert "After 4 steps of GRPO" in page
    assert "The mean training reward was 0.100 in the first step and 0.400 in the last." in page
    assert "<code>failed_requests</code>" in page
    assert page.count("<figure>") == 4
    assert not re.search(r"null|None|NaN|n/a|–|critic|version|reload|KL|held-out|server's|gold|stopped|progress", page)
    assert REFRESH not in page


def test_a_validated_run_without_a_critic(tmp_path: Path):
    run = RecordedRun(tmp_path / "run", validation_prompts="held.jsonl").start().validated("before", 0, -1.0)
    run_dir = run.steps(1, 2, 3, 4).validated("after", 4, 0.5).finished(4)
    page = page_of(run_dir, out=tmp_path / "page.html")
    assert "The reward rose by 1.500" in page
    assert "The KL divergence from the initial policy is 0.25 nats" in page
    assert "Texts before and after" in page
    assert not re.search(r"null|NaN|critic|explain|gold", page)


def test_a_run_before_its_first_step(tmp_path: Path):
    RecordedRun(tmp_path / "run").start()
    with only_run(tmp_path / "run"):
        page = page_of(tmp_path / "run", out=tmp_path / "page.html")
    assert "In progress: no step has ended." in page
    assert "<figure>" not in page
    assert "<h2>Numbers" not in page
    assert "<code>actor.steps</code></td><td>4<" in page


def test_one_step_is_no_curve(tmp_path: Path):
    run_dir = RecordedRun(tmp_path / "run", steps=1).start().steps(1).finished(1)
    page = page_of(run_dir, out=tmp_path / "page.html")
    assert "After 1 step of GRPO" in page
    assert re.findall('<figure><img alt="([^"]*)"', page) == ["The mean reward per batch."]


def test_a_run_in_progress_and_after_a_crash_within_a_line(tmp_path: Path):
    run_dir = tmp_path / "run"
    run = RecordedRun(run_dir, validation_prompts="held.jsonl", validation_every=2).start().validated("before", 0, 0.0)
    run.steps(1, 2).validated("between", 2, 0.7)
    with only_actor(run_dir):
        page = page_of(run_dir, out=tmp_path / "page.html")
        assert "In progress: step 2 of 4 has ended." in page
        assert REFRESH not in page, "without --follow it does not change"
    for name in ("metrics.jsonl", "rollouts.jsonl", "validations.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 3, "prom')
    page = page_of(run_dir, out=tmp_path / "page.html")
    assert "The run stopped before its end: step 2 of 4 has ended." in page
    assert "The mean training reward was 0.100 in the first step and 0.200 in the last." in page
    assert "Texts before and after" not in page, "there are none from after"
    assert [row["reward"] for row in load_run(run_dir).validations] == [0.0, pytest.approx(0.7)]


def test_a_resumed_run_does_not_show_the_summary_of_its_first_part(tmp_path: Path):
    run_dir = grpo(tmp_path / "run")
    (run_dir / "summary.json").write_text(json.dumps({"steps": 4, "seconds_total": 77.0}))
    assert load_run(run_dir).summary["seconds_total"] == 77.0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**rows[-1], "step": 5}) + "\n")
    run = load_run(run_dir)
    assert (run.is_finished, run.summary["steps"], "seconds_total" in run.summary) == (False, 5, False)


def test_runs_side_by_side(tmp_path: Path):
    first = grpo(tmp_path / "a" / "run")
    other = RecordedRun(tmp_path / "b" / "run", algorithm_name="rloo", lr=1e-6, validation_prompts="held.jsonl").start()
    other.validated("before", 0, 0.0).steps(1, 2)
    assert main([str(first), str(other.config.run.dir)]) == 0
    page = IMAGES.sub("", (first / "comparison.html").read_text())
    header = re.search(r"<tr><th></th>(.*?)</tr>", page)
    assert header is not None
    assert re.findall(r"</i>([^<]*)</th>", header[1]) == ["a/run", "b/run"]
    rows = {key: re.findall(r"<td class=\w>([^<]*)</td>", cells) for key, cells in ROW.findall(page)}
    assert rows["actor.algorithm.name"] == ["grpo", "rloo"]
    assert rows["actor.optimizer.lr"] == ["9e-07", "1e-06"]
    assert rows["actor.validation.prompts"] == ["–", "held.jsonl"]
    assert rows["steps"] == ["4", "2"]
    assert rows["reward in training, last tenth"] == ["0.400", "0.200"]
    assert not {"actor.steps", "run.dir", "kl_final", "ev_v0", "gold_before", "top_word"} & rows.keys()
    assert not any(key.startswith(("critic.", "trainer.", "KL", "reload")) for key in rows)
    assert "The run stopped before its end: step 2 of 4 has ended." in page
    assert [page.count(f"border-top-color:{line_style(i)[0]}") for i in range(3)] == [3, 3, 0]
    assert "Critic" not in page
    assert re.findall('<figure><img alt="([^"]*)"', page)[1] == "Mean reward of each validation."


ROW = re.compile(r"<tr><td[^>]*><code>([^<]*)</code></td>(.*?)</tr>")


def test_a_run_named_twice_is_one_run(tmp_path: Path):
    run_dir = grpo(tmp_path / "run")
    assert main([str(run_dir), f"{run_dir}/../run"]) == 0
    assert "After 4 steps of GRPO" in (run_dir / "report.html").read_text()


def test_names_are_as_short_as_they_can_be(tmp_path: Path):
    assert short_names([tmp_path / "x/one", tmp_path / "x/two"]) == ["one", "two"]
    assert short_names([tmp_path / "x/a/run", tmp_path / "y/a/run"]) == ["x/a/run", "y/a/run"]
    assert len({line_style(i) for i in range(24)}) == 24


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["of the run", signal.SIGINT, signal.SIGTERM])
def test_the_page_follows_a_run_to_its_end(tmp_path: Path, end: str | signal.Signals):
    run = RecordedRun(tmp_path / "run").start().steps(1)
    page = tmp_path / "run" / "report.html"
    command = [sys.executable, "-m", "tools", "report", str(tmp_path / "run"), "--follow", "--every", "0.1"]
    with only_actor(tmp_path / "run"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(page.exists, process)
            assert REFRESH in page.read_text()
            assert "In progress: step 1 of 4 has ended." in page.read_text()
            run.steps(2)
            wait_for(lambda: "step 2 of 4" in page.read_text(), process)
            assert REFRESH in page.read_text()
            if isinstance(end, signal.Signals):
                process.send_signal(end)
                process.wait(120)
            else:
                run.steps(3, 4).finished(4)
        except BaseException:
            process.kill()
            raise
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, f"report: {page}\n", "")
    assert REFRESH not in page.read_text()
    assert ("After 4 steps" in page.read_text()) == (end == "of the run")
    assert list(page.parent.glob(".*")) == []


def test_a_run_that_has_ended_is_not_waited_for(tmp_path: Path):
    assert main([str(grpo(tmp_path / "run")), "--follow"]) == 0
    assert REFRESH not in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{}/none"], "{}/none is missing: name the folder of a run"),
        (["{}/file"], "{}/file is not a folder: name the folder of a run"),
        (["{}/run", "{}/empty"], "{}/empty is no run: it has neither settings.json nor metrics.jsonl"),
        (["{}/run", "--out", "{}/none/page.html"], "{}/none/page.html cannot be written: No such file or directory"),
        (["{}/run", "--out", "{}/empty"], "{}/empty cannot be written: Is a directory"),
        (["{}/damaged"], "the run in {}/damaged cannot be read: {}/damaged/metrics.jsonl line 1 is not JSON: "),
        (["{}/unset"], "the run in {}/unset cannot be read: {}/unset/settings.json is not JSON: "),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
):
    RecordedRun(tmp_path / "run").start().steps(1)
    for name in ("empty", "damaged", "unset"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step"\n{"step": 2}\n')
    (tmp_path / "unset" / "settings.json").write_text("{")
    assert main([argument.replace("{}", str(tmp_path)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence.replace('{}', str(tmp_path))}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("every", ["0", "-1", "nan", "soon"])
def test_a_pause_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], every: str):
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "--follow", "--every", every])
    assert stopped.value.code == 2
    assert f"argument --every: {every!r} is not a positive number of seconds" in capsys.readouterr().err


def test_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run_dir = grpo(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(run_dir)]) == 2
    assert capsys.readouterr().err == "error: the report needs matplotlib: pip install '.[training]'\n"
