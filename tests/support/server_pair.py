"""Two tritonservers on one weights store and one journal, behind one sidecar; tests may kill and start each of them.
Given: a folder and checkpoints. Returns: a `Pair`, its first server and the sidecar at work.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from live_system import Checkpoints, LiveRun, System, make_run, start_system, stop_process, wait_for

from python_backend.config import load_config
from tools.server.child import Child


class Pair:
    """The first server with its sidecar, and a second server on the same store."""

    def __init__(self, folder: Path, checkpoints: Checkpoints, **sections: Mapping[str, Any]) -> None:
        """`sections`: of the YAML, merged over small settings."""
        self.other = make_run(folder / "second", checkpoints, **sections)
        run = make_run(folder / "first", checkpoints, **sections)
        servers = [run.config.server.grpc_url, self.other.config.server.grpc_url]
        run.path.write_text(run.path.read_text().replace("trainer:\n", f"trainer:\n  servers: {servers}\n"))
        self.run = LiveRun(run.path, load_config(run.path))
        self.first: System = start_system(self.run)
        self.second: Child | None = None
        # The second machine sees the same volume; its repository is the one that was rendered for the first.
        for name in ("weights", "journal", "model_repository"):
            (self.other.config.run.dir / name).symlink_to(self.run.config.run.dir / name)

    def start_first(self) -> None:
        """The server alone, which must have been killed; the sidecar is there."""
        self.first.server = _start(self.run)

    def start_second(self) -> None:
        """The server, which must not be there."""
        self.second = _start(self.other)

    def kill_first(self) -> None:
        """All of it at once, as when a machine goes away; the sidecar stays."""
        _kill(self.first.server)

    def kill_second(self) -> None:
        """All of it at once, as when a machine goes away."""
        assert self.second is not None
        _kill(self.second)

    def stop(self) -> None:
        """Everything."""
        if self.second is not None:
            stop_process(self.second)
        self.first.stop()


def _start(run: LiveRun) -> Child:
    state = run.config.run.dir / "server.json"
    state.unlink(missing_ok=True)
    server = run.start("server", module="serve_rendered", PYTHONPATH=str(Path(__file__).parent))
    try:
        wait_for(state.is_file, server)
    except BaseException:
        stop_process(server)
        raise
    return server


def _kill(server: Child) -> None:
    whole = [psutil.Process(server.process.pid)]
    whole += whole[0].children(recursive=True)
    for process in whole:
        process.send_signal(signal.SIGKILL)
    server.process.wait()
    for process in whole:
        process.wait(10)
