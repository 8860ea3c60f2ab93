"""Benchmark of the critic's reloads: their cost for clients, and the time until a version is served.

Part a: failures and p99 of clients during swaps and Triton reloads. Part b: time until a written version is served by a
swap, against the unavoidable steps alone. Server and clients have one core each, the trainer has the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from benchmarks.measuring import (
    FREE_PORTS,
    SIZES,
    Measurement,
    Record,
    make_checkpoint,
    make_trace,
    running_triton,
    timed,
)
from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.client.model_servers import ModelServers
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.store.control_key import control_key
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.server.health import count_failures
from rlhf_triton.tools.server.ports import with_free_ports
from rlhf_triton.wire.contract import CRITIC, VALUES, WEIGHTS_VERSION

T = TypeVar("T")
RUN_ID = "bench"
SERVED = {"threads": 1, "token_budget": 256}
# kinds of blocks; the first two are kinds of reloads, too
SWAP = "swap"
TRITON = "triton"
QUIET = "quiet"
SWAPS = 8  # of a cycle
TRITON_RELOADS = 2  # of a cycle
QUIET_S = 3.0
RELOAD_EVERY_S = 0.5
CLIENTS = 32  # requests in flight while the model is reloaded
PUBLISHES = 20
LOAD_TIMEOUT_S = 60.0
LOWEST_PRIORITY = 19
PERTURBATION = 1e-4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["1m", "7m"])
    add("--parts", nargs="+", choices="ab", default=["a", "b"], help="a: clients during reloads, b: time until served")
    add("--cycles", type=int, default=25, help="part a: cycles of quiet, swaps, quiet, Triton reloads")


def measure(settings: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Measure the parts with every model; return a row for each."""
    rows = []
    for part, model in itertools.product(settings.parts, settings.models):
        with contextlib.ExitStack() as stack:
            service = ReloadService(record.out / "servers", model, stack)
            sample = measure_load(service, settings.cycles) if part == "a" else measure_publish(service)
        record.add({"part": part, "model": model, **sample})
        rows += {"a": summary_of_load, "b": summary_of_publish}[part](record.samples[-1])
        record.say(f"{part}, {model}: {len(sample['reloads'])} reloads")
        shutil.rmtree(record.out / "servers")
    return rows


# ---- clients, in a process of their own ----


def _observe(url: str, ended: Path) -> dict[str, list[Any]]:
    return asyncio.run(_observe_all(url, ended))


async def _observe_all(url: str, ended: Path) -> dict[str, list[Any]]:
    """Have one row at a time scored by each client, without retries, until there is a file `ended`."""
    observed: dict[str, list[Any]] = {"start_s": [], "end_s": [], "version": [], "failures": []}
    rows = itertools.cycle(make_trace(256))  # one event loop: the clients share the iterator
    settings = ClientSettings(deadline_s=300, max_outage_s=0)
    async with TritonClient(url, settings, retries=0, max_in_flight=CLIENTS) as client:

        async def ask() -> None:
            while not ended.exists():
                start = time.monotonic()
                try:
                    answer = await client.score([next(rows)], (VALUES, WEIGHTS_VERSION))
                except RequestFailed as error:
                    observed["failures"].append(str(error))
                    await asyncio.sleep(0.01)  # so that a failing server is not flooded with requests
                    continue
                if not np.isfinite(answer[VALUES]).all():
                    observed["failures"].append("values that are not finite")
                observed["start_s"].append(round(start, 5))
                observed["end_s"].append(round(time.monotonic(), 5))
                observed["version"].append(int(answer[WEIGHTS_VERSION][0, 0]))

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    return observed


@contextlib.contextmanager
def sending(service: ReloadService) -> Iterator[Future[dict[str, list[Any]]]]:
    """Run clients during the block; yield their observations, which are complete after the block."""
    ended = service.folder / "ended"
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with on_cores(service.client_core):
            pool.submit(abs, 0).result()  # until the process has imported what it needs
        running = pool.submit(_observe, service.config.server.http_url, ended)
        try:
            yield running
        finally:
            ended.touch()  # the clients finish their current requests


