"""Benchmark of the critic's reloads: their cost for clients, and the time until a version is served.

Part a (load): failures and p99 of clients during swaps and Triton reloads. Part b (publish): time until a written
version is served by a swap, against the unavoidable steps alone. Server and clients have one core each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.measurement import (
    Option,
    Record,
    Result,
    Sample,
    Target,
    median_of,
    medians,
    quotient,
    select,
    timed,
)
from benchmarks.processes import ON_FREE_PORTS, SERVED, SPAWN, running_pool, running_triton
from benchmarks.workload import SIZES, make_checkpoint, make_trace
from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config import ClientSection, RunConfig, TrainerSection
from rlhf_triton.digests import digest_of_mapped
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.report.curves import figure_of
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.ports import with_free_ports
from rlhf_triton.tools.server.triton_home import ServerAborted
from rlhf_triton.wire.contract import CRITIC, VALUES, WEIGHTS_VERSION

if TYPE_CHECKING:
    from rlhf_triton.trainer.publish import Publisher, Reload

T = TypeVar("T")
RUN_ID = "bench"
LOWEST_PRIORITY = 19
PERTURBATION = 1e-4


def with_fixed_ports(config: RunConfig) -> RunConfig:
    """Return the configuration with a free port for each port of 0, so that a restarted server keeps its ports."""
    return config.model_copy(update={"server": with_free_ports(config.server)})


def divided(cores: Sequence[int]) -> tuple[int, int, Sequence[int]]:
    """Return the cores of server, clients and trainer; the trainer has all but two.

    With two cores the trainer shares the clients' core; with one, all share it.
    """
    return cores[0], cores[:2][-1], cores[2:] or cores[-1:]


@contextlib.contextmanager
def on_core(*cores: int) -> Iterator[None]:
    """Pin this thread, and the threads and processes that it starts in the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class ReloadSetup:
    """Settings and resources that every part receives."""

    settings: argparse.Namespace
    folder: Path
    """Folder for temporary files, which are removed when the measurement ends."""
    server_core: int
    clients: Clients
    say: Callable[[str], None]


# ---- clients ----

_ended: Any  # an event in the process of the clients


class Clients:
    """A process whose clients send scoring requests in a closed loop."""

    def __init__(self, running: contextlib.ExitStack) -> None:
        """Start the process, which ends when `running` closes."""
        self._ended = SPAWN.Event()
        self._pool: Executor = running.enter_context(running_pool(1, _remember, self._ended))

    @contextlib.contextmanager
    def sending(self, url: str, num_clients: int) -> Iterator[dict[str, list[Any]]]:
        """Run clients during the block; yield their observations, which are complete after the block.

        Each client has one row at a time scored, without retries. The observations are `start_s` (on the monotonic
        clock), `latency_ms` and `version` of each answer, and `failures`.
        """
        seen: dict[str, list[Any]] = {}
        self._ended.clear()
        running = self._pool.submit(_observe, url, num_clients)
        try:
            yield seen
        finally:
            self._ended.set()  # the clients finish their current requests
        seen.update(running.result())


def _remember(ended: Any) -> None:
    global _ended
    _ended = ended


def _observe(url: str, num_clients: int) -> dict[str, list[Any]]:
    return asyncio.run(_observe_all(url, num_clients))


async def _observe_all(url: str, num_clients: int) -> dict[str, list[Any]]:
    seen: dict[str, list[Any]] = {"start_s": [], "latency_ms": [], "version": [], "failures": []}
    rows = itertools.cycle(make_trace(256))  # one event loop: the clients share the iterator
    settings = ClientSection(deadline_s=300, retries=0, max_outage_s=0, max_in_flight=num_clients)
    async with TritonClient(url, settings) as client:

        async def ask() -> None:
            while not _ended.is_set():
                start = time.monotonic()
                try:
                    answer = await client.score([next(rows)], (VALUES, WEIGHTS_VERSION))
                except RequestFailed as error:
                    seen["failures"].append((start, str(error)))
                    await asyncio.sleep(0.01)  # so that a failing server is not flooded with requests
                    continue
                latency = time.monotonic() - start
                if not np.isfinite(answer[VALUES]).all():
                    seen["failures"].append((start, "values that are not finite"))
                    continue
                seen["start_s"].append(round(start, 5))
                seen["latency_ms"].append(round(latency * 1e3, 3))
                seen["version"].append(int(answer[WEIGHTS_VERSION][0, 0]))

        await asyncio.gather(*(ask() for _ in range(num_clients)))
    return seen


