"""Child processes of a benchmark: servers, the sidecar, and functions of this package that are called over HTTP.

All of them use free loopback ports, and are stopped with their descendants.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from benchmarks.support.benchmark import BenchError
from python_backend.config import RunConfig, ServerSection
from python_backend.store.durable import write_json
from python_backend.store.journal import Journal
from tools.render_configs import render_repository
from tools.run import LIBRARY_ENV
from tools.serve import serve_rendered
from tools.server.child import Child
from tools.server.log import tail
from tools.server.ports import PORT_KEYS, with_free_ports
from tools.server.shared_memory import SHARED_MEMORY
from tools.server.triton_home import find_tritonserver, server_environment
from tools.server.tritonserver import TritonServer

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 20.0
SIDECAR_STOP_TIMEOUT_S = 60.0
SERVED: dict[str, Any] = {"workers": 1, "threads": 1, "token_budget": 256, "forward_overhead_tokens": 64}
"""Settings of the models that benchmarks serve."""


@dataclass(frozen=True)
class BenchChild:
    """A child process that runs a function of this package and responds over HTTP."""

    child: Child
    url: str
    """`host:port`."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.child.process.pid

    def ask(self, path: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send `job` as JSON to `POST path`; return the JSON response. Raises BenchError if the request fails."""
        request = urllib.request.Request(
            f"http://{self.url}{path}", json.dumps(job).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return dict(json.load(answer))
        except (OSError, http.client.HTTPException) as error:
            if self.child.poll() is not None:
                raise BenchError(self.child.obituary()) from error
            ending = tail(self.child.log_path)
            raise BenchError(f"the {self.child.name} failed: {error}; its log ends with:\n{ending}") from error


@contextlib.contextmanager
def running_child(
    name: str,
    target: str,
    arguments: Mapping[str, Any],
    log: Path,
    *,
    ready: str = "/ready",
    attempts: int = 1,
) -> Iterator[BenchChild]:
    """Run `target`, a `module:function` of this package, in a child process; yield once `GET ready` returns status 200.

    It is called with `ports` (free ports for HTTP, gRPC and metrics) and with `arguments`, JSON values or paths, of
    which `threads` (default: 1) is the number of OpenMP threads, too. At the end of the block the process and its
    descendants are stopped.

    Raises:
        BenchError: the process ended before it was ready, or took too long, in all `attempts`.
    """
    # OMP_NUM_THREADS also applies to threads that a library starts; torch.set_num_threads only to its caller.
    # PyTriton's stubs need this interpreter's libpython, like the stubs of the project's tritonserver.
    environment = {**server_environment(find_tritonserver()), "OMP_NUM_THREADS": str(arguments.get("threads", 1))}
    ports = list(free_ports().values())
    job = json.dumps({"ports": ports, **arguments}, default=str)
    child = Child(name, ["benchmarks.support.children", target, job], log, environment)
    url = f"{HOST}:{ports[0]}"
    with contextlib.ExitStack() as stack:
        stack.callback(_stop, child)
        try:
            wait_until(lambda: _answers(f"http://{url}{ready}"), child)
            started = BenchChild(child, url)
        except BenchError:
            if attempts == 1:
                raise
            again = running_child(name, target, arguments, log, ready=ready, attempts=attempts - 1)
            started = stack.enter_context(again)
        yield started


def _stop(child: Child) -> None:
    if child.poll() is not None:  # its pid may have been reused
        return
    root = psutil.Process(child.process.pid)
    family = [root, *root.children(recursive=True)]
    child.stop(signal.SIGTERM, STOP_TIMEOUT_S)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # PyTriton's server and stubs, if it has not stopped them
        for segment in SHARED_MEMORY.glob(f"pytrtion{process.pid}-*"):  # PyTriton's prefix is misspelt
            segment.unlink(missing_ok=True)


def wait_until(is_ready: Callable[[], bool], child: Child) -> None:
    """Wait until `is_ready()` returns True. Raises BenchError if the child ends first or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if child.poll() is not None:
            raise BenchError(child.obituary())
        if time.monotonic() > deadline:
            raise BenchError(f"the {child.name} was not ready within {START_TIMEOUT_S:g} s; its log: {child.log_path}")
        time.sleep(0.05)


def reward_config(folder: Path, reward: dict[str, Any]) -> RunConfig:
    """Return the configuration of a server with a reward model alone, whose section is `reward`."""
    return RunConfig.model_validate(
        {
            "run": {"dir": folder, "run_id": "bench"},
            "reward": reward,
            "actor": {"algorithm": {"name": "reinforce++"}},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 1},
        }
    )


@contextlib.contextmanager
def running_triton(config: RunConfig) -> Iterator[TritonServer]:
    """Run a tritonserver on the run's repository; yield it once it is ready."""
    render_repository(config, config.run.repository_dir)
    server = serve_rendered(config, log=lambda line: None)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def running_sidecar(config: RunConfig) -> Iterator[Child]:
    """Run the sidecar; yield once it follows the journal."""
    path = config.run.dir / "sidecar.yaml"
    write_json(path, config.model_dump(mode="json", exclude_none=True), durable=False)  # JSON is YAML
    environment = {**LIBRARY_ENV, "OMP_NUM_THREADS": "1"}
    child = Child("sidecar", ["trainer", "--config", str(path)], config.run.logs_dir / "sidecar.log", environment)
    try:
        wait_until(Journal(config.run.journal_dir, config.run.identity).is_followed, child)
        yield child
    finally:
        child.stop(signal.SIGINT, SIDECAR_STOP_TIMEOUT_S)


def output_of(what: str, command: Sequence[str], **options: Any) -> str:
    """Run a command to its end; return its standard output. Raises BenchError with the end of stderr if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise BenchError(f"{what} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def free_ports() -> dict[str, int]:
    """Return free ports for HTTP, gRPC and metrics, keyed as in a server section."""
    section = with_free_ports(ServerSection(http_port=0, grpc_port=0, metrics_port=0))
    return {key: getattr(section, key) for key in PORT_KEYS}


def serve_http(port: int, routes: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]) -> None:
    """Serve `POST` requests on the routes, and `GET /ready`, until SIGTERM."""

    async def ready(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/ready", ready), *(web.post(path, handler) for path, handler in routes.items())])
    web.run_app(app, host=HOST, port=port, print=None, access_log=None)


def serve_json(port: int, **functions: Callable[..., Awaitable[dict[str, Any]]]) -> None:
    """Serve `POST /<name>` for each function: the JSON body holds its arguments, the response holds its result."""

    def handler(function: Callable[..., Awaitable[dict[str, Any]]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(await function(**await request.json()))

        return handle

    serve_http(port, {f"/{name}": handler(function) for name, function in functions.items()})


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


if __name__ == "__main__":  # the function and its arguments, from `running_child`
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(**json.loads(sys.argv[2]))
