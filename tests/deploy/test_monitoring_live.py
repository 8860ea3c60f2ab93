"""A calm run scraped by a real Prometheus: every query of the dashboard has data, and no alert fires."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_system import Checkpoints
from monitored_run import MonitoredRun, monitored_run
from prometheus_server import MONITORING, queries, rules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PICTURE = "RLHF_DASHBOARD_PICTURE"  # where to keep the picture, for docs/
SCRAPES = 20  # of each process: longer than every `for`
ONLY_AFTER_A_PROBLEM = "last_problem_timestamp_seconds"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[MonitoredRun]:
    """A run that has taken some steps, validations included, and is still at work."""
    # A scrape that a busy machine answers late must not count as a dead process; rules without `for` are unchanged.
    patient = [{**rule, "for": "20s"} if "for" in rule else rule for rule in rules()]
    actor = {"one_step_off_policy": True, "validation_every": 10}
    folder = tmp_path_factory.mktemp("calm")
    with monitored_run(folder, checkpoints, patient, interval_s=2, actor=actor) as run:
        scraped = f"min(count_over_time(rlhf_actor_step[1h])) >= {SCRAPES}"
        run.prometheus.wait(lambda: bool(run.prometheus.query(scraped)), timeout_s=600)
        yield run


def test_no_alert_fires(calm: MonitoredRun) -> None:
    assert len(calm.prometheus.query("up == 1")) == 3
    assert calm.prometheus.fired() == set()


def test_every_query_of_the_dashboard_has_data(calm: MonitoredRun) -> None:
    empty = [query for _, query in queries() if not calm.prometheus.query(query)]
    assert [query for query in empty if ONLY_AFTER_A_PROBLEM not in query] == []


def test_the_dashboard_is_drawn(calm: MonitoredRun, tmp_path: Path) -> None:
    picture = tmp_path / "dashboard.png"
    command = [sys.executable, MONITORING / "draw.py", calm.prometheus.url, picture, "--minutes", "1.5"]
    subprocess.run(command, check=True, timeout=300)
    assert picture.read_bytes().startswith(b"\x89PNG")
    if kept := os.environ.get(PICTURE):
        shutil.copy(picture, kept)
