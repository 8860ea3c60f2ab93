"""Starts the project's server and sidecar for benchmarks, optionally with a model replaced."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.children import wait_until
from python_backend.config import RunConfig
from python_backend.store.durable import write_json
from python_backend.store.journal import Journal
from tools.render_configs import render_repository
from tools.run import LIBRARY_ENV
from tools.serve import serve_rendered
from tools.server.child import Child
from tools.server.tritonserver import TritonServer

SERVED: dict[str, Any] = {
    "workers": 1,
    "threads": 1,
    "token_budget": 256,
    "forward_overhead_tokens": 64,
}
STOP_TIMEOUT_S = 60.0


def start_triton(config: RunConfig, change: Callable[[Path], None] = lambda repository: None) -> TritonServer:
    """Start a tritonserver on the run's repository, after applying `change` to it, and wait until it is ready."""
    render_repository(config, config.run.repository_dir)
    change(config.run.repository_dir)
    return serve_rendered(config, log=lambda line: None)


def replace_model(repository: Path, model: str, kind: str, **parameters: str) -> None:
    """Let `model` run the class `kind` of `served_models`, and add `parameters` to its config.pbtxt."""
    config = repository / model / "config.pbtxt"
    added = [f'parameters {{ key: "{k}" value {{ string_value: "{text}" }} }}\n' for k, text in parameters.items()]
    config.write_text(config.read_text() + "".join(added))
    source = f"from benchmarks.support.served_models import {kind} as TritonPythonModel  # noqa: F401\n"
    (repository / model / "1" / "model.py").write_text(source)


@contextlib.contextmanager
def running_sidecar(config: RunConfig, command: Callable[[str], list[str]] | None = None) -> Iterator[Child]:
    """Run the sidecar, or `python -m` with the arguments `command(its YAML)`; yield once it follows the journal."""
    path = config.run.dir / "sidecar.yaml"
    write_json(path, config.model_dump(mode="json", exclude_none=True), durable=False)  # JSON is YAML
    environment = {**LIBRARY_ENV, "OMP_NUM_THREADS": "1"}
    arguments = ["trainer", "--config", str(path)] if command is None else command(str(path))
    child = Child("sidecar", arguments, config.run.logs_dir / "sidecar.log", environment)
    try:
        journal = Journal(config.run.journal_dir, config.run.identity)
        wait_until(journal.is_followed, child)
        yield child
    finally:
        child.stop(signal.SIGINT, STOP_TIMEOUT_S)
