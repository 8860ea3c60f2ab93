"""A real server and a real sidecar on a disk that fills up, and beside a server: values are served, nothing is lost."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from bare_client import Refused, ask
from live_system import (
    Checkpoints,
    LiveRun,
    System,
    identity,
    make_run,
    random_rows,
    scoring_inputs,
    start_system,
    training_inputs,
    wait_for,
)
from small_disk import small_disk

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.models.modeling import load_critic, save_critic
from python_backend.store.weights import sha256_of
from python_backend.wire.contract import CRITIC, CRITIC_TRAIN
from python_backend.wire.training_payload import train_payload
from trainer.critic_update import CriticUpdate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STEPS = 4


def step_inputs(step: int) -> dict[str, np.ndarray]:
    return {**training_inputs(seed=step), **identity("test", step)}


def train(run: LiveRun, step: int) -> int:
    """The version that serves `step`."""
    answer = ask(run.url, CRITIC_TRAIN, step_inputs(step), ("loss_mean", "weights_version"))
    return int(answer["weights_version"][0])


def refused(run: LiveRun, step: int) -> Refused:
    with pytest.raises(Refused) as caught:
        train(run, step)
    return caught.value


def train_in_the_end(run: LiveRun, step: int) -> int:
    """As `train`, asked until the sidecar has seen that there is space again: seconds pass between its attempts."""
    while True:
        try:
            return train(run, step)
        except Refused as cause:
            if "the sidecar cannot continue" not in cause.message:
                raise


def plain_digest(run: LiveRun, folder: Path) -> str:
    """sha256 of the weights that a plain loop makes of the same steps."""
    critic = load_critic(run.store.folder(0))
    update = CriticUpdate(critic, run.config.trainer)
    for step in range(1, NUM_STEPS + 1):
        update.train(train_payload(training_inputs(seed=step), critic.limits), lambda _: None)
    save_critic(critic, folder)
    return sha256_of(folder / WEIGHTS_FILE)


def ask_for_values(system: System, over: threading.Event, failures: list[Exception], served: list[int]) -> None:
    inputs = scoring_inputs(random_rows([9, 20], seed=1))
    while not over.wait(0.02):
        try:
            served.append(int(ask(system.run.url, CRITIC, inputs)["weights_version"][0, 0]))
        except Exception as error:  # thread edge: the test asserts that there was none
            failures.append(error)


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The weights lie on a disk of their own, which fills up first; everything else on another.

    Where the sidecar cannot write its heartbeat either, the server looks for itself.
    """
    with small_disk(tmp_path / "run", 64) as disk:
        run = make_run(disk.folder, checkpoints, trainer={"heartbeat_timeout_s": 4, "publish": {"keep": 50}})
        run.config.run.weights_dir.mkdir(parents=True)
        with small_disk(run.config.run.weights_dir, 4) as weights:
            system = start_system(run)
            over, failures, served = threading.Event(), [], []
            asking = threading.Thread(target=ask_for_values, args=(system, over, failures, served))
            try:
                asking.start()
                wait_for(lambda: bool(served), system.server, system.sidecar)
                assert train(run, 1) == 1
                weights.fill()
                cause = refused(run, 2)  # accepted; then publishing waits for space
                assert cause.code == "503"
                assert "the sidecar cannot continue (publishing step 2): [Errno 28] No space left" in cause.message
                assert "step 2 of run 'test' is in the journal and will be processed" in cause.message
                assert system.sidecar.poll() is None
                weights.empty()
                assert train_in_the_end(run, 2) == 2  # asked again, trained once
                disk.fill()
                cause = refused(run, 3)
                assert cause.code == "503"
                assert "the journal cannot be written: [Errno 28] No space left on device" in cause.message
                asked = len(served)
                wait_for(lambda: len(served) > asked + 5, system.server, system.sidecar)
                disk.empty()
                assert train(run, 3) == 3
                system.sidecar.process.send_signal(signal.SIGSTOP)  # held while the disk fills up: no heartbeat either
                payload = train_payload(training_inputs(seed=4), load_critic(run.store.folder(0)).limits)
                run.journal.accept_training(payload, run_id="test", step=4)
                disk.fill()
                cause = refused(run, 4)
                assert cause.code == "503"
                assert "the journal's disk cannot be written: No space left on device" in cause.message
                disk.empty()
                system.sidecar.process.send_signal(signal.SIGCONT)
                assert train(run, 4) == 4
            finally:
                system.sidecar.process.send_signal(signal.SIGCONT)
                over.set()
                asking.join()
                system.stop()
            assert failures == []
            assert served[0] == 0
            assert run.store.current() == NUM_STEPS
            assert run.store.manifest(NUM_STEPS).sha256 == plain_digest(run, tmp_path)