# ---- the server ----


class ReloadService:
    """Context manager: runs a tritonserver on its own core, with a critic whose weights can be published to it."""

    def __init__(self, setup: ReloadSetup, part: str, model: str) -> None:
        from rlhf_triton.python_backend.models.modeling import load_critic, quiet_transformers  # torch: not for --help
        from rlhf_triton.trainer.publish import initialise_stores

        quiet_transformers()
        self.folder = setup.folder / f"{part}-{model}"
        shutil.rmtree(self.folder, ignore_errors=True)
        checkpoint = self.folder / "checkpoint"
        self.num_parameters = make_checkpoint(SIZES[model], checkpoint)
        served = {"model": checkpoint, **SERVED}
        sections = {
            "run": {"dir": self.folder, "run_id": RUN_ID},
            "server": ON_FREE_PORTS,
            "reward": served,
            "critic": served,
            "trainer": TrainerSection(serve_timeout_s=300),
        }
        self.config = with_fixed_ports(RunConfig.model_validate(sections))
        initialise_stores(self.config)
        self.store = WeightsStore(self.config.run.weights_dir)
        self.critic = load_critic(self.store.folder(0))
        self.critic.own_weights()
        self._step = 0
        # Publishes at low priority, as a trainer should if it shares a core with clients. Only this thread has the low
        # priority, since child processes would inherit the priority of the whole process.
        self._publishing = ThreadPoolExecutor(1, "publisher", initializer=_step_back)
        self._stack = contextlib.ExitStack()
        with on_core(setup.server_core):
            self._stack.enter_context(running_triton(self.config))

    def __enter__(self) -> ReloadService:
        return self

    def __exit__(self, *error: Any) -> None:
        self._publishing.shutdown()
        self._stack.__exit__(*error)
        for heavy in ("checkpoint", "weights", "journal", "checkpoints", "backends"):
            shutil.rmtree(self.folder / heavy, ignore_errors=True)

    @property
    def url(self) -> str:
        """`host:port` for inference over HTTP."""
        return self.config.server.http_url

    def failed_requests(self) -> int:
        """Return the number of requests to the critic that have failed since the start, by the server's own count.

        Triton counts those that the model answered with an error as successes; the model counts them itself.
        """
        page = get_page(self.config.server.metrics_url, "/metrics")
        refused = re.findall(rf'^rlhf_requests_refused_total{{model="{CRITIC}",.*}} (\S+)', page, re.MULTILINE)
        with ControlPlane(self.config.server.grpc_url) as control:
            return control.statistics(CRITIC).failure_count + int(sum(map(float, refused)))

    def publish(self) -> Sample:
        """Publish weights that differ a little, and wait until they are served; see `_sample`."""
        return self.as_publisher(self._publish)

    def triton_reload(self) -> Sample:
        """Let Triton replace the model's process; see `_sample`."""
        return self.as_publisher(self._triton_reload)

    def as_publisher(self, do: Callable[[], T]) -> T:
        """Call `do` in the publisher's thread, with its core, priority and single torch thread; return the result."""
        return self._publishing.submit(do).result()

    def _publisher(self) -> Publisher:
        from rlhf_triton.trainer.publish import Publisher

        return Publisher.of(self.config, self.store, run_id=RUN_ID, epoch=1)

    def _publish(self) -> Sample:
        import torch

        self._step += 1
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(PERTURBATION)
        begin = time.monotonic()
        done = self._publisher().publish(self.critic, step=self._step, beat=lambda state: None)
        return _sample(done, begin, begin + (done.publish_ms + done.verify_ms + done.reload_ms) / 1e3)

    def _triton_reload(self) -> Sample:
        begin = time.monotonic()
        done = self._publisher().triton_reload()
        return _sample(done, begin, time.monotonic())


