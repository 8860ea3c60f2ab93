"""Contenders of the scoring benchmark: ours, PyTriton in two variants, `one_forward`, and `ideal`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.benchmark import BenchError
from benchmarks.support.children import BenchChild, running_child
from benchmarks.support.servers import replace_model, start_triton
from benchmarks.support.usage import difference, snapshot
from benchmarks.support.workload import LONGEST
from python_backend.config import ActorSection, AlgorithmSection, RewardSection, RunConfig, RunSection, ServerSection
from python_backend.wire.contract import REWARD_MODEL

MAX_ROWS = 64
QUEUE_DELAY_US = 2000
START_ATTEMPTS = 3


@dataclass(frozen=True)
class Split:
    """How a contender divides the cores: number of instances, and threads of each."""

    instances: int
    threads: int

    @classmethod
    def of(cls, text: str) -> Split:
        """Parse `instances x threads`, such as `2x1`."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.instances}x{self.threads}"


@dataclass(frozen=True)
class Setup:
    """Settings that all contenders of one model share."""

    checkpoint: Path
    folder: Path
    """Folder for repositories, logs and counters."""
    token_budget: int
    overhead_tokens: int
    """Fixed cost of a forward pass, in tokens."""


@dataclass(frozen=True)
class Contender:
    """A started contender."""

    name: str
    setup: Setup
    split: Split
    urls: list[str]
    """`host:port` of each address that takes requests."""
    pids: list[int]
    """Root processes; the contender's CPU time and memory are theirs and their descendants'."""
    counters: Path
    stop: Callable[[], None]
    width: int = 0
    """Clients pad every row to this many tokens; 0: to the request's longest row."""
    children: Sequence[BenchChild] = ()
    """One process per instance, called as in `scoring.processes`; empty if the contender speaks Triton's protocol."""

    def with_budget(self, token_budget: int) -> Contender:
        """Return this contender, processes included, with another token budget, which only `ideal` reads from here."""
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, token_budget=token_budget))


def native(name: str, setup: Setup, split: Split) -> Contender:
    """Start the project's tritonserver, whose reward model counts its forward passes."""
    folder, counters = _folders(name, setup, split)
    reward = RewardSection(
        checkpoint=setup.checkpoint,
        workers=split.instances,
        threads=split.threads,
        token_budget=setup.token_budget,
        micro_batch_rows=MAX_ROWS,
        forward_overhead_tokens=setup.overhead_tokens,
        queue_delay_us=QUEUE_DELAY_US,
    )
    config = RunConfig(
        run=RunSection(dir=folder, run_id="bench"),
        reward=reward,
        actor=ActorSection(algorithm=AlgorithmSection(name="reinforce++")),
        server=ServerSection(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1),
    )

    count = partial(replace_model, model=REWARD_MODEL, kind="CountedModel", bench_counters=str(counters.absolute()))
    server = start_triton(config, count)
    return Contender(name, setup, split, [server.section.http_url], [server.pid], counters, server.stop)


def pytriton(name: str, setup: Setup, split: Split, *, strip_multiple: int) -> Contender:
    """Start a PyTriton server; its clients pad every row to `LONGEST` tokens."""
    folder, counters = _folders(name, setup, split)
    arguments = {**_arguments(setup, split, counters), "instances": split.instances, "strip_multiple": strip_multiple}
    # The second instance waits only one second for the first one's socket, which may be too short on a busy machine.
    started = contextlib.ExitStack()
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            child = started.enter_context(
                running_child(
                    name,
                    "support.pytriton:serve_reward",
                    arguments,
                    folder / f"server-{attempt}.log",
                    threads=split.threads,
                    ready=f"/v2/models/{REWARD_MODEL}/ready",
                )
            )
            break
        except BenchError:
            if attempt == START_ATTEMPTS:
                raise
    return Contender(name, setup, split, [child.url], [child.pid], counters, started.close, width=LONGEST)


def instances(name: str, setup: Setup, split: Split, *, target: str) -> Contender:
    """Start one process per instance, each on its own port; `target` is the function that the process runs."""
    folder, counters = _folders(name, setup, split)
    arguments = _arguments(setup, split, counters)
    with contextlib.ExitStack() as started:
        children = [
            started.enter_context(running_child(name, target, arguments, folder / f"{i}.log", threads=split.threads))
            for i in range(split.instances)
        ]
        stop = started.pop_all().close
    urls, pids = [child.url for child in children], [child.pid for child in children]
    return Contender(name, setup, split, urls, pids, counters, stop, children=children)


def run_plan(ideal: Contender, num_rows: int, num_checked: int) -> dict[str, Any]:
    """Score the trace's first `num_rows` rows with `ideal`; return seconds, usage and `num_checked` first rewards."""
    claims = ideal.counters.parent / f"claims-{time.monotonic_ns()}"
    setup = ideal.setup
    # Until `start_at` the instances have time to make their rows, so that all begin at the same moment.
    pool = {"token_budget": setup.token_budget, "max_rows": MAX_ROWS, "overhead_tokens": setup.overhead_tokens}
    job = {
        "num_rows": num_rows,
        "num_checked": num_checked,
        "pool": pool,
        "claims": str(claims.absolute()),
        "start_at": time.monotonic() + 0.1 + num_rows * 5e-5,
    }
    before = snapshot(ideal.pids, ideal.counters)
    with ThreadPoolExecutor(len(ideal.children)) as executor:
        parts = list(executor.map(lambda child: child.ask("/run", job), ideal.children))
    claims.unlink()
    seconds = max(part["end"] for part in parts) - min(part["start"] for part in parts)
    merged = zip(*(part["rewards"] for part in parts), strict=True)
    rewards = [next(score for score in scores if score is not None) for scores in merged]
    used = difference(snapshot(ideal.pids, ideal.counters), before)
    return {"seconds": seconds, "p50_ms": None, "p99_ms": None, "client_cpu_s": 0.0, "rewards": rewards, **used}


def _folders(name: str, setup: Setup, split: Split) -> tuple[Path, Path]:
    folder = setup.folder / f"{name}-{split}"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    return folder, folder / "counters"


def _arguments(setup: Setup, split: Split, counters: Path) -> dict[str, Any]:
    return {"checkpoint": setup.checkpoint, "counters": counters, "threads": split.threads}


CONTENDERS: dict[str, Callable[[str, Setup, Split], Contender]] = {
    "ideal": partial(instances, target="scoring.processes:serve_ideal"),
    "ours": native,
    "pytriton_padded": partial(pytriton, strip_multiple=0),
    "pytriton_stripped": partial(pytriton, strip_multiple=16),
    "one_forward": partial(instances, target="scoring.processes:serve_one_forward"),
}
