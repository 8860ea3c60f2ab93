"""The key for tritonserver's model-control API, which would let any client run code in the server.

It is stored next to the critic's weights, because the sidecar and all servers of a critic share that folder.
"""

import contextlib
import os
import secrets
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import staged_file

VARIABLE = "TRITON_CONTROL_KEY"
TRAINING_VARIABLE = "TRAINING_KEY"  # the container image's variable for `server.training_key_env`
KEY_FILE = "control.key"
KEY_HEADER = "rlhf-control-key"
GRPC_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"  # tritonserver matches gRPC headers with this prefix
CLOSED = "model-repository,shared-memory,trace,logging"  # the APIs that require the key

MIN_KEY_CHARACTERS = 16


def control_key(weights_dir: Path) -> str:
    """Return the key from the environment, or from the file next to `weights_dir`, which is created if missing.

    Only the file's owner can read it.

    Raises:
        OSError: the file cannot be read or written.
        RlhfError: the file does not contain a valid key.
    """
    return os.environ.get(VARIABLE) or key_in(weights_dir.parent / KEY_FILE)


def key_in(path: Path) -> str:
    """Return the key in the file `path`; if the file is missing, create it with a new key and mode 0600.

    Raises:
        OSError: the file cannot be read or written.
        RlhfError: the key in the file is too short; an empty key would admit clients without a key.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # link(2) is atomic: if several processes start at once, all use the key of the first one to link its file.
        key = secrets.token_hex(32).encode()
        with staged_file(path.parent, [key], mode=0o600) as fresh, contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    content = path.read_text().strip()
    if len(content) < MIN_KEY_CHARACTERS:
        raise RlhfError(
            f"{path} contains a key of {len(content)} characters, must be at least {MIN_KEY_CHARACTERS}; delete the "
            "file, and the next start creates a new key"
        )
    return content


def closing_arguments(key: str) -> list[str]:
    """Return the tritonserver arguments that restrict the APIs in `CLOSED` to clients with the key (HTTP and gRPC)."""
    return [
        f"--http-restricted-api={CLOSED}:{KEY_HEADER}={key}",
        f"--grpc-restricted-protocol={CLOSED}:{KEY_HEADER}={key}",
    ]