def _sample(done: Reload, begin_s: float, end_s: float) -> Sample:
    """Return the timings of a reload, with its begin and the time from which it was served, on the monotonic clock."""
    timings = {key: getattr(done, key) for key in ("reload", "version", "publish_ms", "verify_ms", "reload_ms")}
    return {**timings, "begin_s": begin_s, "end_s": end_s}


def _step_back() -> None:
    import torch

    torch.set_num_threads(1)  # torch keeps a part of this setting per thread
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


OPTIONS = {
    "parts": Option(
        ["a", "b"],
        "a: clients during reloads, b: time until served",
        known="ab",
    ),
    "models": Option(["1m", "7m", "110m"], f"any of {', '.join(SIZES)}; above 7m only in b", ["tiny"], SIZES),
    "swaps": Option(200, "part a: number of swaps", quick=4),
    "triton_reloads": Option(50, "part a: number of Triton reloads", quick=1),
    "clients": Option(32, "part a: scoring requests in flight while the model is reloaded", quick=4),
    "cycles": Option(25, "part a: cycles of quiet, swaps, quiet, Triton reloads", quick=1),
    "quiet_s": Option(3.0, "part a: seconds of each quiet block", quick=0.5),
    "publishes": Option(20, "part b: publishes of each model", quick=2),
}
SMALL = ("tiny", "1m", "2m", "5m", "7m")  # models whose latencies under load are short enough
MOST_P99 = {"swap": 1.5, "triton": 3.0}
WORDS = {"swap": "swaps", "triton": "Triton reloads"}
COLOURS = {"swap": "#009E73", "triton": "#E69F00"}
SWAP_EVERY_S = 0.5
MOST_SWAP = 1.25
Window = tuple[float, float]


