"""The container's server: serves the image's model repository with restricted APIs. `entry_point` runs it.

Needs only the standard library, since the image contains only what serving needs. The server runs on a copy of the
repository that contains the hash of the training key, which is not known when the image is built. If `TRAINING_KEY` is
not set, a key is generated once and kept in `runs/training.key`.
"""

import compileall
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlhf_triton.store.control_key import TRAINING_VARIABLE, closing_arguments, key_in

REPOSITORY = Path("model_repository")
RUNS = Path("runs")
EXIT_TIMEOUT_S = 2  # for clients to close idle connections; `docker stop` kills after 10 s, draining included
BODY_LIMIT = "--http-max-input-size"  # from 25.06 on; the server's own limit is 64 MB, and training payloads are larger
MAX_BODY_BYTES = 256 << 20
SERVER_ARGUMENTS = (
    "--model-control-mode=explicit",
    "--load-model=*",  # all models, before the ports open: no client reaches a server without its models
    "--disable-auto-complete-config",
    "--strict-readiness=true",
    "--http-header-forward-pattern=x-triton-.*|traceparent|^[Oo]rigin$",
    "--grpc-header-forward-pattern=x-triton-.*|traceparent",
    "--allow-sagemaker=false",
    "--allow-vertex-ai=false",
)
_NO_KEY = re.compile(r'(key: "training_key_sha256" value \{ string_value: )""')
_STORE = re.compile(r'key: "store" value \{ string_value: "([^"]+)"')


def training_key(runs: Path) -> str:
    """Return the key from the environment, or else the one in `runs`, which is generated on first use."""
    key = os.environ.get(TRAINING_VARIABLE)
    if key:
        return key
    path = runs / "training.key"
    if not path.exists():
        print(f"{TRAINING_VARIABLE} is not set: training requests need the key in {path}", flush=True)
    return key_in(path)


def copy_repository(source: Path, target: Path, key: str) -> None:
    """Copy a rendered repository; add the hash of `key` to the training models that were rendered without one."""
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
    digest = hashlib.sha256(key.encode()).hexdigest()
    for path in target.glob("*/config.pbtxt"):
        path.write_text(_NO_KEY.sub(rf'\g<1>"{digest}"', path.read_text()))
    # To Triton, bytecode that is written during a load is a change of the model, which it would then load again.
    compileall.compile_dir(target, quiet=2)


def weights_dirs(repository: Path) -> dict[str, Path]:
    """Return the weights stores that `repository` names, by model: `critic`, `reward_model`."""
    configs = {model: repository / model / "config.pbtxt" for model in ("critic", "reward_model")}
    matches = {model: _STORE.search(path.read_text()) for model, path in configs.items() if path.is_file()}
    return {model: Path(store[1]) for model, store in matches.items() if store is not None}


def weights_dir(repository: Path) -> Path:
    """Return a weights store that `repository` names, the critic's if there is one; else the default folder."""
    return next(iter(weights_dirs(repository).values()), RUNS / "default" / "weights" / "critic")


def tritonserver_command(repository: Path, *, key: str, address: str, control_address: str) -> list[str]:
    """Return the command line. Model control requires `key` and works over gRPC, which listens on `control_address`."""
    ports = {"http": (address, 8000), "grpc": (control_address, 8001), "metrics": (address, 8002)}
    arguments = server_arguments(repository, key, EXIT_TIMEOUT_S, ports)
    return ["tritonserver", *arguments, f"{BODY_LIMIT}={MAX_BODY_BYTES}"]


def server_arguments(
    repository: Path, key: str, exit_timeout_s: int, ports: Mapping[str, tuple[str, int]]
) -> list[str]:
    """Return the arguments of every tritonserver that the project starts, in the image or outside.

    `ports`: address and port of `http`, `grpc` and `metrics`.
    """
    return [
        f"--model-repository={repository}",
        *SERVER_ARGUMENTS,
        f"--exit-timeout-secs={exit_timeout_s}",
        *(f"--{name}-address={address}" for name, (address, _) in ports.items()),
        *(f"--{name}-port={port}" for name, (_, port) in ports.items()),
        *closing_arguments(key),
    ]
