"""What every part of the reload benchmark runs: clients, and a server whose model has new versions published."""

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
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from benchmarks.support.children import SERVED, BenchChild, running_triton
from benchmarks.support.samples import Sample
from benchmarks.support.workload import SIZES, make_checkpoint, model_size
from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.config import RunConfig, TrainerSection
from python_backend.config.live_models import live_model
from python_backend.store.weights import WeightsStore
from tools.serve import with_fixed_ports
from trainer.control_plane import ControlPlane

if TYPE_CHECKING:
    from trainer.publish import Publisher, Reload

T = TypeVar("T")
RUN_ID = "bench"
LOWEST_PRIORITY = 19
PERTURBATION = 1e-4
LOAD_TIMEOUT_S = 300.0
MOST_SIZE_UNDER_LOAD = 7  # million parameters; latencies of larger models are too long


def under_load(models: list[str]) -> list[str]:
    """Return the models that are small enough to be reloaded under load; the first model if none is."""
    return [name for name in models if model_size(name) <= MOST_SIZE_UNDER_LOAD] or models[:1]


@dataclasses.dataclass(frozen=True)
class Cores:
    """Cores of server, clients and trainer; the trainer has all cores but two.

    With two cores the trainer shares the clients' core; with one, all share it.
    """

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
    """Pin this thread, and the threads and processes that it starts in the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclasses.dataclass(frozen=True)
class ReloadSetup:
    """Settings and resources that every part receives."""

    settings: argparse.Namespace
    folder: Path
    """Folder for temporary files, which are removed when the measurement ends."""
    cores: Cores
    clients: BenchChild
    """Process that runs `clients.serve`."""
    say: Callable[[str], None]


class CriticService:
    """Context manager: runs a tritonserver on its own core, and a critic whose weights can be published to it."""

    name = "critic"
    """Name of the model whose weights are published."""
    sections: ClassVar[dict[str, Any]] = {}
    """Further sections of the configuration, merged over those of a critic."""

    def __init__(self, setup: ReloadSetup, name: str, model: str, *, trainer: TrainerSection | None = None) -> None:
        from python_backend.models.modeling import quiet_transformers  # torch: not for --help
        from trainer.publish import initialise_stores

        quiet_transformers()
        self.folder = setup.folder / f"{name}-{model}"
        shutil.rmtree(self.folder, ignore_errors=True)
        checkpoint = self.folder / "checkpoint"
        self.num_parameters = make_checkpoint(SIZES[model], checkpoint)
        served = {"checkpoint": checkpoint, **SERVED}
        sections = {
            "run": {"dir": self.folder, "run_id": RUN_ID},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 1},
            "reward": {**served, "store": self.name == "reward"},
            "critic": served,
            "trainer": trainer or TrainerSection(serve_timeout_s=LOAD_TIMEOUT_S),
            **self.sections,
        }
        self.config = with_fixed_ports(RunConfig.model_validate(sections))
        initialise_stores(self.config)
        self.live = live_model(self.config, self.name)
        self.store = WeightsStore(self.live.store)
        self.prepare()
        self._step = 0
        # Publishes at low priority, as a trainer should if it shares a core with clients. Only this thread has the low
        # priority, since child processes would inherit the priority of the whole process.
        self._publishing = ThreadPoolExecutor(1, "publisher", initializer=_step_back)
        self._stack = contextlib.ExitStack()
        with on_core(setup.cores.server):
            self._stack.enter_context(running_triton(self.config))

    def __enter__(self) -> CriticService:
        return self

    def __exit__(self, *_: object) -> None:
        self._publishing.shutdown()
        self._stack.close()
        for heavy in ("checkpoint", "second", "weights", "journal", "checkpoints", "backends"):
            shutil.rmtree(self.folder / heavy, ignore_errors=True)

    @property
    def url(self) -> str:
        """`host:port` for inference over HTTP."""
        return self.config.server.http_url

    def failed_requests(self) -> int:
        """Return the number of requests to the model that have failed since the start, by the server's own count."""
        with ControlPlane(self.config.server.grpc_url) as control:
            return control.statistics(self.live.served_as).failure_count

    def publish(self) -> Sample:
        """Change the model's weights a little, publish them and wait until they are served; see `_sample`."""
        return self.as_publisher(self._publish)

    def triton_reload(self) -> Sample:
        """Let Triton replace the model's process; see `_sample`."""
        return self.as_publisher(self._triton_reload)

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` in the publisher's thread, with its core, priority and single torch thread; return the result."""
        return self._publishing.submit(do).result()

    def prepare(self) -> None:
        """Load the model that is published."""
        from python_backend.models.modeling import load_critic

        self.critic = load_critic(self.store.folder(0))
        self.critic.own_weights()

    def publisher(self) -> Publisher:
        """Return a publisher to the server."""
        from trainer.publish import Publisher

        return Publisher.of(self.config, self.store, run_id=RUN_ID, epoch=1, model=self.live)

    def _publish(self) -> Sample:
        import torch

        self._step += 1
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(PERTURBATION)
        begin = time.monotonic()
        done = self.publisher().publish(self.critic, step=self._step, beat=lambda state: None)
        return _sample(done, begin, begin + _seconds(done))

    def _triton_reload(self) -> Sample:
        begin = time.monotonic()
        done = self.publisher().triton_reload()
        return _sample(done, begin, time.monotonic())


class RewardService(CriticService):
    """The same with a reward model and without a critic; versions are published as by `tools weights publish`."""

    name = "reward"
    sections: ClassVar[dict[str, Any]] = {"actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 2}}}

    def prepare(self) -> None:
        """Write a second checkpoint with other weights; the two are published alternately."""
        import torch
        from safetensors.torch import load_file, save_file

        first, second = self.config.reward.checkpoint, self.folder / "second"
        shutil.copytree(first, second)
        tensors = load_file(second / WEIGHTS_FILE)
        tensors["score.weight"] += PERTURBATION * torch.ones_like(tensors["score.weight"])
        save_file(tensors, second / WEIGHTS_FILE, metadata={"format": "pt"})
        self._checkpoints = first, second

    def _publish(self) -> Sample:
        from trainer.live.reward import publish_reward

        self._step += 1
        done = publish_reward(self.config, self._checkpoints[self._step % 2], beat=lambda state: None)
        # Only from here on: before, it has loaded the served version and the checkpoint, to compare them.
        end = time.monotonic()
        return _sample(done, end - _seconds(done), end)


SERVICES = {service.name: service for service in (CriticService, RewardService)}


def _seconds(done: Reload) -> float:
    return (done.publish_ms + done.verify_ms + done.reload_ms) / 1e3


def _sample(done: Reload, begin_s: float, end_s: float) -> Sample:
    """Return the timings of a reload, with its begin and the time from which it was served, on the monotonic clock."""
    timings = {key: getattr(done, key) for key in ("reload", "version", "publish_ms", "verify_ms", "reload_ms")}
    return {**timings, "begin_s": begin_s, "end_s": end_s}


def _step_back() -> None:
    import torch

    torch.set_num_threads(1)  # torch keeps a part of this setting per thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