@contextlib.contextmanager
def on_cores(*cores: int) -> Iterator[None]:
    """Pin this thread, and the threads and processes that it starts in the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- the server, and the trainer that publishes to it ----


class ReloadService:
    """A tritonserver on its own core, with a critic whose weights can be published to it."""

    def __init__(self, folder: Path, model: str, stack: contextlib.ExitStack) -> None:
        """Start it; it stops when `stack` closes."""
        from rlhf_triton.models.modeling import load_critic, quiet_transformers  # torch: not for --help
        from rlhf_triton.trainer.publish import initialise_stores

        quiet_transformers()
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.num_parameters = make_checkpoint("reward", model, folder / "checkpoint")
        served = {"model": folder / "checkpoint", **SERVED}
        config = RunConfig.model_validate(
            {
                "run": {"dir": folder, "run_id": RUN_ID},
                "server": FREE_PORTS,
                "reward": served,
                "critic": served,
            }
        )
        self.config = config.model_copy(update={"server": with_free_ports(config.server)})
        initialise_stores(self.config)
        self.store = WeightsStore(self.config.run.weights_dir)
        self.critic = load_critic(self.store.folder(0))
        self.critic.own_weights()
        self._step = 0
        cores = sorted(
            os.sched_getaffinity(0)
        )  # for server, clients and trainer; with two cores the last two share one
        self.client_core = cores[:2][-1]
        # Publishes at low priority, as a trainer should if it shares a core with clients. Only this thread has the low
        # priority, since child processes would inherit the priority of the whole process.
        step_back = partial(_step_back, cores[2:] or cores[-1:])
        self._publishing = stack.enter_context(ThreadPoolExecutor(1, "publisher", initializer=step_back))
        with on_cores(cores[0]):
            stack.enter_context(running_triton(self.config))

    def failed_requests(self) -> int:
        """Return the number of requests to the critic that have failed since the start, by the server's own count."""
        return count_failures(self.config.server.metrics_url, [CRITIC])

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` in the publisher's thread, with its cores, priority and single torch thread; return the result."""
        return self._publishing.submit(do).result()

    def reload(self, kind: str) -> Measurement:
        """Publish weights that differ a little, or let Triton replace the model's process; return the timings."""
        return {"reload": kind, **self.as_publisher(self._publish if kind == SWAP else self._replace_process)}

    def _replace_process(self) -> Measurement:
        servers = ModelServers([self.config.server.grpc_url], control_key(self.store.root))
        version = self.store.current() or 0
        seconds, outcomes = timed(lambda: servers.load(version, timeout_s=LOAD_TIMEOUT_S))
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return {"version": version, "reload_ms": seconds * 1e3}

    def _publish(self) -> Measurement:
        import torch

        from rlhf_triton.trainer.publish import Publication, Publisher
        from rlhf_triton.trainer.verification import verify_copy

        self._step += 1
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(PERTURBATION)
        publisher = Publisher(self.config, self.store, run_id=RUN_ID, epoch=1)
        verify = partial(verify_copy, model=self.critic)
        publication = Publication(write=self.critic.write, verify=verify, step=self._step)
        done = publisher.publish(publication, lambda state: None)
        return {key: getattr(done, key) for key in ("version", "publish_ms", "verify_ms", "reload_ms")}


def _step_back(cores: Sequence[int]) -> None:
    import torch

    torch.set_num_threads(1)  # torch keeps a part of this setting per thread
    os.sched_setaffinity(0, cores)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


# ---- part a ----


def measure_load(service: ReloadService, num_cycles: int) -> Measurement:
    """Return the clients' observations, the reloads and the blocks: quiet, swaps, quiet, Triton reloads."""
    reloads: list[Measurement] = []
    blocks: list[Measurement] = []
    counts = {QUIET: 0, SWAP: SWAPS, TRITON: TRITON_RELOADS}
    before = service.failed_requests()
    with sending(service) as observed:
        time.sleep(1.0)  # until all clients have begun
        for kind in num_cycles * (QUIET, SWAP, QUIET, TRITON):
            begin = time.monotonic()
            for _ in range(counts[kind]):
                next_at = time.monotonic() + RELOAD_EVERY_S
                reloads.append(service.reload(kind))
                time.sleep(max(0.0, next_at - time.monotonic()))
            if kind == QUIET:
                time.sleep(QUIET_S)
            blocks.append({"kind": kind, "begin_s": begin, "end_s": time.monotonic()})
    failed = service.failed_requests() - before
    return {**observed.result(), "reloads": reloads, "blocks": blocks, "failed_by_server": failed}


def summary_of_load(sample: Measurement) -> list[dict[str, Any]]:
    """Return a row for each kind of reload: failures, and the p99 of requests that ended in its blocks or quiet ones.

    Blocks after Triton reloads are left out, since they begin with a backlog.
    """
    end = np.asarray(sample["end_s"])
    latency_ms = (end - sample["start_s"]) * 1e3
    kinds = [QUIET, *(block["kind"] for block in sample["blocks"])]
    chosen = {kind: np.zeros(end.size, bool) for kind in (QUIET, SWAP, TRITON)}
    for block, before in zip(sample["blocks"], kinds, strict=False):
        if before != TRITON:
            chosen[block["kind"]] |= (end >= block["begin_s"]) & (end <= block["end_s"])
    p99_ms = {kind: float(np.percentile(latency_ms[selected], 99)) for kind, selected in chosen.items()}
    rows = []
    for kind in (SWAP, TRITON):
        took = [reload["reload_ms"] for reload in sample["reloads"] if reload["reload"] == kind]
        rows.append(
            {
                "part": f"a, {kind}",
                "model": sample["model"],
                "requests": end.size,
                "reloads": len(took),
                "failed_by_clients": len(sample["failures"]),
                "failed_by_server": sample["failed_by_server"],
                "versions_seen": np.unique(sample["version"]).size,
                "p99_ms": p99_ms[kind],
                "p99_ms_without": p99_ms[QUIET],
                "ratio": p99_ms[kind] / p99_ms[QUIET],
                "reload_ms": median(took),
            }
        )
    return rows


# ---- part b ----


def measure_publish(service: ReloadService) -> Measurement:
    """Return the timings of swaps on an otherwise idle server, each beside those of its unavoidable steps alone."""
    reloads = []
    service.reload(SWAP)  # warm-up: the first one includes deferred imports
    for _ in range(PUBLISHES):
        done = service.reload(SWAP)
        folder = service.store.folder(done["version"])
        reloads.append({**done, **service.as_publisher(partial(_alone, service, folder))})
    return {"parameters": service.num_parameters, "reloads": reloads}


def _alone(service: ReloadService, folder: Path) -> dict[str, float]:
    """Return the milliseconds of each unavoidable step on its own: hash, load, canary."""
    from rlhf_triton.models.canary import canary_row  # torch: not for --help

    hash_s, _ = timed(lambda: digest_of_mapped(folder / WEIGHTS_FILE))
    load_s, critic = timed(lambda: service.critic.with_weights(folder))
    canary_s, _ = timed(lambda: critic.values([canary_row(critic)]))
    return {"hash_ms": hash_s * 1e3, "load_ms": load_s * 1e3, "canary_ms": canary_s * 1e3}


def summary_of_publish(sample: Measurement) -> list[dict[str, Any]]:
    """Return a row of medians; `ratio`: of the time until a written version is served to that of the steps alone."""
    swaps = sample["reloads"]
    alone = {key: median(swap[key] for swap in swaps) for key in ("hash_ms", "load_ms", "canary_ms")}
    served = median(swap["verify_ms"] + swap["reload_ms"] for swap in swaps)
    row = {"part": "b", "model": sample["model"], "reloads": len(swaps), "reload_ms": served, **alone}
    return [{**row, "ratio": served / sum(alone.values())}]
