"""Worker processes that run user code, for reward functions, environments and agents.

A call is a message and an answer with the same number, in frames over a socket (see `child.py`). A worker that ends,
sends anything else, or exceeds a call's time limit is killed with everything that it has started; its other calls are
lost, and the next caller gets a new worker.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.errors import FunctionError, RlhfError
from rlhf_triton.process import RUN_MODULE, how_ended
from rlhf_triton.user_code import read_sources
from rlhf_triton.workers.child import WorkerMessage, frame, read_frame

# Secrets of the run itself, which user code inherits only if its own option names them.
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN")
START_LIMIT_S = 60.0  # time limit for the interpreter and the imports of the user's code
KILL_LIMIT_S = 10.0  # time limit for a worker's watcher, which programs that fork fast could keep busy
WAIT_S = 0.05, 1.0  # shortest and longest interval for reading a call's clock, which need not advance


class Worker:
    """A process that runs the child's MODULE with arguments SPEC FD, and the calls that wait for its answers."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.load = 0  # set by callers: number of calls or instances
        self.is_ready = False  # True once the worker has imported the user's code
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[WorkerMessage]] = {}
        self._end = ""
        self.ended = asyncio.create_task(self._receive())

    def is_usable(self) -> bool:
        """Return whether the worker can take another call."""
        return self.is_ready and self._process.poll() is None

    async def ask(
        self,
        message: Mapping[str, Any],
        limit_s: float,
        clock: Callable[[], float] | None = None,
        *,
        limit_key: str = "",
    ) -> WorkerMessage:
        """Send a message and return the worker's answer; kill the process after `limit_s`.

        If the worker does not answer, the answer has `error`, and `lost` if the process has ended through no fault of
        this call.

        Args:
            clock: returns the time in seconds for the limit; it may stand still at times.
            limit_key: the configuration key of the limit, for the message.
        """
        if self._end:
            return {"error": self._end, "lost": True}
        clock = clock or time.monotonic
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        end = clock() + limit_s
        self._writer.write(frame({**message, "number": number}))
        while not future.done() and (remaining_s := end - clock()) > 0:
            await asyncio.wait([future], timeout=min(max(remaining_s, WAIT_S[0]), WAIT_S[1]))
        if future.done():
            return future.result()
        self.kill(f"the worker process was killed, because another call took longer than {limit_s:g} s")
        remedy = f"; raise {limit_key}, or import at the top of the file" if limit_key else ""
        return {"error": f"took longer than {limit_s:g} s and was killed{remedy}"}

    def kill(self, why: str = "") -> None:
        """Start killing the process and everything that it has started; `ended` is done when all have ended."""
        self.is_ready = False
        self._end = self._end or why
        self._writer.transport.abort()  # makes the watcher kill and reap everything

    async def _receive(self) -> None:
        """Deliver answers until the socket is closed or an invalid one arrives; then kill and reap the process."""
        try:
            while True:
                answer = await read_frame(self._reader)
                future = self._pending.pop(answer["number"])
                if not future.done():  # otherwise the caller has been cancelled
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:  # user code can write to the socket: anything invalid ends the worker
            self._end = "the worker process sent an invalid answer"
        self.kill()
        how = await asyncio.to_thread(self._reap)
        self._end = self._end or how
        for future in self._pending.values():
            if not future.done():
                future.set_result({"error": self._end, "lost": True})

    def _reap(self) -> str:
        """Wait until the process and everything that it has started have ended; return how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # in case the watcher was killed or hangs
        code = self._process.wait()
        return f"the worker process {how_ended(code if code <= 128 else 128 - code)}"


class Workers:
    """A number of workers for the same code. All methods must be called on one event loop."""

    def __init__(
        self,
        module: str,
        spec: str,
        settings: Mapping[str, Any],
        *,
        number: int,
        others: Iterable[str] = (),
        hidden_variables: Iterable[str] = (),
        own_variable: str | None = None,
    ) -> None:
        """
        Args:
            module: the child's side.
            spec: the user's code, as `path/to/file.py:name` or `package.module:name`.
            settings: first message to each worker, which answers it when it has imported the code.
            others: further code that the child imports, in the form of `spec`.
            hidden_variables: environment variables that the workers do not inherit, in addition to the secrets of every
                run.
            own_variable: a hidden variable that they inherit nevertheless.
        """
        self._module = module
        self._spec = spec
        # As the files are now, so that a worker that replaces another runs the same code, whoever edits them meanwhile.
        self._settings = {**settings, "sources": read_sources([spec, *others])}
        self._number = number
        hidden = {*hidden_variables, *SECRETS} - {own_variable}
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._workers: list[Worker] = []  # includes workers that are ending
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def least_loaded(self) -> Worker:
        """Start missing workers, then return the worker with the lowest load.

        Raises FunctionError if a worker cannot be started.
        """
        async with self._starting:
            self._workers = [worker for worker in self._workers if not worker.ended.done()]
            missing = self._number - sum(worker.is_usable() for worker in self._workers)
            await asyncio.gather(*(self._start_one() for _ in range(missing)))
        usable = [worker for worker in self._workers if worker.is_usable()]
        # If all have died since, choose the last one: its answer says how it ended.
        return min(usable or self._workers[-1:], key=lambda worker: worker.load)

    async def close(self) -> None:
        """Kill all workers; unanswered calls are lost."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill("its workers have been killed")
        if self._workers:
            await asyncio.wait([worker.ended for worker in self._workers])

    async def _start_one(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:  # closes this process's copy; otherwise the socket would not report the worker's end
            streams = await asyncio.open_connection(sock=ours)
            if self._is_closed:
                streams[1].transport.abort()
                raise FunctionError(f"{self._spec}: its workers have been killed")
            # Nothing is awaited from here until `close` knows the worker, as a start may be cancelled at each await.
            process = subprocess.Popen(
                [interpreter(), RUN_MODULE, self._module, self._spec, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,  # a separate process group, for `_reap`
            )
        worker = Worker(process, *streams)
        self._workers.append(worker)
        try:
            answer = await worker.ask(self._settings, START_LIMIT_S)
            worker.is_ready = answer.get("ready", False)
        finally:
            if not worker.is_ready:  # also if this coroutine was cancelled
                worker.kill()
        if not worker.is_ready:
            cause = answer.get("refused") or f"{self._spec} cannot be imported: {answer['error']}"
            raise FunctionError(cause)


def interpreter() -> str:
    """Return the path of a Python interpreter for child processes.

    In Triton's stub process, `sys.executable` may be the stub, or empty.
    """
    if sys.executable and Path(sys.executable).name.startswith("python"):
        return sys.executable
    path = shutil.which("python3")
    if path is None:
        raise RlhfError("there is no python3 on PATH, which child processes need; install it, or correct PATH")
    return path
