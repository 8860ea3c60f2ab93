"""Benchmark of scoring: the project's server against the servers that users have today, on the same cores.

Every round measures all contenders in turn with the same requests. Each contender divides the cores among instances
and threads in the way that is fastest for it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.measurement import (
    Option,
    Record,
    Result,
    Target,
    cpu_seconds,
    grouped,
    in_turn,
    median_of,
    pairs,
    ratio,
    select,
)
from benchmarks.processes import HOST, ON_FREE_PORTS, running_child, running_pool, running_triton
from benchmarks.workload import LONGEST, SIZES, closed_loop, make_checkpoint, make_trace, trace_lengths
from rlhf_triton.client.client import TritonClient
from rlhf_triton.config import ClientSection, GatewaySection, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.process import keep_freed_memory
from rlhf_triton.python_backend.serving.scheduling import RowPool
from rlhf_triton.tools.report.curves import figure_of
from rlhf_triton.tools.server.vllm import ENVIRONMENT as VLLM
from rlhf_triton.wire.contract import REWARD_MODEL, REWARDS, SEQUENCE_LENGTHS, TOKENS

QUEUE_DELAY_US = 2000
OVERHEAD_TOKENS = 64  # fixed cost of a forward pass without a server; the server measures its own
DEADLINE_S = 900.0
NUM_CHECKED = 32  # first rewards, which are compared with those of transformers
PYTRITON_MICRO_BATCH = 8  # rows
PYTRITON_BATCH = 16  # padded rows cost the same in any batch; larger ones would only leave the second instance idle


@dataclass(frozen=True)
class Cell:
    """One point of the sweep, and the number of requests that it sends."""

    rows: int
    """Rows per request."""
    concurrency: int
    num_requests: int


@dataclass(frozen=True)
class Setup:
    """What a contender is started with."""

    checkpoint: Path
    folder: Path
    """Folder for repositories and logs."""
    split: str
    """How it divides the cores, `instances x threads`, such as `2x1`."""
    token_budget: int
    load: Executor
    """Runs `measure_server` in a process of its own."""

    @property
    def instances(self) -> int:
        """Number of processes that compute."""
        return int(self.split.split("x")[0])

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of each process."""
        return {"checkpoint": self.checkpoint, "threads": int(self.split.split("x")[1])}


Measure = Callable[[Cell], dict[str, Any]]
"""Sends a cell's requests to a started contender; see `measure_server`."""


@contextlib.contextmanager
def native(name: str, setup: Setup, *, form: str = "triton") -> Iterator[Measure]:
    """Run the project's tritonserver, and its gateway in front of it if `form` is one of the gateway's."""
    reward = {
        "model": setup.checkpoint,
        "threads": setup.arguments["threads"],
        "workers": setup.instances,
        "token_budget": setup.token_budget,
        "add_special_tokens": False,
    }
    sections = {
        "run": {"dir": setup.folder / f"{name}-{setup.split}", "run_id": "bench"},
        "reward": reward,
        "actor": {"algorithm": {"name": "reinforce++"}},
        "server": {**ON_FREE_PORTS, "queue_delay_us": QUEUE_DELAY_US},
    }
    with contextlib.ExitStack() as running:
        server = running.enter_context(running_triton(RunConfig.model_validate(sections)))
        urls, pids = [server.section.http_url], [server.pid]
        if form != "triton":
            target, log = "scoring:serve_gateway", setup.folder / f"{name}.log"
            gateway = running_child(target, {"triton": urls[0]}, log, ready="/readyz")
            url, pid = running.enter_context(gateway)
            urls, pids = [url], [*pids, pid]
        yield partial(_measured, setup.load, urls=urls, pids=pids, form=form)


@contextlib.contextmanager
def instances(name: str, setup: Setup, *, target: str, form: str, ready: str = "/ready") -> Iterator[Measure]:
    """Run one process per instance, each on its own port; `target` is the function that the process runs."""
    with contextlib.ExitStack() as started:
        children = []
        for i in range(setup.instances):
            log = setup.folder / f"{name}-{setup.split}-{i}.log"
            child = running_child(f"scoring:{target}", setup.arguments, log, ready=ready)
            children.append(started.enter_context(child))
        urls, pids = ([child[of] for child in children] for of in range(2))
        yield partial(_measured, setup.load, urls=urls, pids=pids, form=form)


