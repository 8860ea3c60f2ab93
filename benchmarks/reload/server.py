"""Cores and beds of the reload benchmark; a bed is a server with a critic whose versions can be published."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks.support.children import BenchChild
from benchmarks.support.servers import SERVED, start_triton
from benchmarks.support.workload import SIZES, make_checkpoint, model_size
from python_backend.config import CriticSection, RewardSection, RunConfig, RunSection, ServerSection, TrainerSection
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC
from tools.serve import with_fixed_ports
from trainer.control_plane import ControlPlane

T = TypeVar("T")
RUN_ID = "bench"
LOWEST_PRIORITY = 19
MOST_SIZE_UNDER_LOAD = 7  # million parameters: where latencies are milliseconds
PERTURBATION = 1e-4
LOAD_TIMEOUT_S = 300.0


def under_load(models: list[str]) -> list[str]:
    """Return the models that are small enough to be reloaded under load; the first if none is."""
    return [name for name in models if model_size(name) <= MOST_SIZE_UNDER_LOAD] or models[:1]


@dataclasses.dataclass(frozen=True)
class Cores:
    """Core of each process; the trainer has the others. With two cores it shares the clients'; one is shared by all."""

    server: int
    clients: int
    trainer: tuple[int, ...]

    @classmethod
    def of_machine(cls) -> Cores:
        """Divide the cores that this process may use."""
        cores = sorted(os.sched_getaffinity(0))
        return cls(cores[0], cores[min(1, len(cores) - 1)], tuple(cores[2:] or cores[-1:]))


@contextlib.contextmanager
def on_core(*cores: int) -> Iterator[None]:
    """Pin this thread, and what it starts within, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Settings and resources that every part receives."""

    settings: argparse.Namespace
    folder: Path
    """For temporary files, which are removed when the measurement ends."""
    cores: Cores
    clients: BenchChild
    """Serves `/start` and `/stop` of `clients`."""
    say: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Timed:
    """A reload: its kind, its time (seconds on the monotonic clock), and its phases in milliseconds."""

    reload: str
    begin_s: float
    end_s: float
    """When the version was served."""
    version: int
    publish_ms: float
    verify_ms: float
    reload_ms: float


class Bed:
    """A tritonserver on its core, and a critic whose weights can be published; a context manager that stops both."""

    def __init__(self, stage: Stage, name: str, model: str, *, trainer: TrainerSection | None = None) -> None:
        from python_backend.models.modeling import load_critic, quiet_transformers  # torch: not for --help
        from trainer.publish import Publisher, initialise_store

        quiet_transformers()
        self.folder = stage.folder / f"{name}-{model}"
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
        # Publishes at low priority, as a trainer should beside clients on the same core. A thread has a priority of its
        # own; that of the whole process would be inherited by its children.
        self._publishing = ThreadPoolExecutor(1, "publisher", initializer=_step_back)
        with on_core(stage.cores.server):
            self.server = start_triton(self.config)

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self._publishing.shutdown()
        self.server.stop()
        for heavy in ("checkpoint", "weights", "journal", "checkpoints", "backends"):
            shutil.rmtree(self.folder / heavy, ignore_errors=True)

    @property
    def url(self) -> str:
        """`host:port` of inference."""
        return self.config.server.http_url

    def failed_requests(self) -> int:
        """Return the requests that the server counts as failed since it started."""
        with ControlPlane(self.config.server.grpc_url) as control:
            return control.statistics(CRITIC).failure_count

    def publish(self) -> Timed:
        """Change the critic's weights a little, publish them and wait until they are served."""
        return self.as_publisher(self._publish)

    def triton_reload(self) -> Timed:
        """Let Triton replace the critic's process."""
        return self.as_publisher(self._triton_reload)

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` on the publisher's core, at its priority, with its one torch thread."""
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
