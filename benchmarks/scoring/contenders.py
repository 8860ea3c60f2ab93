"""Contenders of the scoring benchmark: ours, its gateway, PyTriton, other ways to serve a model, and no server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.children import BenchChild, reward_config, running_child, running_triton
from benchmarks.support.usage import cpu_seconds
from benchmarks.support.workload import LONGEST
from python_backend.wire.contract import REWARD_MODEL

MAX_ROWS = 64
QUEUE_DELAY_US = 2000


@dataclass(frozen=True)
class Setup:
    """What a contender is started with."""

    checkpoint: Path
    folder: Path
    """Folder for repositories and logs."""
    split: str
    """How it divides the cores, `instances x threads`, such as `2x1`."""
    token_budget: int
    overhead_tokens: int
    """Fixed cost of a forward pass, in tokens."""

    @property
    def instances(self) -> int:
        """Number of processes that compute."""
        return int(self.split.split("x")[0])

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of each process."""
        return {"checkpoint": self.checkpoint, "threads": int(self.split.split("x")[1])}


@dataclass(frozen=True)
class Contender:
    """A started contender."""

    name: str
    setup: Setup
    urls: list[str]
    """`host:port` of each address that takes requests."""
    pids: list[int]
    """Root processes; the contender's CPU time is theirs and their descendants'."""
    form: str = "triton"
    """How requests are written; see `processes.measure`."""
    width: int = 0
    """Clients pad every row to this many tokens; 0: to the request's longest row."""
    children: Sequence[BenchChild] = ()
    """The processes of `ideal`."""


@contextlib.contextmanager
def native(name: str, setup: Setup) -> Iterator[Contender]:
    """Run the project's tritonserver."""
    reward = {
        **setup.arguments,
        "workers": setup.instances,
        "token_budget": setup.token_budget,
        "micro_batch_rows": MAX_ROWS,
        "forward_overhead_tokens": setup.overhead_tokens,
        "queue_delay_us": QUEUE_DELAY_US,
        "add_special_tokens": False,
    }
    with running_triton(reward_config(setup.folder / f"{name}-{setup.split}", reward)) as server:
        yield Contender(name, setup, [server.section.http_url], [server.pid])


@contextlib.contextmanager
def gateway(name: str, setup: Setup, *, form: str) -> Iterator[Contender]:
    """Run the project's gateway in front of its tritonserver."""
    with native(name, setup) as server:
        arguments, log = {"triton": server.urls[0]}, setup.folder / f"{name}.log"
        with running_child(name, "scoring.processes:serve_gateway", arguments, log, ready="/readyz") as child:
            yield Contender(name, setup, [child.url], [*server.pids, child.pid], form)


@contextlib.contextmanager
def pytriton(name: str, setup: Setup, *, strip_multiple: int) -> Iterator[Contender]:
    """Run a PyTriton server; its clients pad every row to `LONGEST` tokens."""
    arguments = {**setup.arguments, "instances": setup.instances, "strip_multiple": strip_multiple}
    log, ready = setup.folder / f"{name}-{setup.split}.log", f"/v2/models/{REWARD_MODEL}/ready"
    # The second instance waits only one second for the first one's socket, which may be too short on a busy machine.
    with running_child(name, "scoring.pytriton:serve", arguments, log, ready=ready, attempts=3) as child:
        yield Contender(name, setup, [child.url], [child.pid], width=LONGEST)


@contextlib.contextmanager
def instances(
    name: str, setup: Setup, *, target: str, form: str = "", ready: str = "/ready", **more: Any
) -> Iterator[Contender]:
    """Run one process per instance, each on its own port; `target` is the function that the process runs."""
    with contextlib.ExitStack() as started:
        children = []
        for i in range(setup.instances):
            log = setup.folder / f"{name}-{setup.split}-{i}.log"
            child = running_child(name, f"scoring.processes:{target}", setup.arguments | more, log, ready=ready)
            children.append(started.enter_context(child))
        urls, pids = [child.url for child in children], [child.pid for child in children]
        yield Contender(name, setup, urls, pids, form, children=children)


def ideal(name: str, setup: Setup) -> contextlib.AbstractContextManager[Contender]:
    """Run processes that score the server's micro-batches without a server."""
    pool = {"token_budget": setup.token_budget, "max_rows": MAX_ROWS, "overhead_tokens": setup.overhead_tokens}
    return instances(name, setup, target="serve_ideal", pool=pool)


def run_plan(contender: Contender, num_rows: int, num_checked: int) -> dict[str, Any]:
    """Score the trace's first `num_rows` rows with `ideal`; return seconds, usage and `num_checked` first rewards."""
    claims = contender.setup.folder / f"claims-{time.monotonic_ns()}"
    # Until `start_at` the instances have time to make their rows, so that all begin at the same moment.
    start_at = time.monotonic() + 0.1 + num_rows * 5e-5
    job = {
        "num_rows": num_rows,
        "num_checked": num_checked,
        "claims": str(claims.absolute()),
        "start_at": start_at,
    }
    before = cpu_seconds(contender.pids)
    with ThreadPoolExecutor(len(contender.children)) as executor:
        parts = list(executor.map(lambda child: child.ask("/run", job), contender.children))
    claims.unlink()
    seconds = max(part["end"] for part in parts) - min(part["start"] for part in parts)
    merged = zip(*(part["rewards"] for part in parts), strict=True)
    rewards = [next(score for score in scores if score is not None) for scores in merged]
    cpu_s = cpu_seconds(contender.pids) - before
    return {"seconds": seconds, "p50_ms": None, "p99_ms": None, "cpu_s": cpu_s, "rewards": rewards}


CONTENDERS: dict[str, Callable[[str, Setup], contextlib.AbstractContextManager[Contender]]] = {
    "ideal": ideal,
    "ours": native,
    "pytriton_padded": partial(pytriton, strip_multiple=0),
    "pytriton_stripped": partial(pytriton, strip_multiple=16),
    "one_forward": partial(instances, target="serve_one_forward", form="binary"),
    "gateway_tokens": partial(gateway, form="tokens"),
    "gateway_texts": partial(gateway, form="texts"),
    "serve_rm": partial(instances, target="serve_rm", form="texts", ready="/docs"),
}
