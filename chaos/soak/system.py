"""The system of the soak test: server, sidecar and a PPO actor, each replaced when it is killed."""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.learning import configuration, make_checkpoints
from chaos.system import LONGEST_PAUSE_S, ChaosSystem
from python_backend.config import load_config
from tools.run import LIBRARY_ENV
from tools.server.child import Child
from tools.server.ports import PORT_KEYS, with_free_ports

ACTOR = "actor"
ROWS = 16  # responses per step
MOST_REQUESTS = 32  # in flight
STOPPED_BY_SIGNAL = 130
GRACE_S = 60.0


def write_soak_config(folder: Path, seed: int) -> Path:
    """Write checkpoints, prompts and the YAML of a PPO run without an end in `folder`; return the YAML's path."""
    make_checkpoints(folder, seed)
    data: dict[str, Any] = configuration(argparse.Namespace(steps=10**9, rollout_size=ROWS), folder, "ppo", seed)
    data["run"]["run_id"] = "soak"
    data["critic"] |= {"reload": "swap"}
    data["trainer"] |= {
        "global_batch_size": ROWS, "checkpoint_every": 10, "keep_checkpoints": 3, "reload_on_save": "none",
        "publish": {"every": 1, "keep": 4},
    }  # fmt: skip
    data["trainer"]["optimizer"]["max_steps"] = 10**6
    data["actor"] |= {
        "checkpoint_every": 20, "keep_checkpoints": 3, "stop_grace_s": GRACE_S,
        "client": {"max_in_flight": MOST_REQUESTS, "backoff_s": 0.1, "deadline_s": 20},
    }  # fmt: skip
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    data["server"] |= with_free_ports(load_config(path).server).model_dump(include=set(PORT_KEYS))
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


class SoakSystem(ChaosSystem):
    """Server, sidecar and actor. Call `look` from the main thread."""

    def __init__(self, path: Path, generator: random.Random, log: Callable[[str], None]) -> None:
        super().__init__(path, generator, log)
        self._actors: list[Child] = []
        self._actor_at: float | None = None
        self.start_actor()

    @property
    def victims(self) -> list[str]:
        """Names of the processes: actor, sidecar, tritonserver, and its models with a process of their own."""
        return [ACTOR, "sidecar", "tritonserver", *sorted(self._supervisor.server.processes())]

    def start_actor(self) -> None:
        """Start the actor, which resumes from its newest checkpoint."""
        log = self.config.run.logs_dir / f"actor-{len(self._actors):03d}.log"
        self._actors.append(Child(ACTOR, ["actor", "--config", str(self._path)], log, LIBRARY_ENV))

    def look(self) -> None:
        super().look()
        actor = self._actors[-1]
        if actor.poll() is None:
            return
        if self._actor_at is None:
            if actor.process.pid not in self._killed:
                self.troubles.append(actor.obituary())
            self._actor_at = time.monotonic() + self._random.uniform(0, LONGEST_PAUSE_S)
        elif time.monotonic() >= self._actor_at:
            self._actor_at = None
            self.start_actor()

    def is_whole(self) -> bool:
        return super().is_whole() and self._actors[-1].poll() is None

    def processes_of(self, victim: str) -> list[psutil.Process]:
        if victim != ACTOR:
            return super().processes_of(victim)
        try:
            return [psutil.Process(self._actors[-1].process.pid)]
        except psutil.NoSuchProcess:
            return []

    def stop_actor(self) -> None:
        """Stop the actor with SIGTERM; it writes a checkpoint of its last complete step."""
        code = self._actors[-1].stop(signal.SIGTERM, GRACE_S + 30.0)
        if code != STOPPED_BY_SIGNAL:
            self.troubles.append(f"when stopped at the end, {self._actors[-1].obituary()}")

    def stop(self) -> None:
        self._actors[-1].stop(signal.SIGTERM, GRACE_S)
        super().stop()

    def progress_time(self) -> float:
        """Return when the actor last completed a step, in seconds since the epoch; 0.0 before the first one."""
        path = self.config.run.dir / "metrics.jsonl"
        return path.stat().st_mtime if path.is_file() else 0.0

    def state_of(self, role: str, step: int) -> dict[str, Any]:
        """Return state.json of the `role`'s checkpoint (actor or critic) of `step`."""
        path = self.config.run.dir / "checkpoints" / role / str(step) / "state.json"
        state: dict[str, Any] = json.loads(path.read_text())
        return state
