"""Child processes of a benchmark: servers, the sidecar, and functions of this package that serve HTTP.

All of them use free loopback ports, and are stopped with their descendants.
"""

import contextlib
import importlib
import json
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from rlhf_triton.config import RunConfig, ServerSection
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.journal import Journal
from rlhf_triton.tools.render_configs import render_repository
from rlhf_triton.tools.run import LIBRARY_ENV
from rlhf_triton.tools.serve import serve_rendered
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.ports import PORT_KEYS, with_free_ports
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.triton_home import find_tritonserver, server_environment
from rlhf_triton.tools.server.tritonserver import TritonServer

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
SPAWN = get_context("spawn")
SERVED: dict[str, Any] = {"workers": 1, "threads": 1, "token_budget": 256, "forward_overhead_tokens": 64}
"""Settings of the models that benchmarks serve."""
ON_FREE_PORTS: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
"""The server section of a run whose server takes free ports."""


@contextlib.contextmanager
def running_child(
    target: str, arguments: Mapping[str, Any], log: Path, *, ready: str = "/ready", attempts: int = 1
) -> Iterator[tuple[str, int]]:
    """Run `target`, a `module:function` of this package, in a process; yield its `host:port` and pid once it is ready.

    That is when `GET ready` returns status 200. It is called with `ports` (free ports for HTTP, gRPC and metrics) and
    with `arguments`, JSON values or paths, of which `threads` (default: 1) is the number of OpenMP threads, too. At
    the end of the block the process and its descendants are stopped.

    Raises:
        RlhfError: the process ended before it was ready, or took too long, in all `attempts`.
    """
    # OMP_NUM_THREADS also applies to threads that a library starts; torch.set_num_threads only to its caller.
    # PyTriton's stubs need this interpreter's libpython, like the stubs of the project's tritonserver.
    environment = {**server_environment(find_tritonserver()), "OMP_NUM_THREADS": str(arguments.get("threads", 1))}
    with contextlib.ExitStack() as stack:
        while True:
            ports = list(free_ports().values())
            job = json.dumps({"ports": ports, **arguments}, default=str)
            child = Child(target, ["benchmarks.processes", target, job], log, environment)
            stack.callback(_stop, child)
            try:
                wait_until(partial(_answers, f"http://{HOST}:{ports[0]}{ready}"), child)
                break
            except RlhfError:
                attempts -= 1
                if not attempts:
                    raise
        yield f"{HOST}:{ports[0]}", child.process.pid


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _stop(child: Child) -> None:
    if child.poll() is not None:  # its pid may have been reused
        return
    root = psutil.Process(child.process.pid)
    family = [root, *root.children(recursive=True)]
    child.stop(signal.SIGTERM, 20)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # PyTriton's server and stubs, if it has not stopped them
        for segment in SHARED_MEMORY.glob(f"pytrtion{process.pid}-*"):  # PyTriton's prefix is misspelt
            segment.unlink(missing_ok=True)


def wait_until(is_ready: Callable[[], bool], child: Child) -> None:
    """Wait until `is_ready()` returns True. Raises RlhfError if the child ends first or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if child.poll() is not None:
            raise RlhfError(child.obituary())
        if time.monotonic() > deadline:
            raise RlhfError(f"the {child.name} was not ready within {START_TIMEOUT_S:g} s; its log: {child.log_path}")
        time.sleep(0.05)


@contextlib.contextmanager
def running_pool(
    num_processes: int, initialise: Callable[..., None] | None = None, *arguments: Any
) -> Iterator[ProcessPoolExecutor]:
    """Run new Python processes; yield a pool of them once each has called `initialise(*arguments)`."""
    begin = SPAWN.Barrier(num_processes)  # a task of one that is ready does not begin before the others are, too
    with ProcessPoolExecutor(num_processes, SPAWN, _begin, (begin, initialise, arguments)) as pool:
        list(pool.map(abs, range(num_processes)))
        yield pool


def _begin(barrier: Any, initialise: Callable[..., None] | None, arguments: Sequence[Any]) -> None:
    if initialise is not None:
        initialise(*arguments)
    barrier.wait(START_TIMEOUT_S)


@contextlib.contextmanager
def running_triton(config: RunConfig) -> Iterator[TritonServer]:
    """Run a tritonserver on the run's repository; yield it once it is ready.

    Raises:
        ServerStartError: the block failed because the server had died; ServerAborted if by a fault of its own.
    """
    render_repository(config, config.run.repository_dir)
    server = serve_rendered(config, log=lambda line: None)
    try:
        yield server
    except RlhfError:
        server.raise_if_dying()
        raise
    finally:
        server.stop()


@contextlib.contextmanager
def running_sidecar(config: RunConfig) -> Iterator[Child]:
    """Run the sidecar; yield once it follows the journal."""
    path = config.run.dir / "sidecar.yaml"
    write_json(path, config.model_dump(mode="json", exclude_none=True), durable=False)  # JSON is YAML
    environment = {**LIBRARY_ENV, "OMP_NUM_THREADS": "1"}
    child = Child(
        "sidecar", ["rlhf_triton.trainer", "--config", str(path)], config.run.logs_dir / "sidecar.log", environment
    )
    try:
        wait_until(Journal(config.run.journal_dir, config.run.identity).is_followed, child)
        yield child
    finally:
        child.stop(signal.SIGINT, 60)


def free_ports() -> dict[str, int]:
    """Return free ports for HTTP, gRPC and metrics, keyed as in a server section."""
    section = with_free_ports(ServerSection(**ON_FREE_PORTS))
    return {key: getattr(section, key) for key in PORT_KEYS}


if __name__ == "__main__":  # the function and its arguments, from `running_child`
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(**json.loads(sys.argv[2]))
