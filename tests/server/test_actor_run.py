"""The actor against the real system: a whole short run, a missing server, a missing sidecar; and `tools run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from bare_client import Refused, ask
from live_system import (
    ENVIRONMENT,
    KEY,
    Checkpoints,
    FinishedRun,
    LiveRun,
    System,
    identity,
    make_run,
    run_actor,
    training_inputs,
    wait_for,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import CRITIC_TRAIN
from tools.report.data import load_run
from tools.report.page import write_page

# Reference section 7; entropy and clamped ratio are named as this project names them where they differ.
CHARTED = [
    "train_rollouts/rollout_size",
    "train_rollouts/response_lengths",
    "train_rollouts/prompt_lengths",
    "train_rollouts/generation_length",
    "train_rollouts/rewards",
    "train_rollouts/fraction_of_samples_properly_ended",
    "train_rollouts/init_policy_kl",
    "train_rollouts/rewards_with_kl",
    "train_rollouts/advantages_mean",
    "train_rollouts/advantages_std",
    "train_rollouts/returns_mean",
    "train_rollouts/returns_std",
    "train_rollouts/values_mean",
    "train_rollouts/values_std",
    "train_rollouts/consumed_samples",
    "train_optim/loss",
    "train_optim/ppo_ratio",
    "train_optim/ppo_ratio_clamped",
    "train_optim/grad_norm",
    "train_optim/lr",
    "train_optim/optim_step",
    "timers/rollout_time",
    "timers/generate",
    "timers/logprobs",
    "timers/init_logprobs",
    "timers/critic_wait",
    "timers/train_time",
]
SHARED_MEMORY = Path("/dev/shm")


# ---- three steps ----


def test_a_short_run_ends_well(finished: FinishedRun) -> None:
    assert finished.exit_code == 0, finished.actor_log
    folder = finished.run.config.run.dir
    summary = json.loads((folder / "actor_summary.json").read_text())
    assert summary["steps"] == summary["critic_updates"] == summary["weights_version"] == 3
    assert summary["failed_requests"] == summary["masked_samples"] == 0
    for name in ("reward_before", "reward_after", "kl_final", "ev_v0", "ev_last"):
        assert np.isfinite(summary[name]), name
    trained = [line["step"] for line in finished.run.critic_metrics() if "loss_mean" in line]
    assert trained[:3] == [1, 2, 3]


def test_a_short_run_writes_what_people_chart(finished: FinishedRun, tmp_path: Path) -> None:
    folder = finished.run.config.run.dir
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line[name]) for line in lines for name in CHARTED)
    assert [line["train_rollouts/consumed_samples"] for line in lines] == [8, 16, 24]
    assert list((folder / "tensorboard").glob("events.*"))
    texts = read_jsonl(folder / "rollouts.jsonl")
    assert [text["step"] for text in texts] == [1, 2, 3]
    assert all({"prompt", "response", "reward"} <= text.keys() for text in texts)
    phases = {line["phase"] for line in read_jsonl(folder / "timeline.jsonl")}
    assert {"generate", "scoring", "logprobs", "init_logprobs", "critic_update", "train_time"} <= phases
    samples = read_jsonl(folder / "samples.jsonl")
    before, after = ([line["prompt_id"] for line in samples if line["when"] == when] for when in ("before", "after"))
    assert (len(before), before) == (8, after)
    assert all({"prompt", "response"} <= line.keys() and isinstance(line["reward"], float) for line in samples)
    assert not (folder / "summary.json").exists()  # `tools run` writes it, which did not start this actor
    write_page([load_run(folder)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<p>After 3 steps of PPO, starting from policy, on " in page
    assert "On the same held-out rollouts critic version 3 explains" in page


def test_a_short_run_leaves_checkpoints_and_a_policy(finished: FinishedRun, checkpoints: Checkpoints) -> None:
    folder = finished.run.config.run.dir
    for step in (2, 3):  # checkpoint_every, and the last step
        assert json.loads((folder / "checkpoints" / "actor" / str(step) / "state.json").read_text())["step"] == step
        assert json.loads((folder / "checkpoints" / "critic" / str(step) / "state.json").read_text())["step"] == step
    trained = AutoModelForCausalLM.from_pretrained(folder / "policy")
    start = AutoModelForCausalLM.from_pretrained(checkpoints.policy)
    assert any(not a.equal(b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    text = "Return the number"
    ours, theirs = (AutoTokenizer.from_pretrained(path)(text) for path in (folder / "policy", checkpoints.policy))
    assert ours["input_ids"] == theirs["input_ids"]


# ---- what is missing ----


def actor_error(run: LiveRun, name: str, *overrides: str) -> str:
    """The one sentence with which the actor ends; its exit code is 2 and it shows no traceback."""
    code, log = run_actor(run, name, *overrides)
    assert code == 2
    assert "Traceback" not in log
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert log.rstrip().endswith(sentence)
    return sentence


@pytest.mark.slow
def test_no_sidecar(live: System) -> None:
    """The actor says so; what was accepted is trained once the sidecar is back, once."""
    live.stop_sidecar()
    step = live.run.next_step()
    arrays = {**training_inputs(seed=50), **identity("test", step)}
    with pytest.raises(Refused) as caught:
        ask(live.run.url, CRITIC_TRAIN, arrays, headers=KEY)
    assert caught.value.code == "503"
    print(caught.value.message)
    assert caught.value.message == (
        "no sidecar follows the journal: start `python -m trainer`; "
        f"step {step} of run 'test' is in the journal and will be processed: repeat the request to get its result"
    )
    live.start_sidecar()
    answer = ask(live.run.url, CRITIC_TRAIN, arrays, headers=KEY)
    assert live.run.store.manifest(int(answer["weights_version"][0])).step == step
    assert [line["step"] for line in live.run.critic_updates(up_to=step)].count(step) == 1

    live.stop_sidecar()
    sentence = actor_error(live.run, "actor", "actor.client.retries=1")
    assert "no sidecar follows the journal: start `python -m trainer`" in sentence
    assert f"the rewind after step {step} of run 'test' is in the journal and will be processed" in sentence
    live.start_sidecar()
    wait_for(lambda: not live.run.journal.entries(), live.sidecar)  # the requests of the new actor are done
    assert ask(live.run.url, CRITIC_TRAIN, {**arrays, **identity("test", 1)}, headers=KEY)["weights_version"][0] > 0


# ---- tools run ----


@pytest.fixture
def process(tmp_path: Path, checkpoints: Checkpoints) -> Iterator[subprocess.Popen[str]]:
    """`python -m tools run` with more steps than any test waits for, after its second step."""
    patient = {"retries": 8, "train_retries": 8, "backoff_s": 1.0}
    run = make_run(tmp_path / "run", checkpoints, actor={"steps": 5000, "checkpoint_every": 2500, "client": patient})
    command = [sys.executable, "-m", "tools", "run", "--config", str(run.path)]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env={**os.environ, **ENVIRONMENT}
        )
    try:
        wait_for_steps(tmp_path, process, 2)
        yield process
    finally:
        process.terminate()
        process.wait(120)


def children(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The processes of the run by their roles, once all are there; in the order in which they should end."""
    roles = {"actor": ["-m", "actor"], "sidecar": ["-m", "trainer"], "server": ["tritonserver"]}
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            line = " ".join(command)
            for role, words in roles.items():
                if " ".join(words) in line and "triton_python_backend_stub" not in line and "-c" not in command:
                    found[role] = child
    return {role: found[role] for role in roles}


