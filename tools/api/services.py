"""Serves a reward and a critic in processes of their own (`serve`), with clients for them."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_triton.client.critic import CriticClient
from rlhf_triton.client.reward import RewardClient
from rlhf_triton.config.loading import load_config
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.run_lock import only_server
from rlhf_triton.tools.api.live_line import LiveLine
from rlhf_triton.tools.api.runs import FolderPath
from rlhf_triton.tools.api.sections import Sections, new_folder
from rlhf_triton.tools.server.child import LIBRARY_ENV, Child
from rlhf_triton.tools.server.server_log import error_in

SERVE_YAML = "serve.yaml"
POLL_S = 0.1
STOP_S = 90.0


def serve(
    reward: Any = None, critic: FolderPath | None = None, *, dir: FolderPath | None = None, **settings: Any
) -> "Services":
    """Serve a reward, a critic or both; return when they are ready. The servers stop when this process ends.

    Args:
        reward: the folder of a reward model, or its name on the Hugging Face hub; a reward function; or a list, as in
            `train`.
        critic: the folder of the model that the critic starts from; a sidecar trains it.
        dir: folder of the logs and weights; default: the first free `runs/serve-N`. A folder that has served before
            resumes its critic.
        settings: further keys of the YAML, such as `**{"critic.token_budget": 4096}`, or sections. Ports are free ones
            by default.

    Raises:
        RlhfError: what `rlhf-triton serve` refuses, with its sentence, or why a process failed.
    """
    if reward is None and critic is None and not settings:
        raise RlhfError("serve: give a reward, a critic, or both")
    with new_folder(dir, "serve") as folder:
        sections = Sections(folder)
        sections.set_once("run.dir", folder)
        sections.set_rewards(reward)
        sections.set_model("critic.model", critic)
        for key, value in settings.items():
            sections.set(key, value)
        config = sections.check("rlhf_triton.serve")
        with only_server(config.server_dir):
            sections.write(folder / SERVE_YAML)
    return Services(folder / SERVE_YAML)


class Services:
    """The processes that `serve` has started. Leaving the context stops them."""

    config_path: Path
    """The YAML, for `rlhf-triton serve --config`."""
    url: str
    """`host:port` of the server's HTTP port."""
    log_path: Path
    """The server's log; the sidecar's, `sidecar.log`, is beside it."""

    def __init__(self, config_path: Path) -> None:
        """Start the processes. Raises RlhfError if one fails; none is then left running."""
        config = load_config(config_path)
        self.config_path = config_path
        self.log_path = config.run.logs_dir / "serve.log"
        self._config = config
        self._children: list[Child] = []
        self._starter = ThreadPoolExecutor(1, "services")  # a child ends with the thread that has started it
        journal = Journal(config.run.journal_dir, config.run.identity)
        state = config.server_file
        before = read_json(state)  # left by a server that was killed
        try:
            with LiveLine() as line:
                line.show("starting the server")
                command = ["rlhf_triton.tools", "serve"]
                self._start("server", command, self.log_path, lambda: read_json(state) not in (None, before))
                self.url = config.server_url("http")
                if config.serves_critic:
                    line.show("starting the critic's sidecar")
                    log = self.log_path.with_name("sidecar.log")
                    self._start("critic sidecar", ["rlhf_triton.trainer"], log, journal.is_followed)
                line.show(f"serving on {self.url}")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @cached_property
    def reward(self) -> RewardClient:
        """A client of the reward."""
        return RewardClient(self.url)

    @cached_property
    def critic(self) -> CriticClient:
        """A client of the critic; call `rewind(0)` before the first training step."""
        key = self._config.server.training_key_env
        return CriticClient(
            self.url, run_id=self._config.run.identity, training_key=None if key is None else os.environ.get(key)
        )

    def stop(self) -> None:
        """Stop the processes: the sidecar, which writes a checkpoint, then the server, which drains first."""
        for name in ("reward", "critic"):
            if name in vars(self):
                vars(self).pop(name).close()
        while self._children:
            self._children.pop().stop(signal.SIGTERM, STOP_S)
        self._starter.shutdown()

    def _start(self, name: str, module: list[str], log: Path, is_ready: Callable[[], bool]) -> None:
        """Start a process and wait until it is ready. Raises RlhfError if it ends before."""
        arguments = [*module, "--config", str(self.config_path)]
        child = self._starter.submit(Child, name, arguments, log, LIBRARY_ENV).result()
        self._children.append(child)
        while not is_ready():
            if child.poll() is not None:
                raise RlhfError(error_in(log) or child.exit_message())
            time.sleep(POLL_S)
