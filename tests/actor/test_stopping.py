"""`actor.run.stopping`: signals as processes see them, and a run that leaves in the middle of each phase of a step."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import Checkpoints, make_run, validations_of

from actor.loop import PPORun
from actor.policy.checkpoint import saved_steps
from actor.run.stopping import Stop, Stopped
from python_backend.checkpoints.tokenization import fingerprint
from python_backend.client.client import TrainAnswer
from python_backend.client.retry import RequestCounters
from python_backend.client.served import ServedModel
from python_backend.store.durable import read_json
from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import sha256_of
from python_backend.wire.contract import REWARDS, VALUES, WEIGHTS_VERSION

PATIENCE_S = 120.0
STEPS = 3

# ---- signals ----

PROGRAM = """
import asyncio, logging, sys
from actor.run.stopping import (Stop, Stopped, stop_on_signals)

async def main():
    stop = Stop()
    stop_on_signals(stop, float(sys.argv[1]))
    print("ready", flush=True)
    try:
        await stop.or_done(asyncio.sleep(600))
    except Stopped:
        print("leaving", flush=True)
    if sys.argv[2] == "hang":
        stop.saved = lambda: int(sys.argv[3])
        await asyncio.sleep(600)

logging.basicConfig()
asyncio.run(main())
"""


@pytest.fixture
def start() -> Any:
    started = []

    def begin(grace_s: float, then: str, saved: int = 0, program: str = PROGRAM) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(grace_s), then, str(saved)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(start: Callable[..., Any], number: signal.Signals):
    process = start(600, "leave")
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE_S)[0] == "leaving\n"
    assert process.returncode == 0
    process = start(600, "hang")
    process.send_signal(number)
    assert process.stdout.readline() == "leaving\n"
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == -number


def test_a_signal_that_does_not_interrupt_the_wait_ends_it(start: Callable[..., Any]):
    """It came just before the event loop began to wait; here: another thread of the process takes it."""
    elsewhere = """
import os, signal, sys, threading
def send():
    sys.stdin.readline()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=send).start()
