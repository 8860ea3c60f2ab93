"""The server of the reload benchmark, with a critic whose versions can be published."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from benchmarks.reload.setup import ReloadSetup, on_core
from benchmarks.support.servers import SERVED, start_triton
from benchmarks.support.workload import SIZES, make_checkpoint
from python_backend.config import CriticSection, RewardSection, RunConfig, RunSection, ServerSection, TrainerSection
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC
from tools.serve import with_fixed_ports
from trainer.control_plane import ControlPlane

T = TypeVar("T")
RUN_ID = "bench"
LOWEST_PRIORITY = 19
PERTURBATION = 1e-4
LOAD_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Timed:
    """A reload: its kind, begin and end (seconds on the monotonic clock), and the duration of its phases."""

    reload: str
    begin_s: float
    end_s: float
    """Time at which the new version was served."""
    version: int
    publish_ms: float
    verify_ms: float
    reload_ms: float


class CriticService:
    """Context manager: runs a tritonserver on its own core, and a critic whose weights can be published to it."""

    def __init__(self, setup: ReloadSetup, name: str, model: str, *, trainer: TrainerSection | None = None) -> None:
        from python_backend.models.modeling import load_critic, quiet_transformers  # torch: not for --help
        from trainer.publish import Publisher, initialise_store

        quiet_transformers()
        self.folder = setup.folder / f"{name}-{model}"
        shutil.rmtree(self.folder, ignore_errors=True)
        checkpoint = self.folder / "checkpoint"
        self.num_parameters = make_checkpoint(SIZES[model], checkpoint)
        self.config = with_fixed_ports(
            RunConfig(
                run=RunSection(dir=self.folder, run_id=RUN_ID),
                server=ServerSection(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1),
                reward=RewardSection(checkpoint=checkpoint, **SERVED),
                critic=CriticSection(checkpoint=checkpoint, **SERVED),
                trainer=trainer or TrainerSection(),
            )
        )
        self.store = WeightsStore(self.config.run.weights_dir)
        initialise_store(self.store, self.config.critic, run_id=RUN_ID)
        self.critic = load_critic(self.store.folder(0))
        self.critic.own_weights()
        self._publisher = Publisher(
            self.store, run_id=RUN_ID, epoch=1, servers=[self.config.server.grpc_url], reload="swap",
            timeout_s=LOAD_TIMEOUT_S, keep=3,
        )  # fmt: skip
        self._step = 0
        # Publishes at low priority, as a trainer should if it shares a core with clients. Only this thread has the low
        # priority, since child processes would inherit the priority of the whole process.
        self._publishing = ThreadPoolExecutor(1, "publisher", initializer=_step_back)
        with on_core(setup.cores.server):
            self.server = start_triton(self.config)

    def __enter__(self) -> CriticService:
        return self

    def __exit__(self, *_: object) -> None:
        self._publishing.shutdown()
        self.server.stop()
        for heavy in ("checkpoint", "weights", "journal", "checkpoints", "backends"):
            shutil.rmtree(self.folder / heavy, ignore_errors=True)

    @property
    def url(self) -> str:
        """`host:port` for inference over HTTP."""
        return self.config.server.http_url

    def failed_requests(self) -> int:
        """Return the number of critic requests that have failed since the server started, by the server's own count."""
        with ControlPlane(self.config.server.grpc_url) as control:
            return control.statistics(CRITIC).failure_count

    def publish(self) -> Timed:
        """Change the critic's weights a little, publish them and wait until they are served; return the timing."""
        return self.as_publisher(self._publish)

    def triton_reload(self) -> Timed:
        """Let Triton replace the critic's process; return the timing."""
        return self.as_publisher(self._triton_reload)

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` in the publisher's thread, with its core, priority and single torch thread; return the result."""
        return self._publishing.submit(do).result()

    def _publish(self) -> Timed:
        import torch

        self._step += 1
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(PERTURBATION)
        begin = time.monotonic()
        done = self._publisher.publish(self.critic, step=self._step, beat=lambda state: None)
        end = begin + (done.publish_ms + done.verify_ms + done.reload_ms) / 1e3
        return Timed("swap", begin, end, done.version, done.publish_ms, done.verify_ms, done.reload_ms)

    def _triton_reload(self) -> Timed:
        begin = time.monotonic()
        done = self._publisher.triton_reload()
        return Timed("triton", begin, time.monotonic(), done.version, 0.0, 0.0, done.reload_ms)


def _step_back() -> None:
    import torch

    torch.set_num_threads(1)  # torch keeps a part of this setting per thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
