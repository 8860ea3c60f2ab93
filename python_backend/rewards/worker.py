"""Worker process of a reward function: `python -m python_backend.rewards.worker SPEC FD MEMORY_MIB`.

Receives the function's settings over the socket `FD`, then groups of samples, one group at a time (a group has one
sample unless the function is groupwise), and replies with what the function has counted and, for each sample, with
`{"score": …}`, `{"error": …}`, or `{}` if the function does not apply to it. A reply repeats the message's number. Ends
when its parent ends. The function runs in the main thread and may crash the process; the pool then starts another one.
"""

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
from pathlib import Path
from typing import Any

from python_backend.process import die_with_parent
from python_backend.rewards.function import (
    NOT_APPLICABLE,
    Function,
    FunctionError,
    Sample,
    checked,
    describe,
    group_scores,
    load_function,
    take_counts,
)

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
HEADER = struct.Struct("!I")  # a frame's length in bytes


def send_frame(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message: its length, then JSON. Raises TimeoutError after the socket's timeout, OSError if closed."""
    data = json.dumps(message).encode()
    channel.sendall(HEADER.pack(len(data)) + data)


def receive_frame(channel: socket.socket) -> dict[str, Any]:
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
    """Wait until the worker has ended, kill everything that it has started, and return its exit code as shells do.

    The worker cannot do this on its own: a function in an endless loop never reads the socket, and programs that the
    function has started know nothing about the socket. This process is a subreaper: it becomes the parent of every
    process below the worker that has lost its own, also in another session.
    """
    threading.Thread(target=_kill_without_server, args=(channel, worker), daemon=True).start()
    while (ended := os.wait())[0] != worker:
        pass
    with contextlib.suppress(
        OSError
    ):  # no child is left; or the kernel does not list them, and the pool kills the group
        while True:
            for children in Path("/proc/self/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)  # its children are then this process's
            os.wait()
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def _kill_without_server(channel: socket.socket, worker: int) -> None:
    """Kill the worker when the server closes its end of the socket or dies."""
    gone = select.poll()
    gone.register(channel, select.POLLRDHUP)
    while not gone.poll():
        pass
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)


def _bound_memory(memory_mib: int) -> None:
    """Limit this process's memory; a function that exceeds the limit gets MemoryError.

    Also make the kernel's OOM killer prefer this process to the server.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def score_group(function: Function, samples: list[Sample], *, groupwise: bool) -> list[dict[str, Any]]:
    """Return the score or the error of each sample."""
    try:
        scores = group_scores(function(samples), len(samples)) if groupwise else [function(samples[0])]
    except BaseException as error:  # process edge: anything the function raises, even SystemExit, fails these samples
        return [{"error": describe(error)}] * len(samples)
    return [_result(score) for score in scores]


def _result(score: Any) -> dict[str, Any]:
    try:
        return {} if score is NOT_APPLICABLE else {"score": checked(score)}
    except Exception as error:  # process edge: the score may be an object of the user's
        return {"error": describe(error)}


def main(argv: list[str]) -> int:
    """Score samples in a child process until the socket is closed; return 1 if the function cannot be imported."""
    spec, descriptor, memory_mib = argv[0], *map(int, argv[1:])
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)  # programs that the function starts must not hold the socket open
    watcher = os.getpid()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        os._exit(_watch(channel, worker))
    if not die_with_parent(watcher):
        return 1
    _bound_memory(memory_mib)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # tritonserver's threads block signals, and the mask is inherited
    own_id, settings = os.getpid(), receive_frame(channel)

    def reply(message: dict[str, Any], answer: dict[str, Any]) -> None:
        if os.getpid() != own_id:  # forked by the function, and returned from it: the worker itself replies
            os._exit(0)
        send_frame(channel, {"number": message["number"], **answer})

    try:
        function = load_function(spec, settings["options"], timeout_s=settings["timeout_s"])
    except FunctionError as error:
        reply(settings, {"error": str(error)})
        return 1
    reply(settings, {})
    while True:
        try:
            message = receive_frame(channel)
        except (EOFError, OSError):
            return 0
        samples = [Sample(**sample) for sample in message["samples"]]
        results = score_group(function, samples, groupwise=settings["groupwise"])
        reply(message, {"results": results, "counts": take_counts()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
