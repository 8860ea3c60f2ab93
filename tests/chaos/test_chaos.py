"""`python -m tools chaos`: its plan, its batches, its watching; and the short form of the crash test."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from chaos.command import _drive, main, summary
from chaos.killer import NOTHING, POINTS, VICTIMS, Points, plan_kills, stop_for, stop_for_good, ways_of
from chaos.system import write_config
from chaos.traffic import LONGEST, VOCAB_SIZE, Background, RequestRecord, Traffic, batch
from python_backend.client.errors import RequestFailed, RequestRefused
from python_backend.config import RunConfig, load_config
from python_backend.store.journal import Heartbeat, Journal
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import train_payload

LIMITS = Limits(VOCAB_SIZE, LONGEST)
SHORT_FORM_KILLS = 6


# ---- the plan ----


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_plan_meets_every_pair(seed: int):
    plan = plan_kills(42, seed)
    assert set(plan) == {(victim, point) for victim in VICTIMS for point in POINTS}


def test_each_of_several_ranks_is_a_victim(tmp_path: Path):
    victims = {*VICTIMS, "rank 0", "rank 1"}
    plan = plan_kills(56, 1, ranks=2)
    assert set(plan) == {(victim, point) for victim in victims for point in POINTS}
    config = load_config(write_config(tmp_path, 2))
    assert (config.trainer.ranks, config.critic.reload) == (2, "swap")
    assert 0 not in (config.server.http_port, config.server.grpc_port, config.server.metrics_port)


def test_a_short_plan_meets_every_victim_and_twenty_kills_every_moment():
    assert {victim for victim, _ in plan_kills(6, 1)} == set(VICTIMS)
    assert {point for _, point in plan_kills(20, 1)} == set(POINTS)


def test_some_are_stopped_instead_of_killed():
    assert ways_of(5, hung=False) == ["killed", "killed", "killed", "stopped", "killed"]
    assert ways_of(5, hung=True) == ["killed", "hung", "killed", "stopped", "killed"]


def test_a_stopped_process_goes_on_and_one_that_hangs_is_waited_for():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, enough = psutil.Process(child.pid), threading.Event()
    try:
        assert stop_for(process, 0.01, enough)
        assert process.status() != psutil.STATUS_STOPPED
        threading.Timer(0.2, child.kill).start()
        assert stop_for_good(process, enough)
        child.communicate()
        assert not stop_for(process, 0.01, enough)
    finally:
        child.kill()
        child.communicate()


# ---- the traffic ----


def test_a_batch_is_the_same_again_ragged_and_valid():
    payload, again, other = (train_payload(batch(3, step), LIMITS) for step in (7, 7, 8))
    assert payload.digest() == again.digest() != other.digest()
    assert len(set(payload.lengths.tolist())) > 1
    assert payload.mask.sum() == (payload.lengths - 1).sum()


def test_a_rewind_takes_back_the_answers_to_later_steps():
    record = RequestRecord(trained=[(1, 0.0, "a"), (2, 0.1, "b")], repeated=[(2, "b")], saved=[(1, 0.1, 1)])
    record.rewind(1, 3)
    assert (record.trained, record.repeated, record.saved) == ([(1, 0.0, "a")], [], [(1, 0.1, 1)])
    assert [(step, version) for step, _, version in record.rewound] == [(1, 3)]


def test_a_rewind_reaches_no_further_back_than_the_last_save_or_rewind():
    traffic = Traffic("127.0.0.1:1", "chaos", 1, lambda: lambda: None)
    assert [traffic.earliest_rewind(step) for step in (2, 14)] == [0, 11]
    traffic.record.saved.append((10, 0.1, 10))
    assert traffic.earliest_rewind(12) == 10
    traffic.record.rewind(11, 13)
    assert [traffic.earliest_rewind(step) for step in (13, 15)] == [11, 12]


def test_a_request_to_a_dead_process_is_repeated_and_one_that_is_refused_is_not():
    """Triton may answer either with status 400."""
    traffic = Traffic("127.0.0.1:1", "chaos", 1, lambda: lambda: None)

    def answers(*errors: type[RequestFailed]) -> Callable[[], Awaitable[str]]:
        waiting = [*errors]

        async def ask() -> str:
            if not waiting:
                return "done"
            error = waiting.pop()
            raise error("no", "why") if error is RequestRefused else error("no") from InferenceServerException(
                "no", "400"
            )

        return ask

    assert asyncio.run(traffic._until_answered("step 3", answers(RequestFailed))) == "done"
    assert not traffic.record.refusals
    assert asyncio.run(traffic._until_answered("step 3", answers(RequestRefused))) is None
    assert traffic.record.refusals == ["step 3: no"]


def test_a_writer_that_ends_before_the_kills_is_named():
    """With the request that was refused, as the verdicts then cover only a part of the plan."""
    system, enough = SimpleNamespace(troubles=[], look=lambda: None), threading.Event()
    traffic = SimpleNamespace(thread=Background("traffic", lambda: None), record=RequestRecord(refusals=["step 8: no"]))
    killer = SimpleNamespace(thread=Background("killer", lambda: killer.thread.given_up.wait()), done=[("a", "b")])
    _drive(system, traffic, killer, enough)  # type: ignore[arg-type]
    killer.thread.give_up()
    assert system.troubles == ["the writer ended after 1 kills: step 8: no"]


# ---- the moments ----


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig.model_validate({"run": {"dir": tmp_path / "run", "run_id": "chaos"}})
    for folder in ("journal/chaos/entries", "weights/critic", "checkpoints/critic"):
        (config.run.dir / folder).mkdir(parents=True)
    (tmp_path / "shm").mkdir()
    (config.run.weights_dir / "CURRENT").write_text("0\n")
    return config


def happen(config: RunConfig, point: str) -> str:
    """What the system does at that moment; what is seen of it."""
    folder = config.run.dir
    match point:
        case "journal write":
            (folder / "journal/chaos/entries/.00000001.train.ab.tmp").touch()
            return "new: .00000001.train.ab.tmp"
        case "training":
            (folder / "journal/chaos/entries/00000001.train").touch()
            return "new: 00000001.train"
        case "verify":
            (config.run.weights_dir / "1").mkdir()
            return "new: 1"
        case "CURRENT":
            (config.run.weights_dir / "next").write_text("1\n")
            (config.run.weights_dir / "next").replace(config.run.weights_dir / "CURRENT")
            return "replaced: CURRENT"
        case "reload":
            (folder.parent / "shm/ours-1").touch()
            return "new: ours-1"
        case "checkpoint":
            (folder / "checkpoints/critic/.staging-ab").mkdir()
            return "new: .staging-ab"
    Journal(config.run.journal_dir, "chaos").beat(Heartbeat(1, 0, 0, "idle", 4e9))
    return "heartbeat: idle"


def points_of(config: RunConfig) -> Points:
    (config.run.dir / "critic_metrics.jsonl").write_text(
        json.dumps({"train/step_time": 0.01}) + "\n" + json.dumps({"reason": "save", "reload_ms": 10.0}) + "\n"
    )
    return Points(config, config.run.dir.parent / "shm", "ours-", random.Random(0))


@pytest.mark.parametrize("point", POINTS)
def test_a_moment_is_seen(config: RunConfig, point: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    points, watches = points_of(config), threading.Event()
    observer = points._observer

    def observe(point: str) -> Callable[[], str | None]:
        look = observer(point)
        watches.set()
        return look

    monkeypatch.setattr(points, "_observer", observe)
    watcher = threading.Thread(target=lambda: seen.append(points.wait(point, 60.0, threading.Event())))
    watcher.start()
    assert watches.wait(60.0)
    assert not seen
    expected = happen(config, point)
    watcher.join()
    assert seen == [expected]


@pytest.mark.parametrize("point", POINTS)
def test_what_was_there_before_is_no_moment(config: RunConfig, point: str):
    happen(config, point)
    if point == "idle":
        Journal(config.run.journal_dir, "chaos").beat(Heartbeat(1, 0, 0, "idle", 1.0))
    assert points_of(config).wait(point, 0.05, threading.Event()) == NOTHING


# ---- the figures ----


def test_an_outage_is_a_span_without_any_answer():
    record = RequestRecord(
        latencies=[(1.0, 0.1), (0.5, 0.1), (4.0, 0.1), (4.5, 0.1)], failures=[(2.0, "scorer", "dead")]
    )
    kills = [{"time_s": 1.2, "hit": True}, {"time_s": 4.5, "hit": True}]
    record.trained.append((1, 2.0, "answer"))
    totals = summary(record, kills)
    assert [kill["trained_after_s"] for kill in kills] == [0.8, None]
    assert (totals["longest_outage_s"], totals["scoring_requests"], totals["scoring_requests_given_up"]) == (3.0, 4, 1)


# ---- the command ----


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "result.json").write_text("mine")
    assert main(["--kills", "1", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path} is not empty; name a new or empty folder\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_form(tmp_path: Path):
    """One kill of everything that can be killed, under load; every promise is checked by `tools chaos` itself."""
    out = tmp_path / "chaos"
    command = [sys.executable, "-m", "tools", "chaos", "--kills", str(SHORT_FORM_KILLS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert {kill["victim"] for kill in result["kills"]} == set(VICTIMS)
    assert [verdict["violations"] for verdict in result["verdicts"]] == [[]] * 9
