"""The system that the crash test kills and restarts: the real server with its supervisor, and the sidecar."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.support.workload import SIZES, make_checkpoint
from chaos.points import RANK
from chaos.traffic import Shape
from python_backend.checkpoints.positions import max_positions
from python_backend.config import RunConfig, load_config
from python_backend.config.sections import UNMEASURED
from python_backend.store.weights import WeightsStore
from tools.run import LIBRARY_ENV
from tools.serve import ensure_first_version, start_server
from tools.server.child import Child
from tools.server.health import is_alive
from tools.server.log import tail
from tools.server.ports import PORT_KEYS, with_free_ports
from tools.server.shared_memory import SHARED_MEMORY
from tools.server.supervisor import Supervisor
from tools.server.triton_home import ServerStartError

SIDECAR_STOP_S = 90.0
LONGEST_PAUSE_S = 1.5  # before a sidecar that has ended is restarted
LONGEST_ROW = 96
FAILED_STARTS = 3
GONE_S = 5.0  # how long the other ranks may outlive one that was killed
POLL_S = 0.02


def write_config(folder: Path, given: Path | None, ranks: int = 1) -> Path:
    """Write the YAML of a run with free ports in `folder`, and small checkpoints unless `given`; return its path."""
    data: dict[str, Any] = {"reward": {}, "critic": {}, "trainer": {}}
    if given is not None:
        data = load_config(given).model_dump(mode="json", include=set(data))
    for model in ("reward", "critic"):
        if given is None:
            make_checkpoint(SIZES["tiny"], folder / "checkpoints" / model)
            data[model] |= {"checkpoint": str(folder / "checkpoints" / model), **UNMEASURED}
    data["run"] = {"dir": str(folder), "run_id": "chaos"}
    data["server"] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 1}
    data["critic"] |= {"reload": "swap"}
    # All versions are kept: each one is compared with the reference.
    schedule = {"lr": 1e-3, "warmup_steps": 2, "constant_steps": 10, "max_steps": 1000}
    data["trainer"] |= {
        "optimizer": {**data["trainer"].get("optimizer", {}), **schedule}, "global_batch_size": 12,
        "token_budget": 512, "checkpoint_every": 5, "keep_checkpoints": 3, "reload_on_save": "triton",
        "publish": {"every": 1, "keep": 100_000}, "ranks": ranks,
    }  # fmt: skip
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    data["server"] |= with_free_ports(load_config(path).server).model_dump(include=set(PORT_KEYS))
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def shape_of(config: RunConfig) -> Shape:
    """Return the bounds of token ids and row lengths that both models accept."""
    models = [json.loads((part.checkpoint / "config.json").read_text()) for part in (config.reward, config.critic)]
    positions = [max_positions(model) or LONGEST_ROW for model in models]
    return Shape(min(model["vocab_size"] for model in models), min(LONGEST_ROW, *positions))


class ChaosSystem:
    """Server and sidecar. Call `look` from the main thread; `kill` may be called from any thread."""

    def __init__(self, path: Path, generator: random.Random, log: Callable[[str], None]) -> None:
        """Start server and sidecar, and wait until the server is ready.

        Raises:
            ServerStartError: the server does not start.
        """
        self.config = load_config(path)
        self.troubles: list[str] = []
        """Processes that ended, or did not start, without having been killed."""
        self._path, self._random, self._log = path, generator, log
        self._sidecars: list[Child] = []
        self._killed: set[int] = set()
        self._restart_at: float | None = None
        self._failed_starts: list[str] = []
        self._ready = threading.Event()
        ensure_first_version(self.config, path, [])
        self._supervisor = Supervisor(lambda: start_server(self.config, log=self._quiet), log=self._quiet)
        self._ready.set()
        self._start_sidecar()

    @property
    def region_prefix(self) -> str:
        """Common prefix of the names of all shared-memory regions."""
        return f"rlhf-{os.getpid()}-"

    def look(self) -> None:
        """Restart the processes that were killed.

        Raises:
            ServerStartError: FAILED_STARTS restarts of the server have failed.
        """
        if self._supervisor.server.poll() is not None:
            self._ready.clear()
        self._supervisor.look()
        if self._supervisor.failed_starts > len(self._failed_starts):
            self._failed_starts.append(f"the server did not start: {tail(self._supervisor.server.log_path)}")
            self.troubles.append(self._failed_starts[-1])
            if len(self._failed_starts) == FAILED_STARTS:
                raise ServerStartError(self._failed_starts[-1])
        if self._supervisor.server.poll() is None:
            self._ready.set()
            self._look_at_sidecar()

    def is_whole(self) -> bool:
        """Whether server and sidecar run and every model has its process."""
        server = self._supervisor.server
        if not self._ready.is_set() or server.poll() is not None or self._sidecars[-1].poll() is not None:
            return False
        return all(server.processes().values()) and len(self.ranks()) == self.config.trainer.ranks

    def processes_of(self, victim: str) -> list[psutil.Process]:
        """Return the victim's processes; empty while there is none."""
        try:
            if victim.startswith(RANK):
                return [process for process in self.ranks() if process.environ()["RANK"] == victim.removeprefix(RANK)]
            if victim == "sidecar":
                return [psutil.Process(self._sidecars[-1].process.pid)]
            if victim == "tritonserver":
                return [psutil.Process(self._supervisor.server.pid)]
        except psutil.NoSuchProcess:
            return []
        return self._supervisor.server.processes()[victim]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train the critic: those of the ranks, or the sidecar itself if it trains alone."""
        try:
            sidecar = psutil.Process(self._sidecars[-1].process.pid)
            children = sidecar.children() if self.config.trainer.ranks > 1 else [sidecar]
            return [process for process in children if process.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def await_end(self, ranks: Sequence[psutil.Process]) -> float:
        """Wait until these processes have ended; return the seconds, and complain if they are more than GONE_S."""
        start = time.monotonic()
        while any(map(is_alive, ranks)):
            if time.monotonic() - start > GONE_S:
                self.troubles.append(f"a rank still runs {GONE_S:g} s after another one was killed")
                break
            time.sleep(POLL_S)
        return time.monotonic() - start

    def kill(self, process: psutil.Process) -> bool:
        """Send SIGKILL; return False if the process has ended."""
        self._killed.add(process.pid)
        try:
            process.send_signal(signal.SIGKILL)  # psutil checks that the pid has not been reused
        except psutil.NoSuchProcess:
            return False
        return True

    def stop_sidecar(self) -> None:
        """Stop the sidecar as `tools run` does, which makes it write its last checkpoint."""
        code = self._sidecars[-1].stop(signal.SIGTERM, SIDECAR_STOP_S)
        if code != 0:
            self.troubles.append(f"when stopped at the end, {self._sidecars[-1].obituary()}")

    def stop(self) -> None:
        """Stop sidecar and server."""
        self._sidecars[-1].stop(signal.SIGTERM, SIDECAR_STOP_S)
        self._supervisor.stop()

    def leftovers(self) -> list[str]:
        """Return shared memory, processes and unfinished folders that are left after `stop`."""
        regions = [f"shared memory {path.name}" for path in SHARED_MEMORY.glob(f"{self.region_prefix}*")]
        folders = [self.config.run.weights_dir, self.config.run.dir / "checkpoints" / "critic"]
        unfinished = [str(path) for folder in folders for path in folder.glob(".*-*") if path.is_dir()]
        run = str(self.config.run.dir.absolute())
        processes = [
            f"process {process.pid}: {' '.join(process.info['cmdline'])[:200]}"
            for process in psutil.process_iter(["cmdline"])
            if process.pid != os.getpid() and self._is_ours(process.info["cmdline"] or [], run)
        ]
        return regions + unfinished + processes

    @property
    def store(self) -> WeightsStore:
        """The critic's versions."""
        return WeightsStore(self.config.run.weights_dir)

    def _is_ours(self, command: list[str], run: str) -> bool:
        is_stub = any(argument.startswith(self.region_prefix) for argument in command)
        return (
            is_stub
            or ({"trainer", "actor"} & set(command) and str(self._path) in command)
            or f"--model-repository={run}" in command
        )

    def _look_at_sidecar(self) -> None:
        sidecar = self._sidecars[-1]
        if sidecar.poll() is None:
            return
        if self._restart_at is None:
            if sidecar.process.pid not in self._killed:
                self.troubles.append(sidecar.obituary())
            self._restart_at = time.monotonic() + self._random.uniform(0, LONGEST_PAUSE_S)
        elif time.monotonic() >= self._restart_at:
            self._restart_at = None
            self._start_sidecar()

    def _start_sidecar(self) -> None:
        log = self.config.run.logs_dir / f"sidecar-{len(self._sidecars):03d}.log"
        self._sidecars.append(Child("critic sidecar", ["trainer", "--config", str(self._path)], log, LIBRARY_ENV))

    def _quiet(self, line: str) -> None:
        if "died" in line or ("serv" in line and "again" in line):
            self._log(f"  {line.splitlines()[0]}")
