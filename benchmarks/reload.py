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
import re
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
    Record,
    Sample,
    make_checkpoint,
    make_trace,
    running_triton,
    some_of,
    timed,
)
from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config import ClientSection, RunConfig
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.report.curves import figure_of
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.ports import with_free_ports
from rlhf_triton.tools.server.triton_home import ServerAborted
from rlhf_triton.wire.contract import CRITIC, VALUES, WEIGHTS_VERSION

T = TypeVar("T")
RUN_ID = "bench"
SERVED = {"workers": 1, "threads": 1, "token_budget": 256, "forward_overhead_tokens": 64}
UNDER_LOAD = ("tiny", "1m", "7m")  # models whose latencies under load are short enough for part a
SWAP, TRITON, QUIET = "swap", "triton", "quiet"  # kinds of blocks; the first two are kinds of reloads, too
WORDS = {SWAP: "swaps", TRITON: "Triton reloads"}
COLOURS = {SWAP: "#009E73", TRITON: "#E69F00"}
RELOAD_EVERY_S = 0.5
LOWEST_PRIORITY = 19
PERTURBATION = 1e-4
Window = tuple[float, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--models", type=some_of(SIZES), default=["1m", "7m"], help=f"any of {', '.join(SIZES)}")
    add("--parts", type=some_of("ab"), default=["a", "b"], help="a: clients during reloads, b: time until served")
    add("--swaps", type=int, default=200, help="part a: number of swaps")
    add("--triton-reloads", type=int, default=50, help="part a: number of Triton reloads")
    add("--clients", type=int, default=32, help="part a: requests in flight while the model is reloaded")
    add("--cycles", type=int, default=25, help="part a: cycles of quiet, swaps, quiet, Triton reloads")
    add("--quiet-s", type=float, default=3.0, help="part a: seconds of each quiet block")
    add("--publishes", type=int, default=20, help="part b: publishes of each model")


def measure(settings: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Measure the parts with every model; return a row for each."""
    rows = []
    for part, model in itertools.product(settings.parts, settings.models):
        if part == "a" and model not in UNDER_LOAD:
            continue
        measure_part = {"a": measure_load, "b": measure_publish}[part]
        try:
            sample = measure_part(settings, model, record)
        except ServerAborted as fault:  # server 2.51 may if a model's process gets no CPU time for a second
            record.say(f"{fault}\nmeasuring once more")
            sample = measure_part(settings, model, record)
        record.add({"part": part, "model": model, **sample})
        rows += {"a": summary_of_load, "b": summary_of_publish}[part](record.samples[-1])
        if part == "a" and not (record.out / "reload.png").exists():
            draw(record.samples[-1], rows, record.out / "reload.png")
        shutil.rmtree(record.out / "servers")
    return rows


# ---- clients, in a process of their own ----

_ended: Any


def _remember(ended: Any) -> None:
    global _ended
    _ended = ended


def _observe(url: str, num_clients: int) -> dict[str, list[Any]]:
    return asyncio.run(_observe_all(url, num_clients))


async def _observe_all(url: str, num_clients: int) -> dict[str, list[Any]]:
    """Have one row at a time scored by each client, without retries, until `_ended`."""
    seen: dict[str, list[Any]] = {"start_s": [], "end_s": [], "version": [], "failures": []}
    rows = itertools.cycle(make_trace(256))  # one event loop: the clients share the iterator
    settings = ClientSection(deadline_s=300, retries=0, max_outage_s=0, max_in_flight=num_clients)
    async with TritonClient(url, settings) as client:

        async def ask() -> None:
            while not _ended.is_set():
                start = time.monotonic()
                try:
                    answer = await client.score([next(rows)], (VALUES, WEIGHTS_VERSION))
                except RequestFailed as error:
                    seen["failures"].append(str(error))
                    await asyncio.sleep(0.01)  # so that a failing server is not flooded with requests
                    continue
                if not np.isfinite(answer[VALUES]).all():
                    seen["failures"].append("values that are not finite")
                    continue
                seen["start_s"].append(round(start, 5))
                seen["end_s"].append(round(time.monotonic(), 5))
                seen["version"].append(int(answer[WEIGHTS_VERSION][0, 0]))

        await asyncio.gather(*(ask() for _ in range(num_clients)))
    return seen


@contextlib.contextmanager
def sending(url: str, num_clients: int, core: int) -> Iterator[Future[dict[str, list[Any]]]]:
    """Run clients during the block; yield their observations, which are complete after the block."""
    context = get_context("spawn")
    ended = context.Event()
    with ProcessPoolExecutor(1, context, _remember, (ended,)) as pool:
        with on_cores(core):
            pool.submit(abs, 0).result()  # until the process has imported what it needs
        running = pool.submit(_observe, url, num_clients)
        try:
            yield running
        finally:
            ended.set()  # the clients finish their current requests


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
        from rlhf_triton.python_backend.models.modeling import load_critic, quiet_transformers  # torch: not for --help
        from rlhf_triton.trainer.publish import Publisher, initialise_stores

        quiet_transformers()
        shutil.rmtree(folder, ignore_errors=True)
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
        self._publisher = lambda: Publisher(self.config, self.store, run_id=RUN_ID, epoch=1)
        self._step = 0
        server_core, self.client_core, *others = cores()
        # Publishes at low priority, as a trainer should if it shares a core with clients. Only this thread has the low
        # priority, since child processes would inherit the priority of the whole process.
        self._publishing = stack.enter_context(ThreadPoolExecutor(1, "publisher", initializer=_step_back(others)))
        with on_cores(server_core):
            stack.enter_context(running_triton(self.config))

    def failed_requests(self) -> int:
        """Return the number of requests to the critic that have failed since the start, by the server's own count.

        Triton counts those that the model answered with an error as successes; the model counts them itself.
        """
        page = get_page(self.config.server.metrics_url, "/metrics")
        refused = re.findall(rf'^rlhf_requests_refused_total{{model="{CRITIC}",.*}} (\S+)', page, re.MULTILINE)
        with ControlPlane(self.config.server.grpc_url) as control:
            return control.statistics(CRITIC).failure_count + int(sum(map(float, refused)))

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` in the publisher's thread, with its cores, priority and single torch thread; return the result."""
        return self._publishing.submit(do).result()

    def reload(self, kind: str) -> Sample:
        """Publish weights that differ a little, or let Triton replace the model's process; return the timings."""
        begin = time.monotonic()
        done = self.as_publisher(self._publish if kind == SWAP else lambda: self._publisher().triton_reload())
        timings = {key: getattr(done, key) for key in ("version", "publish_ms", "verify_ms", "reload_ms")}
        return {"reload": kind, **timings, "begin_s": begin, "end_s": time.monotonic()}

    def _publish(self) -> Any:
        import torch

        self._step += 1
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(PERTURBATION)
        return self._publisher().publish(self.critic, step=self._step, beat=lambda state: None)


def cores() -> list[int]:
    """Return the cores of server, clients and trainer; with two, the trainer shares the clients', with one, all do."""
    found = sorted(os.sched_getaffinity(0))
    return [found[0], found[:2][-1], *(found[2:] or found[-1:])]


def _step_back(cores: Sequence[int]) -> Callable[[], None]:
    def step_back() -> None:
        import torch

        torch.set_num_threads(1)  # torch keeps a part of this setting per thread
        os.sched_setaffinity(0, cores)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)

    return step_back


# ---- part a ----


def measure_load(settings: argparse.Namespace, model: str, record: Record) -> Sample:
    """Return the clients' observations, the reloads and the quiet windows."""
    reloads: list[Sample] = []
    blocks: list[Sample] = []
    totals = {SWAP: settings.swaps, TRITON: settings.triton_reloads}
    with contextlib.ExitStack() as stack:
        service = ReloadService(record.out / "servers" / f"load-{model}", model, stack)
        before = service.failed_requests()
        with sending(service.config.server.http_url, settings.clients, service.client_core) as observed:
            time.sleep(1.0)  # until all clients have begun
            for cycle in range(settings.cycles):
                for kind in (QUIET, SWAP, QUIET, TRITON):
                    begin = time.monotonic()
                    if kind == QUIET:
                        time.sleep(settings.quiet_s)
                    else:
                        of_all = totals[kind] * cycle // settings.cycles, totals[kind] * (cycle + 1) // settings.cycles
                        for _ in range(*of_all):
                            next_at = time.monotonic() + RELOAD_EVERY_S
                            reloads.append(service.reload(kind))
                            time.sleep(max(0.0, next_at - time.monotonic()))
                    blocks.append({"kind": kind, "begin_s": begin, "end_s": time.monotonic()})
                record.say(f"a, {model}: {len(reloads)} of {sum(totals.values())} reloads")
        failed = service.failed_requests() - before
    return {**observed.result(), "reloads": reloads, "blocks": blocks, "failed_by_server": failed}


def summary_of_load(sample: Sample) -> list[dict[str, Any]]:
    """Return a row for each kind of reload: failures, and the p99 of requests in flight during reloads and without.

    The windows without reloads are as long as those with: long requests are more likely to be in flight in a window,
    and how much more depends on its length. Blocks after Triton reloads are left out, since they begin with a backlog.
    """
    start = np.asarray(sample["start_s"])
    end = np.asarray(sample["end_s"])
    kinds = [QUIET, *(block["kind"] for block in sample["blocks"])]
    quiet = [
        (block["begin_s"], block["end_s"])
        for block, before in zip(sample["blocks"], kinds, strict=False)
        if block["kind"] == QUIET and before != TRITON
    ]
    alone = np.zeros(start.size, bool)  # one at the end of a quiet block may wait for the following reload
    for left, right in quiet:
        alone |= (start >= left) & (end <= right)
    rows = []
    for kind in (SWAP, TRITON):
        windows = [(reload["begin_s"], reload["end_s"]) for reload in sample["reloads"] if reload["reload"] == kind]
        during = p99_ms(start, end, windows)
        without = p99_ms(start[alone], end[alone], quiet_windows(windows, quiet) or quiet)
        rows.append(
            {
                "part": f"a, {WORDS[kind]}",
                "model": sample["model"],
                "requests": start.size,
                "reloads": len(windows),
                "failed_by_clients": len(sample["failures"]),
                "failed_by_server": sample["failed_by_server"],
                "versions_seen": np.unique(sample["version"]).size,
                "p99_ms": during,
                "p99_ms_without": without,
                "ratio": during / without if during and without else None,
                "reload_ms": median((right - left) * 1e3 for left, right in windows) if windows else None,
            }
        )
    return rows


def p99_ms(start: np.ndarray, end: np.ndarray, windows: Sequence[Window]) -> float | None:
    """Return the 99th percentile of the latencies of requests that were in flight in any of the windows."""
    chosen = np.zeros(start.size, bool)
    for left, right in windows:
        chosen |= (end >= left) & (start <= right)
    return float(np.percentile((end - start)[chosen], 99)) * 1e3 if chosen.any() else None


def quiet_windows(like: Sequence[Window], quiet: Sequence[Window]) -> list[Window]:
    """Return, for each window in `like` that fits, one of its length at a random place within the `quiet` windows."""
    generator = np.random.default_rng(0)
    found = []
    for left, right in like:
        length = right - left
        rooms = [(begin, end - length) for begin, end in quiet if end - begin > length]
        if rooms:
            sizes = np.asarray([end - begin for begin, end in rooms])
            begin = generator.uniform(*rooms[generator.choice(len(rooms), p=sizes / sizes.sum())])
            found.append((begin, begin + length))
    return found


def draw(sample: Sample, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw every request of the first blocks as a dot, and each reload as a band that ends in a line."""
    begin = sample["blocks"][0]["begin_s"]
    last = sample["blocks"][:8][-1]["end_s"]
    end = np.asarray(sample["end_s"])
    inside = np.flatnonzero((end >= begin) & (end <= last))
    latency_ms = (end - sample["start_s"]) * 1e3
    with figure_of(path, (11, 4.1)) as figure:
        axes = figure.subplots()
        axes.scatter(end[inside] - begin, latency_ms[inside], s=3, lw=0, color="#0072B2", alpha=0.5, rasterized=True)
        for kind, row in zip((SWAP, TRITON), rows, strict=True):
            label = f"{WORDS[kind]}; p99 {row['p99_ms']:,.1f} ms, {row['p99_ms_without']:,.1f} ms without"
            for reload in sample["reloads"]:
                if reload["reload"] == kind and begin <= reload["begin_s"] <= last:
                    left = reload["begin_s"] - begin
                    right = reload["end_s"] - begin
                    axes.axvspan(left, right, color=COLOURS[kind], alpha=0.14, lw=0, zorder=0)
                    axes.axvline(right, color=COLOURS[kind], lw=1.0, label=label)
                    label = ""
        failed = rows[0]["failed_by_clients"] + rows[0]["failed_by_server"]
        title = (
            f"{sample['model']} model: the first of {rows[0]['reloads']} swaps and {rows[1]['reloads']} Triton reloads"
            f"; {failed} of {rows[0]['requests']:,} requests failed"
        )
        axes.set(title=title, yscale="log", xlim=(0, last - begin), xlabel="seconds", ylabel="latency (ms)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


# ---- part b ----


def measure_publish(settings: argparse.Namespace, model: str, record: Record) -> Sample:
    """Return the timings of swaps on an otherwise idle server, each beside those of its unavoidable steps alone."""
    swaps = []
    with contextlib.ExitStack() as stack:
        service = ReloadService(record.out / "servers" / f"publish-{model}", model, stack)
        service.reload(SWAP)  # warm-up: the first one includes deferred imports
        for _ in range(settings.publishes):
            done = service.reload(SWAP)
            folder = service.store.folder(done["version"])
            swaps.append({**done, **service.as_publisher(partial(_alone, service, folder))})
    record.say(f"b, {model}: {settings.publishes} publishes, each against hash, load and canary alone")
    return {"parameters": service.num_parameters, "swaps": swaps}


def _alone(service: ReloadService, folder: Path) -> dict[str, float]:
    """Return the milliseconds of each unavoidable step on its own: hash, load, canary."""
    from rlhf_triton.python_backend.models.canary import canary_row  # torch: not for --help

    hash_s, _ = timed(lambda: digest_of_mapped(folder / WEIGHTS_FILE))
    load_s, critic = timed(lambda: service.critic.with_weights(folder))
    canary_s, _ = timed(lambda: critic.values([canary_row(critic)]))
    return {"hash_ms": hash_s * 1e3, "load_ms": load_s * 1e3, "canary_ms": canary_s * 1e3}


def summary_of_publish(sample: Sample) -> list[dict[str, Any]]:
    """Return a row of medians; `ratio`: of the time until a written version is served to that of the steps alone."""
    swaps = sample["swaps"]
    alone = {key: median(swap[key] for swap in swaps) for key in ("hash_ms", "load_ms", "canary_ms")}
    served = median(swap["verify_ms"] + swap["reload_ms"] for swap in swaps)
    row = {"part": "b", "model": sample["model"], "reloads": len(swaps), "reload_ms": served, **alone}
    return [{**row, "ratio": served / sum(alone.values())}]