@contextlib.contextmanager
def pytriton(name: str, setup: Setup, *, strip_multiple: int) -> Iterator[Measure]:
    """Run a PyTriton server; its clients pad every row to `LONGEST` tokens."""
    arguments = {**setup.arguments, "instances": setup.instances, "strip_multiple": strip_multiple}
    log, ready = setup.folder / f"{name}-{setup.split}.log", f"/v2/models/{REWARD_MODEL}/ready"
    # The second instance waits only one second for the first one's socket, which may be too short on a busy machine.
    with running_child("scoring:serve_pytriton", arguments, log, ready=ready, attempts=3) as (url, pid):
        yield partial(_measured, setup.load, urls=[url], pids=[pid], width=LONGEST)


@contextlib.contextmanager
def ideal(name: str, setup: Setup) -> Iterator[Measure]:
    """Score the server's micro-batches in processes without a server: an upper bound on throughput."""

    def measure(cell: Cell) -> dict[str, Any]:
        rows = make_trace(cell.rows * cell.num_requests)
        plan = RowPool[str](token_budget=setup.token_budget, overhead_tokens=OVERHEAD_TOKENS)
        plan.add("all", [row.size for row in rows])
        batches = [[index for _, index in batch] for batch in iter(plan.take, [])]
        start = time.monotonic()
        done = list(pool.map(score_in_worker, [[rows[index] for index in batch] for batch in batches]))
        seconds, rewards = time.monotonic() - start, np.empty(len(rows))
        for batch, (scores, _) in zip(batches, done, strict=True):
            rewards[batch] = scores
        cpu_s = sum(cpu_s for _, cpu_s in done)
        first = rewards[:NUM_CHECKED].tolist()
        return {"seconds": seconds, "p50_ms": None, "p99_ms": None, "cpu_s": cpu_s, "rewards": first}

    with running_pool(setup.instances, load_worker, *setup.arguments.values()) as pool:
        yield measure


CONTENDERS: dict[str, Callable[[str, Setup], contextlib.AbstractContextManager[Measure]]] = {
    "ideal": ideal,
    "ours": native,
    "pytriton_padded": partial(pytriton, strip_multiple=0),
    "pytriton_stripped": partial(pytriton, strip_multiple=16),
    "one_forward": partial(instances, target="serve_one_forward", form="binary"),
    "gateway_tokens": partial(native, form="tokens"),
    "gateway_texts": partial(native, form="texts"),
    "serve_rm": partial(instances, target="serve_rm", form="texts", ready="/docs"),
    "vllm": partial(instances, target="serve_vllm", form="vllm", ready="/health"),
}


# ---- the load generator's process ----


def _measured(load: Executor, cell: Cell, **server: Any) -> dict[str, Any]:
    return load.submit(measure_server, cell, **server).result()


def measure_server(
    cell: Cell, *, urls: Sequence[str], pids: Sequence[int], form: str = "triton", width: int = 0
) -> dict[str, Any]:
    """Measure one server with the first rows of the trace; return times, CPU time and the first rewards.

    Args:
        urls: `host:port`, one for each instance.
        pids: root processes of the server; their CPU time, descendants included, is read before and after.
        form: how requests are written: one of `FORMS`, or `triton`.
        width: pad every request to this many tokens; 0: to its own longest row.
    """
    return asyncio.run(_measure_server(cell, urls, pids, form, width))