def wait_for_steps(tmp_path: Path, process: subprocess.Popen[str], count: int) -> None:
    """Return after so many steps."""

    def stepped() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()[-3000:]
        return len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) >= count

    wait_for(stepped, timeout_s=240)


@pytest.mark.slow
def test_a_process_that_dies_stops_the_run_and_is_named(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    log = tmp_path / "run" / "logs" / "sidecar.log"
    wait_for(lambda: "weights_version=" in log.read_text(), timeout_s=60)  # it comes after the step's answer
    family = psutil.Process(process.pid).children(recursive=True)
    children(process)["sidecar"].send_signal(signal.SIGKILL)
    assert process.wait(120) == 2
    output = (tmp_path / "output").read_text()
    print(output[-2500:])
    died = "error: the critic sidecar was killed by SIGKILL, as the kernel does when memory runs out; its log is"
    assert f"{died} {log}\n" in output
    assert "weights_version=" in output.rpartition("ends with:\n")[2]
    assert "Traceback" not in output
    assert_nothing_is_left(process.pid, family)


@pytest.mark.slow
def test_a_run_outlasts_its_server_and_ctrl_c_stops_actor_with_a_checkpoint_then_sidecar_and_server(
    tmp_path: Path, process: subprocess.Popen[str]
) -> None:
    children(process)["server"].send_signal(signal.SIGKILL)
    wait_for(lambda: "serving again after" in (tmp_path / "output").read_text(), timeout_s=120)
    wait_for_steps(tmp_path, process, len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) + 3)
    family = psutil.Process(process.pid).children(recursive=True)
    roles = children(process)
    ended: list[str] = []
    process.send_signal(signal.SIGINT)

    def all_ended() -> bool:  # who ended between two looks did so in the order of `roles`, for all that can be seen
        ended.extend(role for role, child in roles.items() if role not in ended and not alive(child))
        return len(ended) == len(roles) and process.poll() is not None

    wait_for(all_ended, timeout_s=120)
    assert ended == ["actor", "sidecar", "server"]
    assert process.returncode == 130
    output = (tmp_path / "output").read_text()
    print(output[-1500:])
    log = (tmp_path / "run" / "logs" / "actor.log").read_text()
    assert "resumes from the newest checkpoint" in output
    assert "Traceback" not in output + log
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {last}, whose checkpoint is written" in log
    for room in ("actor", "critic"):  # before sidecar and server were stopped
        assert (tmp_path / "run" / "checkpoints" / room / str(last) / "state.json").is_file(), room
    assert_nothing_is_left(process.pid, family)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_is_left(pid: int, family: list[psutil.Process]) -> None:
    """Neither a process of the run nor a shared-memory region of its server."""
    assert not [process for process in family if alive(process)]
    assert not list(SHARED_MEMORY.glob(f"rlhf-{pid}-*"))