@dataclass(frozen=True)
class Samples:
    """Answered requests, in the order of their answers."""

    start: np.ndarray
    """float64 `[n]`, time of sending in seconds."""
    end: np.ndarray
    """float64 `[n]`, time of the answer in seconds, ascending."""
    version: np.ndarray
    """int64 `[n]`, version of the weights that computed the answer."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Samples:
        """Return the samples for `start_s`, `latency_ms` and `version` in `raw`, as stored in result.json."""
        start = np.asarray(raw["start_s"], np.float64)
        end = start + np.asarray(raw["latency_ms"], np.float64) / 1e3
        order = np.argsort(end, kind="stable")
        return cls(start[order], end[order], np.asarray(raw["version"], np.int64)[order])

    @property
    def latency_ms(self) -> np.ndarray:
        """Latency of each request in ms, float64 `[n]`."""
        return (self.end - self.start) * 1e3

    def within(self, windows: Sequence[Window]) -> Samples:
        """Return the requests that began and ended within the same window."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.start >= begin) & (self.end <= end)
        return Samples(self.start[chosen], self.end[chosen], self.version[chosen])

    def in_flight(self, windows: Sequence[Window]) -> np.ndarray:
        """Return the latency (ms) of each request that was in flight at any moment of any window, each request once."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.end >= begin) & (self.start <= end)
        return self.latency_ms[chosen]


def p99(latencies: np.ndarray) -> float | None:
    """Return the 99th percentile; None for an empty array."""
    return float(np.percentile(latencies, 99)) if latencies.size else None


def quiet_windows(like: Sequence[Window], quiet: Sequence[Window], *, seed: int = 0) -> list[Window]:
    """Return, for each window in `like`, one of the same length at a random place within the `quiet` windows.

    A window that fits nowhere is left out. The lengths must be equal: long requests are more likely to be in flight in
    a window, and how much more depends on its length.
    """
    generator = np.random.default_rng(seed)
    found = []
    for begin, end in like:
        length = end - begin
        rooms = [(b, e - length) for b, e in quiet if e - b > length]
        if not rooms:
            continue
        sizes = np.asarray([e - b for b, e in rooms])
        room = rooms[int(generator.choice(len(rooms), p=sizes / sizes.sum()))]
        start = float(generator.uniform(*room))
        found.append((start, start + length))
    return found


# ---- part a ----


def measure_load(setup: ReloadSetup, model: str) -> dict[str, Any]:
    """Return samples, reloads and blocks."""
    settings = setup.settings
    reloads: list[Sample] = []
    blocks: list[dict[str, Any]] = []
    with ReloadService(setup, "load", model) as service:
        before = service.failed_requests()
        with setup.clients.sending(service.url, settings.clients) as samples:
            time.sleep(1.0)  # until all clients have begun
            for cycle in range(settings.cycles):
                for kind in ("quiet", "swap", "quiet", "triton"):
                    begin = time.monotonic()
                    reloads += _block(service, kind, cycle, settings)
                    blocks.append({"kind": kind, "begin_s": begin, "end_s": time.monotonic()})
                counts = {how: len(select(reloads, reload=how)) for how in ("swap", "triton")}
                setup.say(f"a, {model}: {counts['swap']} swaps, {counts['triton']} Triton reloads")
        failed = service.failed_requests() - before
    found = {"samples": samples, "reloads": reloads, "blocks": blocks}
    return {**found, "failed_by_server": failed, "clients": settings.clients}


def _block(service: ReloadService, kind: str, cycle: int, settings: argparse.Namespace) -> list[Sample]:
    if kind == "quiet":
        time.sleep(settings.quiet_s)
        return []
    total, cycles = settings.triton_reloads if kind == "triton" else settings.swaps, settings.cycles
    done = []
    for _ in range(total * cycle // cycles, total * (cycle + 1) // cycles):  # of all, spread evenly over the cycles
        next_at = time.monotonic() + SWAP_EVERY_S
        done.append(service.triton_reload() if kind == "triton" else service.publish())
        time.sleep(max(0.0, next_at - time.monotonic()))
    return done


def summarise_load(found: dict[str, Any]) -> dict[str, Any]:
    """Return a model's failures, and latencies with and without reloads."""
    samples = Samples.of(found["samples"])
    quiet = _quiet(found["blocks"])
    windows = {how: [(r["begin_s"], r["end_s"]) for r in select(found["reloads"], reload=how)] for how in MOST_P99}
    return {
        "requests": int(samples.start.size),
        "failed_by_clients": len(found["samples"]["failures"]),
        "failed_by_server": found["failed_by_server"],
        "versions_seen": int(np.unique(samples.version).size),
        **{how: _latencies(samples, windows[how], quiet) for how in MOST_P99},
    }


def _quiet(blocks: Sequence[dict[str, Any]]) -> list[Window]:
    """Return the quiet blocks, except those that follow Triton reloads, since these begin with a backlog."""
    before = ["quiet", *(block["kind"] for block in blocks)]
    return [
        (block["begin_s"], block["end_s"])
        for block, kind in zip(blocks, before, strict=False)
        if block["kind"] == "quiet" and kind != "triton"
    ]


def _latencies(samples: Samples, windows: list[Window], quiet: list[Window]) -> dict[str, Any]:
    """Compare requests in flight during reloads with those in quiet windows of the same lengths, or in quiet blocks."""
    during = samples.in_flight(windows)
    # Only requests that lie entirely in quiet blocks: one at the end of a block may wait for the following reload.
    without = samples.within(quiet).in_flight(quiet_windows(windows, quiet) or quiet)
    return {
        "reloads": len(windows),
        "requests": int(during.size),
        "p99_ms": p99(during),
        "quiet_p99_ms": p99(without),
        "p99_ratio": quotient(p99(during), p99(without)),
        "reload_s": median_of(end - begin for begin, end in windows),
    }


