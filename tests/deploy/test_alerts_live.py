"""Every alert fires in a real Prometheus when its cause is provoked in a real run.

Rules without their `for`, with windows of seconds, and with limits that a tiny run reaches.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from live_system import Checkpoints, LiveRun, training_inputs
from monitored_run import MonitoredRun, monitored_run
from prometheus_server import quick, rules
from small_disk import small_disk

from python_backend.models.modeling import load_critic
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import train_payload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMITS = {
    "> 1800": "> 8",  # RlhfActorStalled
    "> 120": "> 3",  # RlhfPublishSlow
    "> 100": "> 5",  # RlhfKLHigh
}
QUICK = quick(rules(), LIMITS)
DIVERGED = {
    "RlhfVersionRejected",
    "RlhfCriticUpdateFailed",
    "RlhfStale",
    "RlhfWeightsNotMoving",
    "RlhfRequestsFailed",
    "RlhfRowsMasked",
    "RlhfKLHigh",
}
SERVER_AWAY = {"RlhfServerDown", "RlhfActorStalled", "RlhfOutage", "RlhfRetries"}
NOT_PUBLISHED = {"RlhfSidecarStalled", "RlhfJournalBacklog", "RlhfServerBehind"}
DISK_FULL = {"RlhfSidecarBlocked", "RlhfError", "RlhfDiskLow"}
ONE_BY_ONE = {"RlhfActorDown", "RlhfSidecarDown", "RlhfPublishSlow", "RlhfCriticNotFinite"}


def test_every_alert_is_provoked_here() -> None:
    assert {rule["alert"] for rule in rules()} == DIVERGED | SERVER_AWAY | NOT_PUBLISHED | DISK_FULL | ONE_BY_ONE


def test_training_that_diverges(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Updates too large for policy and critic, and a reward function that fails on some rows."""
    (tmp_path / "fussy.py").write_text(
        "def score(sample):\n    if sum(sample.tokens) % 4 == 0:\n        raise ValueError('no')\n    return 1.0\n"
    )
    sections = {
        "trainer": {"lr": 3e37},
        "actor": {"lr": 0.02, "max_failed_fraction": 0.9},
        "rewards": {"model": {"weight": 1.0}, "fussy": {"function": f"{tmp_path / 'fussy.py'}:score"}},
    }
    with monitored_run(tmp_path, checkpoints, QUICK, sees_the_start=True, **sections) as run:
        run.prometheus.wait_for_alerts(*DIVERGED)


class Suspension:
    """Suspends the processes of the server, or only those of its models, and lets them continue."""

    def __init__(self, run: MonitoredRun) -> None:
        self._supervisor = psutil.Process(run.system.server.process.pid)

    @contextlib.contextmanager
    def of_all(self) -> Iterator[float]:
        """Suspend supervisor, server and models for the block; yield when that was."""
        began, processes = time.time(), [self._supervisor, *self._below()]
        for process in processes:
            process.suspend()
        try:
            yield began
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    @contextlib.contextmanager
    def of_models(self) -> Iterator[float]:
        """Suspend the models for the block, also those that replace them; yield when that was."""
        began, over, stopped = time.time(), threading.Event(), dict[int, psutil.Process]()

        def suspend_all() -> None:
            while not over.wait(0.05):
                with contextlib.suppress(psutil.Error):  # one has ended: looked for again
                    for process in self._below():
                        if process.pid not in stopped and "python_backend_stub" in process.cmdline()[0]:
                            process.suspend()
                            stopped[process.pid] = process

        thread = threading.Thread(target=suspend_all)
        thread.start()
        try:
            yield began
        finally:
            over.set()
            thread.join()
            for process in stopped.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def _below(self) -> list[psutil.Process]:
        # Without zombies: tritonserver does not reap a model's process that it replaced.
        below = self._supervisor.children(recursive=True)
        return [process for process in below if process.status() != psutil.STATUS_ZOMBIE]


def send(run: LiveRun, limits: Limits, **changes: np.ndarray) -> None:
    """Put the next training step into the journal, as the server does; the actor must be away."""
    payload = train_payload(training_inputs(seed=1, rows=8, **changes), limits)
    run.journal.accept_training(payload, run_id=run.run_id, step=None)


def test_processes_that_hang_and_die(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The server is suspended, the actor killed, the models of the server suspended, and the sidecar killed."""
    sections = {
        "trainer": {"global_batch_size": 4, "serve_timeout_s": 600},
        "actor": {"client": {"deadline_s": 3}},
    }
    with monitored_run(tmp_path, checkpoints, QUICK, **sections) as run:
        prometheus, live = run.prometheus, run.system.run
        prometheus.wait(lambda: (prometheus.value("rlhf_actor_step") or 0) > 2)
        server, limits = Suspension(run), load_critic(live.store.folder(0)).limits
        with server.of_all() as began:
            prometheus.wait_for_alerts(*SERVER_AWAY, since=began)
            killed = time.time()
            run.actor.process.kill()
            prometheus.wait_for_alerts("RlhfActorDown", since=killed)
        prometheus.wait(lambda: prometheus.value("rlhf_trainer_journal_pending_entries") == 0)

        began = time.time()
        returns = np.ones((8, 11), np.float32)
        returns[4:] = 1e38  # the second optimizer step of the update overflows
        send(live, limits, returns=returns)
        prometheus.wait_for_alerts("RlhfCriticNotFinite", since=began)

        with server.of_models() as began:
            send(live, limits)
            prometheus.wait_for_alerts("RlhfServerBehind", "RlhfSidecarStalled", since=began)
        prometheus.wait_for_alerts("RlhfPublishSlow", since=began)  # once it is served

        with server.of_models() as began:
            for _ in range(12):
                send(live, limits)
            prometheus.wait_for_alerts("RlhfJournalBacklog", since=began)

        killed = time.time()
        run.system.sidecar.process.kill()
        prometheus.wait_for_alerts("RlhfSidecarDown", since=killed)


def test_a_disk_that_fills_up(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The disk of the weights is full, and then that of the run."""
    with small_disk(tmp_path / "run", 128) as disk, small_disk(tmp_path / "run" / "weights" / "critic", 16) as weights:
        sections = {"trainer": {"publish": {"keep": 2}}}
        with monitored_run(tmp_path, checkpoints, QUICK, **sections) as run:
            run.prometheus.wait(lambda: (run.prometheus.value("rlhf_actor_step") or 0) > 2)
            began = time.time()
            weights.fill()
            run.prometheus.wait_for_alerts("RlhfSidecarBlocked", "RlhfError", since=began)
            began = time.time()
            disk.fill()
            run.prometheus.wait_for_alerts("RlhfDiskLow", since=began)
            disk.empty()
            weights.empty()
