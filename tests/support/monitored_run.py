"""A whole run, server, sidecar and actor, with a Prometheus that scrapes all three."""

import contextlib
import dataclasses
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from live_system import Checkpoints, System, make_run, start_system, stop_process, wait_for
from prometheus_server import Prometheus, program

from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.ports import free_port

ENDLESS = 100_000  # steps


@dataclasses.dataclass
class MonitoredRun:
    """A run at work."""

    system: System
    actor: Child
    prometheus: Prometheus


@contextlib.contextmanager
def monitored_run(
    folder: Path,
    checkpoints: Checkpoints,
    rules: Sequence[Mapping[str, Any]],
    *,
    interval_s: int = 1,
    sees_the_start: bool = False,
    **sections: Mapping[str, Any],
) -> Iterator[MonitoredRun]:
    """Start everything; Prometheus begins when all three processes answer, and ends before they do.

    `sees_the_start`: it begins before the actor, which is down at first.
    """
    program("prometheus")  # skips the test before anything is started
    ports = {"actor_port": free_port(), "trainer_port": free_port()}
    actor = {"steps": ENDLESS, "max_new_tokens": 24, "checkpoint_every": 50, **sections.pop("actor", {})}
    with contextlib.ExitStack() as stack:
        system = start_system(make_run(folder / "run", checkpoints, monitoring=ports, actor=actor, **sections))
        stack.callback(system.stop)
        server = system.run.config.server.metrics_port
        targets = {"rlhf-server": server, "rlhf-trainer": ports["trainer_port"], "rlhf-actor": ports["actor_port"]}

        def watched() -> Prometheus:
            prometheus = Prometheus(folder / "prometheus", targets, rules, interval_s=interval_s)
            stack.callback(prometheus.stop)
            return prometheus

        prometheus = watched() if sees_the_start else None
        if prometheus is not None:
            prometheus.wait(lambda: bool(prometheus.query("rlhf_trainer_updates_total")))
        child = system.run.start("actor")
        stack.callback(stop_process, child)
        for port in targets.values():
            wait_for(lambda port=port: answers(port), system.server, system.sidecar, child)
        yield MonitoredRun(system, child, prometheus or watched())


def answers(port: int) -> bool:
    """Return whether metrics are served on a port of loopback."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
