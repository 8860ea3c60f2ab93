"""Alerts fire in a real Prometheus when their cause is provoked in a real run; `test_alert_rules` has every alert.

Rules without their `for`, with windows of seconds, and with limits that a tiny run reaches.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from live_system import Checkpoints
from monitored_run import monitored_run
from prometheus_server import quick, rules
from small_disk import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMITS = {
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
