"""The measurement's own processes: started on free ports of loopback, asked by HTTP, never left behind.
Given: a module and its arguments. Returns: a `BenchChild` and its JSON answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.child import Child
from tools.shared_memory import SHARED_MEMORY
from tools.triton_home import find_tritonserver, server_environment

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 20.0


class BenchError(RuntimeError):
    """The measurement cannot go on; the message says which contender and why."""


class BenchChild:
    """One Python module of the measurement, on ports of its own."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, *, threads: int = 1, num_ports: int = 1
    ) -> None:
        """Start `python -m <module> <arguments> --port(s) …`; `wait_ready` waits for it."""
        self.ports = free_ports(num_ports)
        self.url = f"{HOST}:{self.ports[0]}"
        flag = "--port" if num_ports == 1 else "--ports"
        command = [module, *arguments, flag, *map(str, self.ports)]
        # OMP_NUM_THREADS reaches the threads that a library starts; torch.set_num_threads only the one that calls it.
        # PyTriton's stubs need our libpython, as those of a tritonserver of our own do.
        environment = {**server_environment(find_tritonserver()), "OMP_NUM_THREADS": str(threads)}
        self._child = Child(name, command, log, environment)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.process.pid

    def wait_ready(self, path: str = "/ready") -> None:
        """Return when `GET path` answers 200. Raises BenchError when the process ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"http://{self.url}{path}"):
            if self._child.poll() is not None:
                raise BenchError(self._child.obituary())
            if time.monotonic() > deadline:
                raise BenchError(f"the {self._child.name} was not ready within {START_TIMEOUT_S:g} s")
            time.sleep(0.05)

    def ask(self, path: str, job: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer to `job`. Raises BenchError when there is none."""
        request = urllib.request.Request(
            f"http://{self.url}{path}", json.dumps(job).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except (OSError, http.client.HTTPException) as error:
            if self._child.poll() is not None:
                raise BenchError(self._child.obituary()) from error
            tail = self._child.log_path.read_text(errors="replace").strip().splitlines()[-1:]
            raise BenchError(f"the {self._child.name} failed: {error}; its log ends with: {tail}") from error

    def stop(self) -> None:
        """End it; nothing of it is left. Stopping twice does nothing."""
        if self._child.poll() is not None:  # its number may be another process's by now
            return
        family = psutil.Process(self.pid).children(recursive=True)
        self._child.stop(signal.SIGTERM, STOP_TIMEOUT_S)
        for process in family:  # PyTriton's server and its stubs, should it not have stopped them
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for pid in (self.pid, *(process.pid for process in family)):  # sic: the name that PyTriton gives them
            for segment in SHARED_MEMORY.glob(f"pytrtion{pid}-*"):
                segment.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind((HOST, 0))
        return [bound.getsockname()[1] for bound in sockets]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
