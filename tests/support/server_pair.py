"""Two tritonservers on one weights store and one journal, with one sidecar; tests may kill and start each of them."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from live_system import Checkpoints, LiveRun, System, make_run, start_system, stop_process, wait_for

from rlhf_triton.config import load_config
from rlhf_triton.tools.server.child import Child


class Pair:
    """A running server with its sidecar, and a second server on the same store, which is not started yet."""

    def __init__(self, folder: Path, checkpoints: Checkpoints, **sections: Mapping[str, Any]) -> None:
        """`sections` of the YAML are merged over small settings."""
        self.other = make_run(folder / "second", checkpoints, **sections)
        run = make_run(folder / "first", checkpoints, **sections)
        servers = [run.config.server.grpc_url, self.other.config.server.grpc_url]
        run.path.write_text(run.path.read_text().replace("trainer:\n", f"trainer:\n  servers: {servers}\n"))
        self.run = LiveRun(run.path, load_config(run.path))
        self.first: System = start_system(self.run)
        self.second: Child | None = None
        # As on a second machine with the same volume; it uses the repository rendered for the first.
        for name in ("weights", "journal", "model_repository"):
            (self.other.config.run.dir / name).symlink_to(self.run.config.run.dir / name)

    def start_first(self) -> None:
        """Start the first server again, after `kill_first`; the sidecar still runs."""
        self.first.server = _start(self.run)

    def start_second(self) -> None:
        """Start the second server, which must not be running."""
        self.second = _start(self.other)

    def drain_first(self) -> str:
        """Stop the first server as a rolling update does, and start its successor; return what it logged."""
        log = _drain(self.first.server)
        self.start_first()
        return log

    def drain_second(self) -> str:
        """Do the same with the second server, which must be running."""
        assert self.second is not None
        log = _drain(self.second)
        self.start_second()
        return log

    def kill_first(self) -> None:
        """Kill all processes of the first server at once, as if its machine failed; the sidecar stays."""
        _kill(self.first.server)

    def kill_second(self) -> None:
        """Kill all processes of the second server at once, as if its machine failed."""
        assert self.second is not None
        _kill(self.second)

    def stop(self) -> None:
        """Stop both servers and the sidecar."""
        if self.second is not None:
            stop_process(self.second)
        self.first.stop()


def _start(run: LiveRun) -> Child:
    state = run.config.run.dir / "server.json"
    state.unlink(missing_ok=True)
    server = run.start("server", module="serve_rendered", PYTHONPATH=str(Path(__file__).parent))
    try:
        wait_for(state.is_file, server, timeout_s=300.0)
    except BaseException:
        stop_process(server)
        raise
    return server


def _drain(server: Child) -> str:
    assert server.stop(signal.SIGTERM, 120.0) == 0
    return server.log_path.read_text()


def _kill(server: Child) -> None:
    whole = [psutil.Process(server.process.pid)]
    whole += whole[0].children(recursive=True)
    for process in whole:
        process.send_signal(signal.SIGKILL)
    server.process.wait()
    for process in whole:
        process.wait(120)