async def _measure_server(
    cell: Cell, urls: Sequence[str], pids: Sequence[int], form: str, width: int
) -> dict[str, Any]:
    rows = make_trace(cell.rows * cell.num_requests)
    requests = [rows[i : i + cell.rows] for i in range(0, len(rows), cell.rows)]
    async with _triton(urls, width, cell.concurrency) if form == "triton" else _http(urls, form) as send:
        await closed_loop(send, requests[: min(cell.concurrency, max(1, 16 // cell.rows))], cell.concurrency)
        before = cpu_seconds([os.getpid(), *pids])
        seconds, latencies, answers = await closed_loop(send, requests, cell.concurrency)
        cpu_s = cpu_seconds([os.getpid(), *pids]) - before
    rewards = np.concatenate([np.ravel(answer) for answer in answers])
    if rewards.size != len(rows) or not np.isfinite(rewards).all():
        raise ValueError(f"{urls} returned {rewards.size} rewards for {len(rows)} rows, or one that is not finite")
    p50, p99 = np.percentile(np.asarray(latencies) * 1000, [50, 99]).tolist()
    first = rewards[:NUM_CHECKED].tolist()
    return {"seconds": seconds, "p50_ms": p50, "p99_ms": p99, "cpu_s": cpu_s, "rewards": first}


Send = Callable[[list[np.ndarray]], Awaitable[Any]]


@contextlib.asynccontextmanager
async def _triton(urls: Sequence[str], width: int, concurrency: int) -> AsyncIterator[Send]:
    settings = ClientSection(deadline_s=DEADLINE_S, retries=0, max_outage_s=0, max_in_flight=concurrency)
    async with TritonClient(urls[0], settings) as client:

        async def send(rows: list[np.ndarray]) -> np.ndarray:
            return (await client.rewards(rows, width=width))[REWARDS]

        yield send


@contextlib.asynccontextmanager
async def _http(urls: Sequence[str], form: str) -> AsyncIterator[Send]:
    """Send each request to the least-loaded instance, which is fairer to the contender than a random choice."""
    path, body_of, rewards_of = FORMS[form]
    in_flight = dict.fromkeys(urls, 0)
    # uvicorn closes a connection that is idle for 5 s, as all are during the turns of the others.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), connector=connector) as session:

        async def send(rows: list[np.ndarray]) -> Any:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            headers = {"Content-Type": "application/json"}
            try:
                async with session.post(f"http://{url}{path}", data=body_of(rows), headers=headers) as answer:
                    answer.raise_for_status()
                    return rewards_of(await answer.read())
            finally:
                in_flight[url] -= 1

        yield send


def pack(rows: list[np.ndarray]) -> bytes:
    """Return the body of a request, all int32: the number of rows, the length of each row, then all tokens."""
    return np.concatenate([[len(rows)], [row.size for row in rows], *rows]).astype(np.int32).tobytes()


def unpack(body: bytes) -> list[np.ndarray]:
    """Return the token rows int64 `[length_i]` of a request's body."""
    numbers = np.frombuffer(body, np.int32).astype(np.int64)
    count = int(numbers[0])
    return np.split(numbers[count + 1 :], np.cumsum(numbers[1:count]))


def _rewards(content: bytes) -> np.ndarray:
    return np.asarray(json.loads(content)["rewards"], np.float32)


FORMS: dict[str, tuple[str, Callable[[list[np.ndarray]], bytes], Callable[[bytes], np.ndarray]]] = {
    "binary": ("/score", pack, partial(np.frombuffer, dtype=np.float32)),
    "tokens": (
        "/v1/rewards",
        lambda rows: json.dumps({"inputs": [{"tokens": row.tolist()} for row in rows]}).encode(),
        _rewards,
    ),
    "texts": (
        "/get_reward",
        lambda rows: json.dumps({"query": [" ".join(f"w{token}" for token in row) for row in rows]}).encode(),
        _rewards,
    ),
    "vllm": (
        "/classify",
        lambda rows: json.dumps({"input": [row.tolist() for row in rows], "use_activation": False}).encode(),
        lambda content: np.asarray([row["probs"][0] for row in json.loads(content)["data"]], np.float32),
    ),
}
"""Path of a request, the body of token rows, and the rewards in the reply's body."""


# ---- the contenders' processes ----


def load_contender(checkpoint: str | Path, threads: int) -> Callable[..., np.ndarray]:
    """Load the reward model; return its `score`."""
    import torch

    from rlhf_triton.python_backend.models.modeling import load_reward, quiet_transformers

    keep_freed_memory()
    torch.set_num_threads(threads)
    quiet_transformers()
    return load_reward(Path(checkpoint)).score


_score: Callable[..., np.ndarray]  # of this process, if it is one of `ideal`


def load_worker(checkpoint: Path, threads: int) -> None:
    """Load the model that `score_in_worker` scores with."""
    global _score
    _score = load_contender(checkpoint, threads)


def score_in_worker(rows: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the scores of a micro-batch `[n]`, and the CPU seconds that they took."""
    before = time.process_time()
    return _score(rows)[:, 0], time.process_time() - before


def rewards_of_transformers(checkpoint: Path) -> list[float]:
    """Return the first rewards of the trace, each from a forward pass of transformers' own class, alone."""
    score = load_contender(checkpoint, CORES)
    return [float(score([row])[0, 0]) for row in make_trace(NUM_CHECKED)]


def serve_one_forward(ports: list[int], checkpoint: str, threads: int) -> None:
    """Serve `POST /score` with one forward pass per request, as OpenRLHF's remote reward server does.

    Leaner than OpenRLHF's server: binary bodies, no tokenisation, and the forward pass in a thread, so that the event
    loop keeps accepting requests.
    """
    score, executor = load_contender(checkpoint, threads), ThreadPoolExecutor(1)

    async def answer(request: web.Request) -> web.Response:
        scores = await asyncio.get_running_loop().run_in_executor(executor, score, unpack(await request.read()))
        return web.Response(body=scores.astype(np.float32).tobytes())

    async def ready(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/ready", ready), web.post("/score", answer)])
    web.run_app(app, host=HOST, port=ports[0], print=None, access_log=None)


def serve_rm(ports: list[int], checkpoint: str, threads: int) -> None:
    """Serve `/get_reward` as OpenRLHF's `serve_rm` does: a forward pass per request, padded on the left."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(threads)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    given = {"return_tensors": "pt", "add_special_tokens": False, "max_length": LONGEST, "truncation": True}
    app = FastAPI()

    @app.post("/get_reward")
    async def get_reward(body: dict[str, Any]) -> dict[str, Any]:
        inputs = tokenizer(body["query"], padding=True, **given)
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            hidden = model.model(inputs["input_ids"], attention_mask=mask, position_ids=positions).last_hidden_state
            rewards = model.score(hidden[:, -1])[:, 0].tolist()
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

    uvicorn.run(app, host=HOST, port=ports[0], log_level="warning")


def serve_vllm(ports: list[int], checkpoint: str, threads: int) -> None:
    """Become vLLM's own pooling server, of the environment that `make test-vllm` has made in `VLLM_ENVIRONMENT`."""
    folder = os.environ.get("VLLM_ENVIRONMENT")
    if folder is None:
        raise RlhfError("VLLM_ENVIRONMENT is not set; run `make test-vllm`, and set it to runs/vllm-environment")
    command = str(Path(folder).absolute() / "venv/bin/vllm")
    # Every round sends the same rows, which a cache of prefixes would answer without computing them.
    settings = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    address = ["--host", HOST, "--port", str(ports[0])]
    pooling = ["--runner", "pooling", "--convert", "classify", "--max-model-len", str(LONGEST)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **VLLM}
    del environment["LD_LIBRARY_PATH"]  # of tritonserver
    os.execve(command, [command, "serve", checkpoint, *address, *pooling, *settings], environment)


def serve_gateway(ports: list[int], triton: str) -> None:
    """Serve the gateway until SIGTERM."""
    import uvicorn

    from rlhf_triton.tools.gateway.app import create_app
    from rlhf_triton.tools.gateway.command import bounded

    settings = GatewaySection(host=HOST, port=ports[0])
    uvicorn.Server(bounded(create_app(TritonClient(triton, ClientSection()), settings), settings)).run()


def serve_pytriton(ports: Sequence[int], checkpoint: str, threads: int, instances: int, strip_multiple: int) -> None:
    """Serve the reward model by PyTriton until SIGTERM, for requests padded to one common width.

    It follows PyTriton's documentation: dynamic batching, one callable per instance. The model is the project's code.
    """
    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    def callable_of(score: Callable[..., np.ndarray]) -> Callable[..., dict[str, np.ndarray]]:
        @batch
        def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
            tokens, lengths = inputs[TOKENS], inputs[SEQUENCE_LENGTHS][:, 0]
            scores = []
            for start in range(0, len(tokens), PYTRITON_MICRO_BATCH):
                part = slice(start, start + PYTRITON_MICRO_BATCH)
                rows = [row[:length] for row, length in zip(tokens[part], lengths[part], strict=True)]
                scores.append(score(rows, stripped_width(int(lengths[part].max()), strip_multiple, tokens.shape[1])))
            return {REWARDS: np.concatenate(scores)}

        return infer

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up only after SIGINT
    http, grpc, metrics = ports
    config = TritonConfig(
        http_address=HOST, http_port=http, grpc_address=HOST, grpc_port=grpc, metrics_port=metrics, exit_timeout_secs=2
    )
    batcher = DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
    with Triton(config=config) as triton:
        triton.bind(
            REWARD_MODEL,
            [callable_of(load_contender(checkpoint, threads)) for _ in range(instances)],
            inputs=[
                Tensor(name=TOKENS, dtype=np.int64, shape=(-1,)),
                Tensor(name=SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,)),
            ],
            outputs=[Tensor(name=REWARDS, dtype=np.float32, shape=(1,))],
            config=ModelConfig(max_batch_size=PYTRITON_BATCH, batcher=batcher),
        )
        triton.serve()


def stripped_width(longest: int, multiple: int, width: int) -> int:
    """Return the width to compute: `longest` rounded up to `multiple`, at most `width`; `width` if `multiple` is 0."""
    return min(width, -(-longest // multiple) * multiple) if multiple else width


CORES = len(os.sched_getaffinity(0))
OPTIONS = {
    "models": Option(["1m", "7m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "rows": Option([1, 8], "rows per request", quick=[8]),
    "concurrency": Option([1, 2, 4, 8, 16, 32, 64, 128, 256], "requests in flight", quick=[1, 8]),
    "repeats": Option(3, "rounds; each measures every contender", quick=1),
    "seconds": Option(1.0, "seconds that the fastest contender spends in one cell", quick=0.1),
    "contenders": Option(list(CONTENDERS)[:5], f"any of {', '.join(CONTENDERS)}", known=CONTENDERS),
    "splits": Option([f"1x{CORES}", f"{CORES}x1"], "instances x threads that each contender may choose", quick=["1x1"]),
    "token_budget": Option(1024, "token budget of a forward pass, of `ours` and `ideal`"),
}
HEADLINE_FACTOR = 3  # the headline cell is measured longer, since most targets are about it
MOST_ROWS_IN_FLIGHT = 256
CELL_LIMIT = 20  # all contenders together take at most this many times `seconds`, or one request per worker
TOLERANCE = 2e-3
OURS, IDEAL = "ours", "ideal"
HEADLINE = (1, 64)  # rows per request, requests in flight
LEAST_RATIO = (
    ("7m", "pytriton_padded", 3.3),
    ("7m", "pytriton_stripped", 2.2),
    ("7m", "one_forward", 1.1),
    ("1m", "one_forward", 2.0),
    ("7m", IDEAL, 0.9),
    ("7m", "serve_rm", 2.5),
    ("7m", "vllm", 1.1),
    ("110m", "vllm", 1.2),
)
P99_OF = (("7m", "vllm"), ("110m", "vllm"))
MOST_RATIO_OVER_GATEWAY = 1 / 0.85
NEVER_SLOWER_FROM = 8
MOST_LATENCY_MS = 4.0  # our latency minus another server's: the queue delay of 2 ms, plus 2 ms
LOOKS: dict[str, tuple[str, Any, str]] = {
    "ideal": ("#3C4043", (0, (5, 2)), "in process, no server"),
    "ours": ("#0072B2", "-", "ours"),
    "one_forward": ("#E69F00", "-", "one forward per request"),
    "gateway_tokens": ("#009E73", "-", "through the gateway, tokens"),
    "gateway_texts": ("#56B4E9", "-", "through the gateway, texts"),
    "serve_rm": ("#8A8F98", "-", "OpenRLHF's serve_rm"),
    "vllm": ("#7B5EA7", "-", "vLLM's pooling server"),
    "pytriton_stripped": ("#CC79A7", "-", "PyTriton, stripped"),
    "pytriton_padded": ("#D55E00", "-", "PyTriton, padded"),
}


def plan_cells(settings: argparse.Namespace, row_s: Sequence[float]) -> Iterator[Cell]:
    """Yield the cells of one model; `row_s`: seconds that each contender takes for a row.

    A cell sends two requests per worker, or as many as take the fastest contender `seconds`, whichever is more, unless
    all contenders together would then take longer than `CELL_LIMIT` allows.
    """
    for rows, level in itertools.product(settings.rows, settings.concurrency):
        if rows * level <= MOST_ROWS_IN_FLIGHT:
            seconds = settings.seconds * (HEADLINE_FACTOR if (rows, level) == HEADLINE else 1)
            wanted = max(2 * level, seconds / min(row_s) / rows)
            affordable = CELL_LIMIT * seconds / sum(row_s) / rows
            yield Cell(rows, level, max(level, 4, math.ceil(min(wanted, affordable))))


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure the sweep with every model."""
    servers = record.out / "servers"
    shutil.rmtree(servers, ignore_errors=True)
    with running_pool(1) as load:
        for name in settings.models:
            checkpoint = servers / f"{name}-checkpoint"
            parameters = make_checkpoint(SIZES[name], checkpoint)
            record.say(f"{name}: {parameters / 1e6:.2f} M parameters; starting the contenders one by one")
            setups = [
                Setup(checkpoint, servers / name, split, settings.token_budget, load) for split in settings.splits
            ]
            with contextlib.ExitStack() as running:
                ModelBench(settings, record, name).run(setups, running)
            shutil.rmtree(checkpoint)  # the largest has half a gigabyte


@dataclass
class ModelBench:
    """The measurement of one model."""

    settings: argparse.Namespace
    record: Record
    model: str
    rewards: list[float] = field(default_factory=list)
    """First rewards by transformers, which all contenders must match."""

    def run(self, setups: Sequence[Setup], running: contextlib.ExitStack) -> None:
        """Start every contender with the best of `setups`, and measure all of them in turn in each cell."""
        with running_pool(1) as pool:
            self.rewards = pool.submit(rewards_of_transformers, setups[0].checkpoint).result()
        started: dict[str, tuple[Measure, Setup]] = {}
        row_s = []
        for name in (name for name in CONTENDERS if name in self.settings.contenders):
            contender, setup, pace = self.start_best(name, setups, running)
            started[name] = contender, setup
            row_s.append(pace)
        for cell in plan_cells(self.settings, row_s):
            for number, name in in_turn(list(started), self.settings.repeats):
                sample = self.send(name, *started[name], cell, purpose="sweep", round=number)
                what = f"{cell.num_requests} requests of {cell.rows}, concurrency {cell.concurrency}"
                rate = sample["sequences"] / sample["seconds"]
                self.record.say(f"{self.model} {what}, round {number + 1}: {name} {rate:.0f} rows/s")

    def start_best(
        self, name: str, setups: Sequence[Setup], running: contextlib.ExitStack
    ) -> tuple[Measure, Setup, float]:
        """Try each setup; keep the fastest one until `running` closes; return it and its seconds per row."""
        cell = Cell(1, 64, 64)
        found: list[tuple[float, int, Measure, Setup, contextlib.ExitStack]] = []
        for setup in setups:
            trial = contextlib.ExitStack()
            running.push(trial)
            contender = trial.enter_context(CONTENDERS[name](name, setup))
            sample = self.send(name, contender, setup, cell, purpose="split", round=0)
            found.append((sample["seconds"] / sample["sequences"], len(found), contender, setup, trial))
            best, *others = sorted(found)
            for *_, trial in others:
                trial.close()
        pace, _, contender, setup, _ = best
        self.record.say(f"{self.model} {name}: {setup.split}, {1 / pace:.1f} rows/s")
        return contender, setup, pace

    def send(self, name: str, contender: Measure, setup: Setup, cell: Cell, **labels: Any) -> dict[str, Any]:
        """Send the cell's requests to a contender; record and return the sample."""
        num_rows = cell.rows * cell.num_requests
        answer = contender(cell)
        sample = {
            "difference": self.difference(name, answer.pop("rewards")),
            "contender": name,
            "model": self.model,
            "rows": cell.rows,
            "concurrency": cell.concurrency,
            **labels,
            "split": setup.split,
            "sequences": num_rows,
            "tokens": int(trace_lengths(num_rows).sum()),
            **answer,
        }
        self.record.add(sample)
        return sample

    def difference(self, name: str, rewards: list[float]) -> float:
        """Return the largest difference to transformers. Raises RlhfError if it is no rounding."""
        found = np.asarray(rewards) - self.rewards[: len(rewards)]
        if (np.abs(found) > TOLERANCE * (1 + np.abs(self.rewards[: len(rewards)]))).any():
            raise RlhfError(f"{name} scores {rewards}, but transformers scores {self.rewards}")
        return float(np.abs(found).max())


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return medians for every contender at every point; small models first, and within a point the fastest one."""
    rows = []
    for point, samples in grouped(select(result["samples"], purpose="sweep"), "model", "rows", "concurrency").items():
        for (name,), own in grouped(samples, "contender").items():
            rows.append(
                {
                    **dict(zip(("model", "rows", "concurrency"), point, strict=True)),
                    "contender": name,
                    "split": own[-1]["split"],
                    "rounds": len(own),
                    "sequences_per_s": median_of(s["sequences"] / s["seconds"] for s in own),
                    "tokens_per_s": median_of(s["tokens"] / s["seconds"] for s in own),
                    "ours_over_this": ratio(samples, name, OURS, "seconds"),
                    "p50_ms": median_of(s["p50_ms"] for s in own),
                    "p99_ms": median_of(s["p99_ms"] for s in own),
                    "ours_p99_over_this": None if name == IDEAL else ratio(samples, OURS, name, "p99_ms"),
                    "ours_later_ms": median_of(
                        a["p50_ms"] - b["p50_ms"] for a, b in pairs(samples, OURS, name) if b["p50_ms"] is not None
                    ),
                    "cpu_ms_per_token": median_of(s["cpu_s"] * 1e3 / s["tokens"] for s in own),
                    "difference": max(s["difference"] for s in own),
                }
            )
    return sorted(rows, key=lambda r: (list(SIZES).index(r["model"]), r["rows"], r["concurrency"], -r["tokens_per_s"]))


def targets(result: Result) -> list[Target]:
    """Return all targets, including those without a measurement."""
    rows = result["summary"]
    headline = {(r["model"], r["contender"]): r for r in rows if (r["rows"], r["concurrency"]) == HEADLINE}
    found = []
    for model, other, least in LEAST_RATIO:
        row = headline.get((model, other), {"ours_over_this": None, "rounds": 0})
        detail = f"median of {row['rounds']} matched rounds"
        found.append(Target(f"{model}: ours / {other}, times as fast", row["ours_over_this"], least, None, detail))
    for model, other in P99_OF:
        value = headline.get((model, other), {"ours_p99_over_this": None})["ours_p99_over_this"]
        found.append(Target(f"{model}: p99 of ours / of {other}", value, None, 1.0))
    through, where = _worst([row for row in rows if row["contender"].startswith("gateway")], "ours_over_this", max)
    name = "ours / through the gateway, times as fast"
    found.append(Target(name, through, None, MOST_RATIO_OVER_GATEWAY, where))
    servers = [row for row in rows if row["contender"] not in (OURS, IDEAL)]
    busy = [row for row in servers if row["concurrency"] >= NEVER_SLOWER_FROM]
    slowest, where = _worst(busy, "ours_over_this", min)
    name = f"ours / any other server from concurrency {NEVER_SLOWER_FROM} on, times as fast"
    found.append(Target(name, slowest, 1.0, None, where))
    latest, where = _worst(select(servers, concurrency=1), "ours_later_ms", max)
    found.append(Target("concurrency 1: ours - other, ms of median latency", latest, None, MOST_LATENCY_MS, where))
    return found


def _worst(rows: Sequence[dict[str, Any]], key: str, pick: Callable[..., Any]) -> tuple[float | None, str]:
    """Return the worst value of `key` at any point against any other server, and where it was."""
    found = [
        (row[key], f"worst at {row['model']}, {row['rows']} x {row['concurrency']} against {row['contender']}")
        for row in rows
        if row[key] is not None
    ]
    return pick(found, default=(None, ""))


def draw(result: Result, out: Path) -> None:
    """Draw tokens per second over concurrency, with a panel for each model and number of rows per request."""
    every = grouped(result["summary"], "model", "rows").items()
    panels = [(key, rows) for key, rows in every if len(grouped(rows, "concurrency")) > 1]
    if not panels:
        return
    with figure_of(out / "throughput.png", (5.2 * len(panels), 4.2)) as figure:
        for axes, ((model, num_rows), rows) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            for name, (colour, dashes, label) in LOOKS.items():
                curve = sorted((row["concurrency"], row["tokens_per_s"]) for row in select(rows, contender=name))
                width = 2.6 if name == OURS else 1.6
                if curve:
                    axes.plot(
                        *zip(*curve, strict=True), color=colour, ls=dashes, lw=width, marker="o", ms=4, label=label
                    )
            title = f"{model} model, {num_rows} row{'s' if num_rows > 1 else ''} a request"
            axes.set(title=title, xlabel="concurrency (requests in flight)", ylabel="tokens per second")
            axes.set_ylim(bottom=0)
            axes.set_xscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
