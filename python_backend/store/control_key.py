"""The key of tritonserver's model control: whoever has it can run code in the server.

It lies beside the critic's weights, because the sidecar and all servers of one critic share that folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

VARIABLE = "TRITON_CONTROL_KEY"
FILE = "control.key"
HEADER = "rlhf-control-key"
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"  # tritonserver expects this prefix
CLOSED = "model-repository,shared-memory,trace,logging"  # the APIs that it locks


def control_key(weights_dir: Path) -> str:
    """Return the key: the environment variable's, or the one in the folder beside `weights_dir`, made by who is first.

    Raises OSError if the file cannot be read or written: only its owner may.
    """
    return os.environ.get(VARIABLE) or key_in(weights_dir.parent / FILE)


def key_in(path: Path) -> str:
    """Return the key in a file that only its owner may read; who comes first makes it. Raises OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(fresh, path)
        fresh.unlink()
    return path.read_text().strip()


def closing_arguments(key: str) -> list[str]:
    """Arguments of tritonserver that lock what can run code or read memory, over HTTP and over gRPC."""
    return [
        f"--http-restricted-api={CLOSED}:{HEADER}={key}",
        f"--grpc-restricted-protocol={CLOSED}:{HEADER}={key}",
    ]
