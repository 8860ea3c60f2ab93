"""Rank 0 of a model that is larger than one device: starts, feeds and watches the processes of the other ranks.

Rank 0 is the process that Triton starts. Every load and every forward pass runs on all ranks at the same time; rank 0
announces it to each other rank over a socket. If a rank is lost, none can continue: rank 0 kills the others and calls
`lost`, and threads that were loading or computing never return, so no checkpoint or request gets the blame.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.errors import RankFailed
from rlhf_triton.models.out_of_memory import on_rank
from rlhf_triton.models.placement import device_of
from rlhf_triton.models.tensor_parallel import RankGroup, check_device, release
from rlhf_triton.process import RUN_MODULE, how_ended
from rlhf_triton.python_backend.serving.loaders import Model
from rlhf_triton.python_backend.serving.ranks.process import load_part
from rlhf_triton.workers.pool import interpreter

WATCHER_S = 0.2  # time for a dead rank's watcher to report the cause, before a failed forward pass is reported
STOP_S = 2.0  # time for a rank to end after its socket is closed; then it is killed


class ServingRanks:
    """The processes of ranks 1 to size - 1, and this process as rank 0."""

    def __init__(self, size: int, device: str, threads: int, lost: Callable[[str], None]) -> None:
        """Start the other ranks; return once they have joined. Call in the main thread, which must outlive them.

        Args:
            device: the model's device; see `rlhf_triton.models.placement`.
            threads: torch threads of each rank.
            lost: called once, in any thread, with the reason, if a rank ends or a forward pass fails.

        Raises:
            CheckpointError: there are not enough devices.
        """
        check_device(device_of(device, size - 1))
        self._lost = lost
        self._closing = threading.Lock()  # acquired by the first call of `close` or `_end`, and never released
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._forwards = threading.Lock()  # shared by requests and the canary row of a version that is being staged
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._unused: deque[int] = deque()  # keys of models that the other ranks can release
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        rendezvous = self._folder / "rendezvous"
        for rank in range(1, size):
            self._start(rank, [str(size), str(threads), device_of(device, rank), str(rendezvous)])
        self._group = RankGroup(0, size, device_of(device, 0), rendezvous)

    def load(self, loader: str, folder: Path, served: Model | None, options: Mapping[str, Any]) -> Any:
        """Load a model on all ranks; see `load_part`."""
        key = next(self._numbers)
        served_key = None if served is None else self._keys[served]
        try:
            self._send(op="load", key=key, loader=loader, folder=str(folder), options=options, served=served_key)
            model = load_part(self._group, loader, folder, served, options)
        except RankFailed as error:  # not the checkpoint's fault, so the caller must not reject it
            self._end(f"the ranks could not load {folder.name}: {error}")
            raise
        except Exception:
            self._unused.append(key)
            raise
        self._keys[model] = key
        weakref.finalize(model, self._release, key, model.model).atexit = False
        return model

    @contextlib.contextmanager
    def forward(self, model: Model, rows: list[np.ndarray], width: int) -> Iterator[None]:
        """Start a forward pass on the other ranks and run the block, rank 0's own. One forward pass at a time."""
        with self._forwards:
            try:
                lengths = [row.size for row in rows]
                tokens = np.concatenate(rows).astype(np.int64).tobytes()
                self._send(tokens, op="forward", key=self._keys[model], lengths=lengths, width=width)
                with on_rank(0, self._group.device, "token_budget"):
                    yield
            except Exception as error:  # whatever the cause, the ranks are now out of sync
                self._closed.wait(WATCHER_S)
                self._end(f"a forward pass failed: {type(error).__name__}: {error}")
                raise

    def close(self) -> None:
        """Stop the other ranks. Call when no forward pass is running."""
        if self._closing.acquire(blocking=False):
            self._stop(STOP_S)
            self._closed.set()

    def _start(self, rank: int, arguments: list[str]) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:  # closes this process's copy
            process = subprocess.Popen(
                [
                    interpreter(),
                    RUN_MODULE,
                    "rlhf_triton.python_backend.serving.ranks.process",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(rank),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connections.append(ours)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process, ours), name=f"rank-{rank}", daemon=True).start()

    def _send(self, *payload: bytes, **message: Any) -> None:
        """Send the other ranks a JSON message, followed by the payload."""
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        data = json.dumps({**message, "unused": unused}).encode()
        with self._sending:  # loads and forward passes are announced by different threads
            for connection in self._connections:
                try:
                    for part in (data, *payload):
                        connection.send_bytes(part)
                except OSError as error:
                    raise RankFailed(str(error)) from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        reason = f"rank {rank} (pid {process.pid}) {how_ended(process.wait())}"
        with contextlib.suppress(EOFError, OSError):  # the rank sent no reason, or this end is closed
            reason = connection.recv_bytes().decode() if connection.poll() else reason
        self._end(reason)

    def _end(self, reason: str) -> None:
        """Kill the other ranks and call `lost`, once; return only if the ranks are being closed."""
        if self._closing.acquire(blocking=False):
            self._stop(0.0)
            self._lost(reason)
        self._closed.wait()

    def _stop(self, patience_s: float) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _release(self, key: int, module: Any) -> None:
        release(module)
        self._unused.append(key)
