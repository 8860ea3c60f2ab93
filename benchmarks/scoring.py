"""Benchmark of scoring: the project's server against PyTriton and vLLM's pooling server, on the same cores.

Every round measures all contenders in turn with the same requests. Each contender divides the cores among instances
and threads in the way that is fastest for it, and must return the scores of transformers.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.measuring import (
    FREE_PORTS,
    HOST,
    MAX_TOKENS,
    SIZES,
    Measurement,
    Record,
    closed_loop,
    cpu_seconds,
    grouped,
    in_turn,
    make_checkpoint,
    make_trace,
    matched_ratio,
    running,
    running_triton,
)
from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.ports import free_port
from rlhf_triton.tools.server.triton_home import find_tritonserver, server_environment
from rlhf_triton.tools.server.vllm import ENVIRONMENT as VLLM
from rlhf_triton.wire.contract import REWARD_MODEL, REWARDS, SEQUENCE_LENGTHS, TOKENS

CORES = len(os.sched_getaffinity(0))
QUEUE_DELAY_US = 2000
PYTRITON_BATCH = 8  # rows
PYTRITON_STARTS = 3
# Instances load at once; all but the first connect to a socket of the first, which may not listen yet.
PYTRITON_RACE = "get_config_from_handshake_server"
DEADLINE_S = 900.0
NUM_CHECKED = 32  # first rewards, which are compared with those of transformers
TOLERANCE = 2e-3
OURS = "ours"
IN_FLIGHT = 64  # requests, of one row each
WARM_UP = 16  # requests
Send = Callable[[np.ndarray], Awaitable[float]]


class Setup(NamedTuple):
    """Start settings of a contender."""

    checkpoint: Path
    folder: Path
    instances: int
    threads: int


class Running(NamedTuple):
    """A started contender."""

    connect: Callable[[], contextlib.AbstractAsyncContextManager[Send]]
    pids: list[int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["7m"])
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--repeats", type=int, default=3, help="rounds; each measures every contender")
    add("--seconds", type=float, default=3.0, help="seconds of the fastest contender's turn")


def measure(settings: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Measure all contenders with every model; return medians for each point and contender."""
    for model in settings.models:
        folder = record.out / "servers" / model
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint = folder / "checkpoint"
        make_checkpoint("reward", model, checkpoint)
        expected = rewards_of_transformers(checkpoint)
        setups = [Setup(checkpoint, folder / f"{n}x{CORES // n}", n, CORES // n) for n in sorted({1, CORES})]
        with contextlib.ExitStack() as stack:
            started: dict[str, Running] = {}
            pace: dict[str, float] = {}
            for name in settings.contenders:
                setup, pace[name] = fastest(name, setups, expected)
                started[name] = stack.enter_context(CONTENDERS[name](setup))
                record.say(f"{model} {name}: {1 / pace[name]:.1f} rows/s")
            num_requests = max(2 * IN_FLIGHT, math.ceil(settings.seconds / min(pace.values())))
            for number, name in in_turn(list(started), settings.repeats):
                timing = send(started[name], num_requests, expected)
                record.add({"model": model, "contender": name, "round": number, **timing})
                record.say(f"{model}, round {number + 1}: {name} {num_requests / timing['seconds']:.1f} rows/s")
        shutil.rmtree(checkpoint)
    return summary(record.samples)


def fastest(name: str, setups: Sequence[Setup], expected: np.ndarray) -> tuple[Setup, float]:
    """Return a contender's fastest setup, and its seconds per row."""
    seconds = {}
    for setup in setups:
        with CONTENDERS[name](setup) as server:
            seconds[setup] = send(server, IN_FLIGHT, expected)["seconds"] / IN_FLIGHT
    return min(seconds.items(), key=lambda item: item[1])


def send(server: Running, num_requests: int, expected: np.ndarray) -> Measurement:
    """Send requests to a contender; return times, CPU seconds and the largest difference to transformers."""
    return asyncio.run(_send(server, num_requests, expected))


async def _send(server: Running, num_requests: int, expected: np.ndarray) -> Measurement:
    rows = make_trace(num_requests)
    async with server.connect() as sender:
        await closed_loop(sender, rows[:WARM_UP], IN_FLIGHT)
        before = time.process_time() + cpu_seconds(server.pids)
        seconds, latencies, answers = await closed_loop(sender, rows, IN_FLIGHT)
        cpu_s = time.process_time() + cpu_seconds(server.pids) - before
    p50, p99 = np.percentile(np.asarray(latencies) * 1e3, [50, 99]).tolist()
    return {
        "sequences": len(rows),
        "tokens": sum(row.size for row in rows),
        "seconds": seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "cpu_s": cpu_s,
        "difference": difference(np.ravel(answers), len(rows), expected),
    }


def difference(rewards: np.ndarray, num_rows: int, expected: np.ndarray) -> float:
    """Return the largest difference to the first rewards of transformers. Raises RlhfError if it exceeds rounding."""
    if rewards.size != num_rows or not np.isfinite(rewards).all():
        raise RlhfError(f"{rewards.size} rewards for {num_rows} rows, or one that is not finite")
    wanted = expected[:num_rows]
    differences = np.abs(rewards[: wanted.size] - wanted)
    if (differences > TOLERANCE * (1 + np.abs(wanted))).any():
        raise RlhfError(f"the scores are {rewards[: wanted.size]}, those of transformers {wanted}")
    return float(differences.max())


def rewards_of_transformers(checkpoint: Path) -> np.ndarray:
    """Return the first rewards of the trace, each from a forward pass of transformers' own class, alone."""
    score = load_model(checkpoint, CORES)
    rows = make_trace(NUM_CHECKED)
    return np.asarray([score(row[None], np.ones((1, row.size), np.int64))[0, 0] for row in rows], np.float64)


def load_model(checkpoint: Path, threads: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function from `tokens` and `mask` [B, S] to rewards [B, 1]."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(threads)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        logits = model(input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask)).logits
        return np.asarray(logits.numpy())

    return score


# ---- the contenders ----


@contextlib.contextmanager
def ours(setup: Setup) -> Iterator[Running]:
    """Run the project's tritonserver."""
    sections = {
        "run": {"dir": setup.folder / "ours", "run_id": "bench"},
        "reward": {
            "model": setup.checkpoint,
            "instances": setup.instances,
            "threads": setup.threads,
            "add_special_tokens": False,
        },
        "actor": {"algorithm": {"name": "reinforce++"}},
        "server": FREE_PORTS,
    }
    with running_triton(RunConfig.model_validate(sections)) as server:
        yield Running(partial(to_triton, server.section.http_url, 0), [server.pid])


@contextlib.contextmanager
def pytriton_padded(setup: Setup) -> Iterator[Running]:
    """Run a PyTriton server; its clients pad every row to `MAX_TOKENS` tokens."""
    ports = [free_port() for _ in range(3)]
    job = json.dumps([str(setup.checkpoint), setup.instances, setup.threads, *ports])
    # PyTriton's stubs need this interpreter's libpython, like the stubs of the project's tritonserver.
    environment = {**server_environment(find_tritonserver()), "OMP_NUM_THREADS": str(setup.threads)}
    address = f"{HOST}:{ports[0]}"
    with contextlib.ExitStack() as stack:
        for starts_left in reversed(range(PYTRITON_STARTS)):
            child = Child("PyTriton", ["benchmarks.scoring", job], setup.folder / "pytriton.log", environment)
            try:
                pid = stack.enter_context(running(child, address, f"/v2/models/{REWARD_MODEL}/ready"))
                break
            except RlhfError as error:
                if not starts_left or PYTRITON_RACE not in str(error):
                    raise
        yield Running(partial(to_triton, address, MAX_TOKENS), [pid])


@contextlib.contextmanager
def vllm(setup: Setup) -> Iterator[Running]:
    """Run vLLM's own pooling server, of the environment that `make test-vllm` makes; a process for each instance."""
    folder = os.environ.get("VLLM_ENVIRONMENT")
    if folder is None:
        raise RlhfError("VLLM_ENVIRONMENT is not set; run `make test-vllm`, and set it to runs/vllm-environment")
    command = [str(Path(folder).absolute() / "venv/bin/vllm"), "serve", str(setup.checkpoint), "--host", HOST]
    command += [
        "--runner",
        "pooling",
        "--convert",
        "classify",
        "--max-model-len",
        str(MAX_TOKENS),
        "--dtype",
        "float32",
    ]
    # Every round sends the same rows, which a cache of prefixes would answer without computing them.
    command += ["--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"]
    environment = {
        **VLLM,
        "OMP_NUM_THREADS": str(setup.threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    ports = [free_port() for _ in range(setup.instances)]
    with contextlib.ExitStack() as stack:
        pids = []
        for port in ports:
            log = setup.folder / f"vllm-{port}.log"
            child = Child("vLLM", ["--port", str(port)], log, environment, command=command)
            pids.append(stack.enter_context(running(child, f"{HOST}:{port}", "/health")))
        yield Running(partial(to_vllm, [f"http://{HOST}:{port}" for port in ports]), pids)


CONTENDERS: dict[str, Callable[[Setup], contextlib.AbstractContextManager[Running]]] = {
    OURS: ours,
    "pytriton_padded": pytriton_padded,
    "vllm": vllm,
}


@contextlib.asynccontextmanager
async def to_triton(url: str, width: int) -> AsyncIterator[Send]:
    """Yield a sender that pads rows to `width` tokens; 0: to the longest row of the request."""
    settings = ClientSettings(deadline_s=DEADLINE_S, max_outage_s=0)
    async with TritonClient(url, settings, retries=0, max_in_flight=1024) as client:

        async def sender(row: np.ndarray) -> float:
            return float((await client.rewards([row], width=width))[REWARDS][0, 0])

        yield sender


@contextlib.asynccontextmanager
async def to_vllm(urls: Sequence[str]) -> AsyncIterator[Send]:
    """Yield a sender of token ids to the least-loaded instance, which answers raw scores."""
    in_flight = dict.fromkeys(urls, 0)
    # uvicorn closes a connection that is idle for 5 s, as all are during the turns of the others.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), connector=connector) as session:

        async def sender(row: np.ndarray) -> float:
            url = min(in_flight, key=in_flight.__getitem__)
            in_flight[url] += 1
            body = {"input": [row.tolist()], "use_activation": False}
            try:
                async with session.post(f"{url}/classify", json=body) as answer:
                    answer.raise_for_status()
                    return float((await answer.json())["data"][0]["probs"][0])
            finally:
                in_flight[url] -= 1

        yield sender


def serve_pytriton(checkpoint: Path, instances: int, threads: int, http: int, grpc: int, metrics: int) -> None:
    """Serve the reward model by PyTriton until SIGTERM, as its documentation says: dynamic batching of padded rows."""
    from pytriton.decorators import batch
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    def callable_of(score: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., dict[str, np.ndarray]]:
        @batch
        def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
            tokens = inputs[TOKENS]
            mask = np.arange(tokens.shape[1]) < inputs[SEQUENCE_LENGTHS]
            padded = np.where(mask, tokens, 2)  # transformers finds the last token by the id of the padding
            return {REWARDS: score(padded, mask.astype(np.int64))}

        return infer

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up only after SIGINT
    addresses = {"http_address": HOST, "http_port": http, "grpc_address": HOST, "grpc_port": grpc}
    with Triton(config=TritonConfig(**addresses, metrics_port=metrics, exit_timeout_secs=2)) as triton:
        triton.bind(
            REWARD_MODEL,
            [callable_of(load_model(checkpoint, threads)) for _ in range(instances)],
            inputs=[
                Tensor(name=TOKENS, dtype=np.int64, shape=(-1,)),
                Tensor(name=SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,)),
            ],
            outputs=[Tensor(name=REWARDS, dtype=np.float32, shape=(1,))],
            config=ModelConfig(
                max_batch_size=PYTRITON_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
            ),
        )
        triton.serve()


# ---- the report ----


def summary(samples: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return medians for every model and contender; ratios are medians over matched rounds."""
    rows = []
    for (model,), of_model in grouped(samples, "model").items():
        for (name,), own in grouped(of_model, "contender").items():
            row = {
                "model": model,
                "contender": name,
                "rows_per_s": median(s["sequences"] / s["seconds"] for s in own),
                "ours_times_as_fast": matched_ratio(of_model, name, OURS, "seconds"),
                "p50_ms": median(s["p50_ms"] for s in own),
                "p99_ms": median(s["p99_ms"] for s in own),
                "p99_of_ours": matched_ratio(of_model, OURS, name, "p99_ms"),
                "cpu_ms_per_token": median(s["cpu_s"] * 1e3 / s["tokens"] for s in own),
                "difference": max(s["difference"] for s in own),
            }
            rows.append(row)
    return rows


if __name__ == "__main__":  # in the process of PyTriton
    serve_pytriton(*json.loads(sys.argv[1]))
