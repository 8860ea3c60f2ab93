"""`python -m tools status` of runs that have not begun, are going on, and have problems."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_system import Checkpoints, FinishedRun, make_run

from python_backend.config import load_config
from python_backend.store.durable import write_json
from python_backend.store.heartbeat import Heartbeat
from python_backend.store.journal import Journal
from python_backend.store.run_lock import only_run
from python_backend.store.serving_records import ServingRecord
from tools import status, weights
from tools.report.display import RunDisplay
from tools.server.log import readable


def lines_of(config: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert status.main(["--config", str(config)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_that_has_not_begun(tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, checkpoints)
    assert lines_of(run.path, capsys) == [
        f"run       test in {tmp_path}: not running; no step has ended",
        f"server    http://{run.config.server.http_url} does not answer",
        "actor     no step has ended",
        "sidecar   has not begun; 0 of the journal's entries pending, last step 0",
        "critic    no version yet",
    ]


def test_a_run_whose_server_is_up(finished: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run, config = finished.run, finished.run.config
    lines = lines_of(run.path, capsys)
    assert lines[1] == f"server    http://{run.url} is up"
    last = json.loads((config.run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert [line.split(":")[0].strip() for line in lines[2:4]] == ["reward", "critic"]
    lines = lines[4:]
    assert lines[0].startswith(f"actor     step {last['step']} of 3 ended ")
    assert f"reward {last['train_rollouts/rewards']:.3g}, KL " in lines[0]
    reported = re.search(r"; 0 of the journal's entries pending, last step (\d+)$", lines[1])
    assert reported is not None
    assert int(reported[1]) >= 3  # more if other tests trained the critic of this run
    current = run.store.current()
    assert current is not None
    assert lines[2] == f"critic    CURRENT is version {current} (step {run.store.manifest(current).step})"
    assert any(f"serves version {current}" in line for line in lines[3:])


def test_an_instance_of_another_host_that_is_silent_is_marked(
    finished: FinishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    records, current = finished.run.store.records, finished.run.store.current()
    elsewhere = ServingRecord.of_this_process("critic_9", current)
    silent = dataclasses.replace(elsewhere, place="cafe0123", host="far")
    records.put(silent)
    hours_ago = time.time() - 3 * 3600
    os.utime(finished.run.store.root / "serving" / silent.file_name, (hours_ago, hours_ago))
    try:
        (line,) = [line for line in lines_of(finished.run.path, capsys) if "critic_9" in line]
        assert line.strip() == f"{silent.name} serves version {current}; last sign of life 3 h ago"
        weights.show(finished.run.store)
        assert f"{silent.name} (silent)" in capsys.readouterr().out
    finally:
        records.withdraw(silent)


def test_what_blocks_a_sidecar_and_what_a_log_complains_of(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, checkpoints)
    folders = run.config.run
    folders.journal_dir.mkdir(parents=True)
    beat = Heartbeat(1, 7, 0, "publishing", time.time() - 300)
    journal = Journal(folders.journal_dir, folders.identity)
    journal.beat(dataclasses.replace(beat, trouble="No space left on device"))
    folders.logs_dir.mkdir()
    log = "10:00:00 WARNING the first\n10:00:01 ERROR the second\n10:00:02 INFO step 8\n"
    (folders.logs_dir / "actor.log").write_text(log)
    json_log = '{"level": "ERROR", "message": "no disk"}\n{"level": "INFO", "message": "step 7"}\n'
    (folders.logs_dir / "sidecar.log").write_text(json_log)
    (folders.dir / "metrics.jsonl").write_text('{"step": 8, "train_rollouts/rewards": 0.5}\n{"step": 9, "tra')
    lines = lines_of(run.path, capsys)
    assert lines[0].endswith(": not running; the next start begins with step 1")
    assert lines[2] == "actor     step 8 of 3 ended 0 s ago: reward 0.5"
    assert lines[3].startswith(
        "sidecar   publishing at step 7, heartbeat 5 min ago; 0 of the journal's entries pending"
    )
    assert lines[3].endswith("; blocked: No space left on device")
    assert lines[-2:] == [
        "problem   actor.log: 10:00:01 ERROR the second",
        "problem   sidecar.log: ERROR no disk",
    ]


def test_whether_a_run_goes_on(tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, checkpoints)

    def state() -> str:
        return lines_of(run.path, capsys)[0].partition(": ")[2]

    (tmp_path / "metrics.jsonl").write_text('{"step": 8}\n')
    with only_run(tmp_path), RunDisplay(tmp_path, 8) as display:
        display.phase("choosing serving settings")
        capsys.readouterr()
        assert state() == "running: choosing serving settings"
    (tmp_path / "checkpoints" / "actor" / "6").mkdir(parents=True)
    assert state() == "not running; the next start begins with step 7", "it was killed"
    (tmp_path / "actor_summary.json").write_text('{"steps": 8}')
    assert state() == "finished after step 8"


def test_the_settings_are_those_that_the_run_was_started_with(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, checkpoints)
    settings = ["actor.steps=77", "reward.token_budget=512", "reward.workers=2", "reward.threads=3"]
    write_json(tmp_path / "settings.json", load_config(run.path, settings).model_dump(mode="json"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 8}\n')
    text = "\n".join(lines_of(run.path, capsys))
    assert "step 8 of 77 ended" in text
    assert "reward: 2 workers x 3 threads, token budget 512" in text


def test_a_collector_that_is_away_is_no_problem_of_the_run(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, checkpoints)
    run.config.run.logs_dir.mkdir()
    line = "[Error] File: otlp_http_exporter.cc:122 [OTLP HTTP Client] ERROR: Export 512 trace span(s) error: 1"
    (run.config.run.logs_dir / "tritonserver.log").write_text(f"{line}\n")
    assert not any(line.startswith("problem") for line in lines_of(run.path, capsys))
    assert readable(line.encode()) is None, "nor is it shown in the terminal"


@pytest.mark.parametrize("pause", ["-1", "0", "nan", "often"])
def test_a_pause_that_is_none(pause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status.main(["--config", "none.yaml", "--watch", pause])
    assert f"'{pause}' is not a positive number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # SIGINT is ignored in a background job
def test_watching_ends_with_a_signal(tmp_path: Path, checkpoints: Checkpoints, number: signal.Signals) -> None:
    run = make_run(tmp_path, checkpoints)
    command = [sys.executable, "-m", "tools", "status", "--config", str(run.path), "--watch", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert [line for line, _ in zip(watching.stdout, range(12), strict=False)].count(
            "actor     no step has ended\n"
        ) > 1
        watching.send_signal(number)
        assert watching.communicate(timeout=60)[1] == ""
    assert watching.returncode == 0
