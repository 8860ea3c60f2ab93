"""One tritonserver process: its command line, its start, and a stop without leftovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import psutil

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.client.errors import UNREADABLE
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.path_alias import plain_alias
from rlhf_triton.store.durable import write_json
from rlhf_triton.tools.server.child import Child, WaitCheck
from rlhf_triton.tools.server.container import BODY_LIMIT, MAX_BODY_BYTES, server_arguments
from rlhf_triton.tools.server.drain import DRAIN_S, drain
from rlhf_triton.tools.server.model_loading import compile_ahead, load_and_probe, too_slow
from rlhf_triton.tools.server.ports import PORT_KEYS, bind_address, check_ports, is_open, release_ports, with_free_ports
from rlhf_triton.tools.server.server_log import Log, poll_failure, relay_lines, stub_failure
from rlhf_triton.tools.server.shared_memory import Regions, remove_abandoned
from rlhf_triton.tools.server.triton_home import (
    ServerStartError,
    TritonHome,
    accepts,
    server_environment,
)

POLL_INTERVAL_S = 0.1
KILL_AFTER_S = 10.0
EXIT_TIMEOUT_S = 1  # which tritonserver waits for open connections; `rlhf-triton serve` has drained them before
FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
# Of this many requests without a trace context Triton traces one; requests with a context are always traced.
UNTRACED = 1_000_000_000


class TritonServer:
    """One tritonserver process; as a context manager, starts it on entry and stops it on exit."""

    def __init__(
        self,
        home: TritonHome,
        repository: Path,
        section: ServerSection,
        log_path: Path,
        *,
        backends: Path,
        control_key: str,
        log: Log = print,
        trace_endpoint: str | None = None,
    ) -> None:
        """`backends`: folder from `lay_out_backends`; `log` gets progress and the readable lines of the server's log.

        `trace_endpoint`: base URL of the collector that receives the server's spans of traced requests.
        `control_key` protects the endpoints that can run code in the server; loading a model requires it.
        """
        self.home = home
        self.repository = repository
        self._configured = section
        self.section = with_free_ports(section)
        self.log_path = log_path
        self._backends = backends
        self._control_key = control_key
        self._log = log
        self._trace_endpoint = trace_endpoint
        self._regions = Regions()
        self._child: Child | None = None
        self._stopping = False
        self._follower: threading.Thread | None = None
        self._state_file: Path | None = None

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._child is not None, "not started"
        return self._child.process.pid

    def start(self) -> None:
        """Start the server process in its own session, so that Ctrl-C reaches only the calling process.

        Raises:
            ServerStartError: a port is taken, or the address cannot be bound.
        """
        # The kernel sends the parent-death signal when the *thread* that started the child ends.
        assert threading.current_thread() is threading.main_thread(), "start the server from the main thread"
        assert self._child is None, "a server object can start only once"
        check_ports(self.section)
        for prefix in remove_abandoned():
            self._log(f"removed the shared memory {prefix}* of a server that was killed")
        compile_ahead(self.repository)
        environment = server_environment(self.home)
        lock = self._regions.lock()
        command = self._command()
        self._child = Child("tritonserver", command, self.log_path, environment, command=(), inherits=[lock])
        self._follower = threading.Thread(
            target=relay_lines,
            args=(self.log_path, lambda: self._stopping or self.poll() is not None, self._log),
            name="server-log",
            daemon=True,
        )
        self._follower.start()

    def wait_ready(self, state_file: Path | None = None, check: WaitCheck = lambda: None) -> None:
        """Return when the server is up, its models are loaded, and each of them has answered a real request.

        A server that aborts meanwhile is started once more: rarely, server 2.51 does so on a busy machine, because of a
        fault in its shared memory.

        Args:
            state_file: JSON file for `{pid, http, grpc, metrics}`, written when all is ready; `stop` removes it.
            check: called repeatedly; raises an exception to abort.

        Raises:
            ServerStartError: the server died, a model did not load or answer, or `start_timeout_s` has expired.
        """
        try:
            self._wait_ready(check)
        except ServerStartError as fault:
            if -(self.poll() or 0) not in FAULTS:
                raise
            self._log(f"{fault}\nstarting it once more")
            self.stop()
            self._child = None
            self._stopping = False
            self._regions = Regions()
            self.section = with_free_ports(self._configured)
            self.start()
            self._wait_ready(check)
        if state_file is not None:
            self._state_file = state_file
            at = self.section
            state = {"pid": self.pid, "http": at.http_url, "grpc": at.grpc_url, "metrics": at.metrics_url}
            write_json(state_file, state, durable=False)

    def _wait_ready(self, check: WaitCheck) -> None:
        def check_start() -> None:
            check()
            if failure := stub_failure(self.log_path):
                raise ServerStartError(f"{failure} (the whole log is in {self.log_path})")

        try:
            with self.control() as control:
                deadline = time.monotonic() + self.section.start_timeout_s
                # tritonserver opens its ports one after the other, gRPC first.
                while not (control.is_live() and is_open(self.section.http_url) and is_open(self.section.metrics_url)):
                    self.raise_if_dead()
                    check_start()
                    if time.monotonic() > deadline:
                        raise ServerStartError(f"{too_slow(self.section)} (the whole log is in {self.log_path})")
                    time.sleep(POLL_INTERVAL_S)
                _hide_argument(self.pid, self._control_key)
                load_and_probe(control, self.repository, self.section, check=check_start, log=self._log)
        except ControlPlaneError as error:
            self.raise_if_dying()
            # Triton's answer does not say why it cannot read a configuration; only its log does.
            reason = f" ({poll_failure(self.log_path)})" if error.code == UNREADABLE else ""
            raise ServerStartError(f"{error}{reason}; the whole log is in {self.log_path}") from error

    def control(self) -> ControlPlane:
        """Return a control-plane client with the key that loading models requires."""
        return ControlPlane(self.section.grpc_url, self._control_key)

    def models(self) -> list[str]:
        """Return the names of the models that have their own processes: all models but ensembles."""
        return sorted(path.parents[1].name for path in self.repository.glob("*/[1-9]*/model.py"))

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of each model; there are two of a model during its reload."""
        stubs = [(stub, " ".join(stub.info["cmdline"])) for stub in self._stubs()]
        return {m: [stub for stub, command in stubs if f"{os.sep}{m}{os.sep}" in command] for m in self.models()}

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the server runs or before it is started."""
        return None if self._child is None else self._child.poll()

    def raise_if_dead(self) -> None:
        """Raise ServerStartError, with the last lines of the log, if the process has ended."""
        if self._child is not None and self._child.poll() is not None:
            raise ServerStartError(self._child.exit_message())

    def drain(self, give_up: Callable[[], bool]) -> None:
        """Refuse further requests and wait up to `DRAIN_S` for those in flight; see `drain` for what ends the wait."""
        begin = time.monotonic()
        try:
            is_idle = drain(self.section.http_url, self._control_key, DRAIN_S, lambda: bool(self._stubs()), give_up)
        except (OSError, ValueError, HTTPException) as error:  # it is dead or hangs, so there is nothing to wait for
            self._log(f"tritonserver cannot be drained: {error}")
            return
        done = "all requests are answered" if is_idle else "not all requests are answered"
        self._log(f"drained for {time.monotonic() - begin:.1f} s: {done}")

    def kill(self) -> None:
        """Kill the server at once, without the grace period of `stop`; call `stop` afterwards to clean up."""
        if self._child is not None:
            self._child.process.kill()
            self._child.process.wait()

    def stop(self) -> None:
        """Stop the server; return once all its processes have ended and its shared memory is removed."""
        if self._child is None:
            return
        self._stopping = True
        self._child.stop(signal.SIGTERM, EXIT_TIMEOUT_S + KILL_AFTER_S)
        self._kill_stubs()
        self._regions.remove()
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)
        if self._follower is not None:
            self._follower.join()
        release_ports()

    def _kill_stubs(self) -> None:
        deadline = time.monotonic() + KILL_AFTER_S
        while (stubs := self._stubs()) and time.monotonic() < deadline:
            for stub in stubs:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended on its own
                    stub.kill()
            time.sleep(POLL_INTERVAL_S)

    def _stubs(self) -> list[psutil.Process]:
        # A stub has the name of its shared-memory region, which begins with our prefix, among its arguments.
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if any(argument.startswith(self._regions.prefix) for argument in process.info["cmdline"] or ())
        ]

    def _command(self) -> list[str]:
        places = plain_alias(self.repository.absolute()), plain_alias(self._backends)
        return [
            *server_command(self.home, *places, self.section, self._control_key, self._trace_endpoint),
            f"--backend-config=python,shm-region-prefix-name={self._regions.prefix}",
            "--exit-on-error=false",  # `load_and_probe` then finds out why a model does not load
        ]

    def raise_if_dying(self) -> None:
        """Like `raise_if_dead`, for a server whose connections have just broken."""
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(1.0)  # the connection breaks a moment before the exit code is available
        self.raise_if_dead()


def server_command(
    home: TritonHome,
    repository: Path,
    backends: Path,
    section: ServerSection,
    key: str,
    trace_endpoint: str | None,
    exit_timeout_s: int = EXIT_TIMEOUT_S,
) -> list[str]:
    """Return the command line of a server of all models in `repository`; see `TritonServer`."""
    address = bind_address(section.host)
    ports = {key.removesuffix("_port"): (address, getattr(section, key)) for key in PORT_KEYS}
    return [
        str(home.binary),
        f"--backend-directory={backends}",
        *server_arguments(repository, key, exit_timeout_s, ports),
        *([f"{BODY_LIMIT}={MAX_BODY_BYTES}"] if accepts(home, BODY_LIMIT) else []),
        *(tracing_arguments(trace_endpoint) if trace_endpoint else ()),
    ]


def _hide_argument(pid: int, secret: str) -> None:
    """Overwrite a secret in the arguments of a process with asterisks: all users of the machine can list arguments.

    tritonserver accepts its keys only as arguments, and has copied them when its ports are open.
    """
    with contextlib.suppress(OSError):  # if the kernel forbids it, the key stays visible in the process list
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # arg_start and arg_end, see proc(5)
        start = int(fields[45])
        end = int(fields[46])
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            memory.seek(start)
            memory.write(arguments.replace(secret.encode(), b"*" * len(secret.encode())))


def tracing_arguments(endpoint: str) -> list[str]:
    """Return the arguments with which the server sends spans of the requests that carry a trace context."""
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={UNTRACED}",
        f"opentelemetry,url={endpoint.rstrip('/')}/v1/traces",
        "opentelemetry,resource=service.name=tritonserver",
    )
    return [f"--trace-config={setting}" for setting in settings]
