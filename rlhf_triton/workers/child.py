"""The child's side of a worker process: message frames, and a watcher that kills everything that the worker starts."""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.process import die_with_parent
from rlhf_triton.user_code import keep_sources

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
HEADER = struct.Struct("!I")  # a frame's length in bytes
MEMORY_BYTES = 4 << 30  # user code that needs more gets MemoryError

WorkerMessage = dict[str, Any]  # a call, or its answer


def frame(message: WorkerMessage) -> bytes:
    """Encode a message: its length, then JSON."""
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> WorkerMessage:
    """Receive one message. Raises IncompleteReadError or OSError if the other side has closed the socket."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return json.loads(await reader.readexactly(size))


def receive_frame(channel: socket.socket) -> WorkerMessage:
    """Receive one message. Raises EOFError or OSError if the other side has closed the socket."""
    (size,) = HEADER.unpack(_receive(channel, HEADER.size))
    return json.loads(_receive(channel, size))


def _receive(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _watch(channel: socket.socket, worker: int) -> int:
    """Wait until the worker has ended and kill everything that it has started; return its exit code as shells do.

    The worker cannot do this itself: user code in an endless loop never reads the socket, and programs that it has
    started do not know the socket. This process is a subreaper: it becomes the parent of all orphaned descendants of
    the worker, even in other sessions.
    """
    threading.Thread(target=_kill_without_parent, args=(channel, worker), daemon=True).start()
    while (ended := os.wait())[0] != worker:
        pass
    # No child is left, or the kernel does not list children: then the parent kills the group.
    with contextlib.suppress(OSError):
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)  # its children become this process's
            os.wait()
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def _kill_without_parent(channel: socket.socket, worker: int) -> None:
    """Kill the worker when its parent closes its end of the socket or dies."""
    gone = select.poll()
    gone.register(channel, select.POLLRDHUP)
    while not gone.poll():
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


class Parent:
    """A worker's connection to the process that started it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Fork: this process becomes the watcher, and the constructor returns only in the new process, the worker.

        `arguments`: SPEC FD. Exits if the parent has already ended. Receives `settings`, the first message.
        """
        self.spec = arguments[0]
        self.channel = socket.socket(fileno=int(arguments[1]))
        self.channel.set_inheritable(False)  # programs that the user's code starts must not hold the socket open
        watcher = os.getpid()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        worker = os.fork()
        if worker:
            os._exit(_watch(self.channel, worker))
        if not die_with_parent(watcher):
            sys.exit(1)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        with contextlib.suppress(OSError):  # the kernel's OOM killer prefers this process to its parent
            Path("/proc/self/oom_score_adj").write_text("1000")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # tritonserver's threads block signals; the mask is inherited
        self._own_id = os.getpid()
        self.settings = receive_frame(self.channel)
        keep_sources(self.settings.pop("sources"))

    def end_forks(self) -> None:
        """End this process if it is a fork from which user code has returned: only the worker itself may reply."""
        if os.getpid() != self._own_id:
            os._exit(0)

    def reply(self, message: WorkerMessage, answer: WorkerMessage) -> None:
        """Send the answer to a message, with the message's number."""
        self.end_forks()
        self.channel.sendall(frame({"number": message["number"], **answer}))