def load_targets(model: str, of: dict[str, Any]) -> list[Target]:
    """Return the targets of a model."""
    failed = of["failed_by_clients"] + of["failed_by_server"]
    detail = f"{of['requests']:,} requests, {of['swap']['reloads']} swaps, {of['triton']['reloads']} Triton reloads"
    found = [Target(f"a, {model}: failed requests", failed, None, 0, detail)]
    for how, most in MOST_P99.items():
        detail = f"{_ms(of[how]['p99_ms'])} against {_ms(of[how]['quiet_p99_ms'])} without"
        name = f"a, {model}: p99 during {WORDS[how]} / without"
        found.append(Target(name, of[how]["p99_ratio"], None, most, detail))
    return found


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"


def draw_load(axes: Any, model: str, part: dict[str, Any], summary: dict[str, Any]) -> None:
    """Draw every request of the first blocks as a dot, and each reload as a band that ends in a line."""
    blocks = part["blocks"][:8]
    begin, end = blocks[0]["begin_s"], blocks[-1]["end_s"]
    samples = Samples.of(part["samples"])
    inside = np.flatnonzero((samples.end >= begin) & (samples.end <= end))
    inside = inside[:: max(1, inside.size // 20_000)]
    axes.scatter(
        samples.end[inside] - begin, samples.latency_ms[inside], s=3, lw=0, color="#0072B2", alpha=0.5, rasterized=True
    )
    for how, colour in COLOURS.items():
        reloads = [r for r in part["reloads"] if r["reload"] == how and begin <= r["begin_s"] <= end]
        label = f"{WORDS[how]}; p99 {_ms(summary[how]['p99_ms'])}, {_ms(summary[how]['quiet_p99_ms'])} without"
        for i, reload in enumerate(reloads):
            left, right = reload["begin_s"] - begin, reload["end_s"] - begin
            axes.axvspan(left, right, color=colour, alpha=0.14, lw=0, zorder=0)
            axes.axvline(right, color=colour, lw=1.0, label=None if i else label)
    failed = summary["failed_by_clients"] + summary["failed_by_server"]
    title = (
        f"{model} model, {part['clients']} clients: the first of {summary['swap']['reloads']} swaps and "
        f"{summary['triton']['reloads']} Triton reloads; {failed} of {summary['requests']:,} requests failed"
    )
    axes.set(title=title, yscale="log", xlim=(0, end - begin), xlabel="seconds", ylabel="latency of a request (ms)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


# ---- part b ----


def measure_publish(setup: ReloadSetup, model: str) -> dict[str, Any]:
    """Return samples of a model on an otherwise idle server."""
    settings = setup.settings
    swaps: list[dict[str, Any]] = []
    with ReloadService(setup, "publish", model) as service:
        service.publish()  # warm-up: the first one includes deferred imports
        for _ in range(settings.publishes):
            done = service.publish()
            alone = service.as_publisher(functools.partial(_alone, service, done["version"]))
            swaps.append({**done, "to_served_ms": done["verify_ms"] + done["reload_ms"], **alone})
        setup.say(f"b, {model}: {settings.publishes} publishes, each against hash, load and canary alone")
        return {"parameters": service.num_parameters, "swaps": swaps}


def _alone(service: ReloadService, version: int) -> dict[str, float]:
    """Return the milliseconds of each unavoidable step on its own: hash, load, canary."""
    from rlhf_triton.python_backend.models.canary import canary_row  # torch: not for --help

    folder = service.store.folder(version)
    hash_s, _ = timed(lambda: digest_of_mapped(folder / WEIGHTS_FILE))
    load_s, critic = timed(lambda: service.critic.with_weights(folder))
    canary_s, _ = timed(lambda: critic.values([canary_row(critic)]))
    return {"hash_ms": hash_s * 1e3, "load_ms": load_s * 1e3, "canary_ms": canary_s * 1e3}


def summarise_publish(of: dict[str, Any]) -> dict[str, Any]:
    """Return medians and ratios."""
    swap = medians(of["swaps"], "publish_ms", "to_served_ms", "reload_ms", "hash_ms", "load_ms", "canary_ms")
    alone = swap["hash_ms"] + swap["load_ms"] + swap["canary_ms"]
    ratio = quotient(swap["to_served_ms"], alone)
    return {"parameters": of["parameters"], **swap, "alone_ms": alone, "ratio": ratio, "n": len(of["swaps"])}


def publish_targets(model: str, of: dict[str, Any]) -> list[Target]:
    """Return the target of a model."""
    detail = (
        f"{of['to_served_ms']:,.1f} ms; hash {of['hash_ms']:,.1f}, load {of['load_ms']:,.1f}, "
        f"canary {of['canary_ms']:,.1f} ms; n {of['n']}"
    )
    return [Target(f"b, {model}: swap / hash + load + canary", of["ratio"], None, MOST_SWAP, detail)]


# ---- all parts ----


def under_load(models: list[str]) -> list[str]:
    """Return the models that are small enough to be reloaded under load; the first model if none is."""
    return [name for name in models if name in SMALL] or models[:1]


class Part(NamedTuple):
    """A part of the benchmark."""

    letter: str
    models: Callable[[list[str]], list[str]]
    """Which of the chosen models it measures."""
    measure: Callable[[ReloadSetup, str], Any]
    summarise: Callable[[Any], Any]
    targets: Callable[[str, Any], list[Target]]


PARTS = {
    "load": Part("a", under_load, measure_load, summarise_load, load_targets),
    "publish": Part("b", list, measure_publish, summarise_publish, publish_targets),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure the parts in turn, and save each as soon as it is done."""
    record.result["parts"], record.result["aborts"] = {}, 0
    folder = record.out / "servers"
    server, clients, trainer = divided(sorted(os.sched_getaffinity(0)))
    record.say(f"cores: server {server}, clients {clients}, trainer {trainer}")
    with contextlib.ExitStack() as running:
        with on_core(clients):
            setup = ReloadSetup(settings, folder, server, Clients(running), record.say)
        running.enter_context(on_core(*trainer))
        for name, part in PARTS.items():
            if part.letter in settings.parts:
                record.say(f"{part.letter}: {name}")
                of = record.result["parts"][name] = {}
                for model in part.models(settings.models):
                    try:
                        of[model] = part.measure(setup, model)
                    except ServerAborted as fault:  # server 2.51 may if a model's process gets no CPU time for a second
                        record.say(f"{fault}\nmeasuring once more")
                        record.result["aborts"] += 1
                        of[model] = part.measure(setup, model)
                    record.save()
    shutil.rmtree(folder)


def summarise(result: Result) -> dict[str, Any]:
    """Return the summary of each measured part, by model."""
    return {
        name: {model: PARTS[name].summarise(found) for model, found in of.items()}
        for name, of in result["parts"].items()
    }


def targets(result: Result) -> list[Target]:
    """Return the targets of each measured part and model."""
    summaries = [(name, model, of) for name, models in result["summary"].items() for model, of in models.items()]
    found = [target for name, model, of in summaries for target in PARTS[name].targets(model, of)]
    return [*found, Target("servers that aborted", result["aborts"], None, 0)]


def draw(result: Result, out: Path) -> None:
    """Draw latency over time, of the first model that was reloaded under load."""
    for model, found in list(result["parts"].get("load", {}).items())[:1]:
        with figure_of(out / "reload.png", (11, 4.1)) as figure:
            draw_load(figure.subplots(), model, found, result["summary"]["load"][model])
