"""The image's entry point: serves its model repository, and drains the server when stopped.

Runs tritonserver as a child process, because tritonserver itself does not drain. Needs only the standard library and
numpy, as the image's other commands do.
"""

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from rlhf_triton.process import StopSignals
from rlhf_triton.store.control_key import control_key
from rlhf_triton.tools.server.child import start_bound
from rlhf_triton.tools.server.container import (
    REPOSITORY,
    RUNS,
    copy_repository,
    training_key,
    tritonserver_command,
    weights_dir,
)
from rlhf_triton.tools.server.drain import main as drain

POLL_INTERVAL_S = 0.1


def main() -> int:
    """Serve until tritonserver ends, or SIGTERM or SIGINT arrives; return tritonserver's exit code.

    TRITON_ADDRESS and TRITON_CONTROL_ADDRESS set the addresses to bind. A second signal ends the wait for requests.
    """
    stop = StopSignals()  # first: to process 1, signals without a handler do nothing
    os.umask(0o077)  # the journal, and possibly the logs, contain prompts and responses
    command = _command()
    if stop.count:
        return 0
    server = start_bound(command, sys.stdout.buffer, os.environ)
    while server.poll() is None and not stop.count:
        time.sleep(POLL_INTERVAL_S)
    if server.poll() is None:
        drain(give_up=lambda: stop.count > 1)
        server.terminate()
    code = server.wait()
    return code if code >= 0 else 128 - code  # as shells do: 128 + N after signal N


def _command() -> list[str]:
    repository = Path(tempfile.mkdtemp(prefix="model_repository-"))
    copy_repository(REPOSITORY, repository, training_key(RUNS))
    return tritonserver_command(
        repository,
        key=control_key(weights_dir(repository)),
        address=_address("TRITON_ADDRESS"),
        control_address=_address("TRITON_CONTROL_ADDRESS"),
    )


def _address(variable: str) -> str:
    """Return the address in an environment variable; names are resolved, because tritonserver resolves none."""
    host = os.environ.get(variable, "127.0.0.1")
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        sys.exit(f"error: {variable}: {host!r} has no IPv4 address ({error.strerror}); set it to one, such as 0.0.0.0")


if __name__ == "__main__":
    sys.exit(main())