"""
    process = start(600, "leave", program=elsewhere + PROGRAM)
    assert process.communicate("go\n", timeout=PATIENCE_S)[0] == "leaving\n"


def test_the_grace_is_bounded(start: Callable[..., Any]):
    process = start(0.1, "hang", 7)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "stopped after step 7, whose checkpoint is written: actor.stop_grace_s (0.1 s) expired; the next" in errors


def test_work_that_is_done_first_has_a_result_and_other_work_is_cancelled():
    async def main() -> None:
        stop, works = Stop(), [asyncio.ensure_future(asyncio.sleep(600)) for _ in range(2)]
        assert await stop.or_done(asyncio.sleep(0, "result")) == "result"
        waiting = asyncio.ensure_future(stop.or_done(works[0]))
        await asyncio.sleep(0)
        waiting.cancel()  # by somebody else
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stop.request()
        with pytest.raises(Stopped):
            await stop.or_done(works[1])
        assert all(work.cancelled() for work in works)

    asyncio.run(main())


# ---- a run ----


class Server:
    """Rewards that depend on the tokens alone; the real one is in test_deterministic."""

    def __init__(self) -> None:
        self.counters = RequestCounters()
        self.tokenizer: Any = None
        self.payloads: list[dict[str, np.ndarray]] = []  # of the critic

    async def describe(self, _: str) -> ServedModel:
        return ServedModel.of({"tokenizer_fingerprint": fingerprint(self.tokenizer)})

    async def rewards(self, rows: list[np.ndarray], *_: object, **__: object) -> dict[str, np.ndarray]:
        return {REWARDS: np.asarray([[float(row.sum() % 7)] for row in rows], np.float32)}

    async def score(self, rows: list[np.ndarray], *_: object, **__: object) -> dict[str, np.ndarray]:
        values = np.zeros((len(rows), max(map(len, rows))), np.float32)
        return {**await self.rewards(rows), VALUES: values, WEIGHTS_VERSION: np.zeros((len(rows), 1), np.int64)}

    async def train(self, payload: dict[str, np.ndarray], *, run_id: str, step: int) -> TrainAnswer:
        self.payloads.append(payload)
        return TrainAnswer(0.0, step)

    async def save(self, **_: object) -> int:
        return 0

    rewind = save


def make_ppo(folder: Path, checkpoints: Checkpoints, **settings: Any) -> PPORun:
    """Groups and adapters: everything that a checkpoint holds, but for a critic."""
    actor = {
        "algorithm_name": "grpo",
        "responses_per_prompt": 2,
        "lora_rank": 2,
        "lora_dropout": 0.1,
        "warmup_steps": 5,
        "min_lr": 1e-4,
        "steps": STEPS,
        "checkpoint_every": 100,
        "validation_size": 2,
        "validation_every": 2,
        "lr": 1e-2,
        **settings,
    }
    server = Server()
    run = PPORun(make_run(folder, checkpoints, actor=actor).config, server)  # type: ignore[arg-type]
    server.tokenizer = run.policy.tokenizer
    return run


def go(run: PPORun) -> Any:
    return asyncio.run(asyncio.wait_for(run.run(), PATIENCE_S))


def ends(folder: Path) -> list[Any]:
    """What the end of a run leaves, but for times."""
    checkpoint = folder / "checkpoints" / "actor" / str(STEPS)
    lines = [
        {name: value for name, value in line.items() if name.startswith(("step", "train_"))}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    hashes = [sha256_of(checkpoint / f"{name}.safetensors") for name in ("adapters", "optimizer")]
    return [*hashes, lines, *validations_of(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> list[Any]:
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole")
    go(make_ppo(folder, checkpoints))
    *_, best, _ = ends(folder)
    assert best["step"] == 2, "a validation that a stop can interrupt"
    return ends(folder)


class Crash(Exception):
    """Ends a run where it is, without `leave`."""


def go_until(run: PPORun, owner: Any, name: str, call: int, *, crash: bool = False) -> str:
    """Run until `owner.name` is called for the `call`-th time, or entered, and ask to stop then; what the run says."""
    original, calls, asked = getattr(owner, name), [], threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def ask() -> None:
            run.stop.request()
            asked.set()

        def hold() -> None:
            calls.append(None)
            if len(calls) == call:
                if crash:
                    raise Crash("crashed")
                loop.call_soon_threadsafe(ask)
                assert asked.wait(PATIENCE_S)

        def watched(*args: Any, **kwargs: Any) -> Any:
            hold()
            return original(*args, **kwargs)

        @contextlib.contextmanager
        def watched_context() -> Iterator[None]:
            with original():
                hold()
                time.sleep(1.0)  # long enough for a checkpoint that does not wait
                yield

        setattr(owner, name, watched_context if name == "disable_adapter" else watched)
        await asyncio.wait_for(run.run(), PATIENCE_S)

    with pytest.raises(Crash if crash else Stopped) as ended:
        asyncio.run(main())
    return str(ended.value)


@pytest.mark.parametrize(
    ("phase", "call", "done"),
    [
        ("generate", 1, 0),  # the validation before the first step
        ("reference", 3, 1),  # the adapters are switched off meanwhile
        ("update", 2, 2),
        ("generate", 4, 2),  # the validation after step 2
    ],
)
def test_a_stopped_run_goes_on_after_the_last_whole_step(
    tmp_path: Path, checkpoints: Checkpoints, whole: list[Any], phase: str, call: int, done: int
):
    run = make_ppo(tmp_path, checkpoints)
    owner, name = {
        "generate": (run.policy, "generate"),
        "reference": (run.policy.sampler, "disable_adapter"),
        "update": (run.policy_update, "run"),
    }[phase]
    message = go_until(run, owner, name, call)
    assert message == "stopped " + (
        f"after step {done}, whose checkpoint is written; the next start resumes from the newest checkpoint"
        if done
        else "before the first step ended; the next start begins at step 1"
    )
    assert saved_steps(tmp_path / "checkpoints" / "actor") == ([done] if done else [])
    assert read_json(tmp_path / "policy" / "policy.json") == ({"step": done} if done else None)
    assert run.stop.saved() == done  # so that the end of the grace can say so
    go(make_ppo(tmp_path, checkpoints))
    assert ends(tmp_path) == whole


def test_a_stop_is_heard_while_the_last_update_of_the_critic_is_awaited(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    run = make_ppo(tmp_path, checkpoints)
    awaited: list[int] = []

    async def served(step: int) -> None:
        awaited.append(step)
        if awaited.count(STEPS) == 1:  # the server is away
            run.stop.request()
            await asyncio.sleep(600)

    monkeypatch.setattr(run.critic, "served", served)
    with pytest.raises(Stopped, match=f"after step {STEPS}, whose checkpoint is written"):
        go(run)


def test_a_validation_that_a_crash_interrupted_is_repeated(tmp_path: Path, checkpoints: Checkpoints, whole: list[Any]):
    """While it writes `best/`; then a stop in the repeated one."""
    run = make_ppo(tmp_path, checkpoints, checkpoint_every=2)
    go_until(run, run.policy, "save", 2, crash=True)
    again = make_ppo(tmp_path, checkpoints, checkpoint_every=2)
    go_until(again, again.policy, "generate", 1)
    go(make_ppo(tmp_path, checkpoints, checkpoint_every=2))
    assert ends(tmp_path) == whole


PPO = {"algorithm_name": "ppo", "responses_per_prompt": 1}


def test_the_kl_coefficient_adapts_once_the_policy_trains(tmp_path: Path, checkpoints: Checkpoints):
    """Not while only the critic does, when the KL is 0 whatever the coefficient."""
    settings = {**PPO, "critic_warmup_steps": 1, "warmup_steps": 0, "kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 100}
    go(make_ppo(tmp_path, checkpoints, **settings))
    coefs = [line["train_rollouts/kl_coef"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert coefs[0] == coefs[1] == 0.1 > coefs[2]


def test_a_stop_while_the_critic_goes_back_names_the_checkpoint(tmp_path: Path, checkpoints: Checkpoints):
    """Nothing is done yet in this start, but the next one does not begin at step 1."""
    settings = {**PPO, "checkpoint_every": 2}
    run = make_ppo(tmp_path, checkpoints, **settings)
    go_until(run, run.policy, "generate", 4)
    again = make_ppo(tmp_path, checkpoints, **settings)

    async def rewind(**_: object) -> None:
        again.stop.request()
        await asyncio.Event().wait()

    again.recorder._client.rewind = rewind  # type: ignore[method-assign, assignment]
    with pytest.raises(Stopped, match=r"^stopped before it had resumed; the next start resumes from the newest checkp"):
        go(again)


def test_an_abandoned_rollout_ends_at_its_next_forward(tmp_path: Path, checkpoints: Checkpoints):
    """Not with the response: nothing computes any more when the run has left."""
    run = make_ppo(tmp_path, checkpoints, one_step_off_policy=True)
    forwards: list[None] = []
    run.policy.sampler.get_input_embeddings().register_forward_hook(lambda *_: forwards.append(None))
    go_until(run, run.policy, "generate", 2)
    counted = len(forwards)
    with pytest.raises(asyncio.CancelledError):
        run.policy.sampler(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert len(forwards) == counted


def test_a_validation_that_waits_for_the_next_rollout_is_abandoned_with_it(tmp_path: Path, checkpoints: Checkpoints):
    """The rollout may take longer than the grace, which would end the run without its checkpoint."""
    run = make_ppo(tmp_path, checkpoints, one_step_off_policy=True, validation_every=1)
    generate, validate, leave = run.policy.generate, run.validate, run.leave
    calls: list[None] = []
    validating, leaving, left_in_time = threading.Event(), threading.Event(), []

    def slow_generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:  # after those of the first validation and of step 1: it is step 2's
            assert validating.wait(PATIENCE_S)
            left_in_time.append(leaving.wait(5.0))
        return generate(*args, **kwargs)

    async def watched_validate(when: str) -> None:
        if run.done:
            asyncio.get_running_loop().call_soon(run.stop.request)
            validating.set()
        await validate(when)

    async def watched_leave() -> None:
        leaving.set()
        await leave()

    run.policy.generate, run.validate, run.leave = slow_generate, watched_validate, watched_leave  # type: ignore
    with pytest.raises(Stopped, match="after step 1"):
        go(run)
    assert left_in_time == [True]
