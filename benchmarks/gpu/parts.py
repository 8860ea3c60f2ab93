"""Parts of the GPU check that serve and score. Each yields its numbers as soon as it has them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import memory
from benchmarks.gpu.job import HUGE, Found, Job, Skipped, main
from benchmarks.gpu.serving import Served, token_inputs
from benchmarks.support.benchmark import Record, Target
from benchmarks.support.usage import timed
from benchmarks.support.workload import closed_loop
from python_backend.config import ClientSection, RunConfig
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC, REWARD_MODEL, REWARDS, SENTENCES, SEQUENCE_LENGTHS, TOKENS
from trainer.publish import copy_checkpoint, initialise_store

IN_FLIGHT = 64
ROUNDS = 8  # of as many requests, in a measurement of throughput
HUGE_GIB = 40  # of GPU memory, and of disk space, with which the largest model is measured
FP32_ERROR = 1e-3  # standard deviations of the scores
MOST_BF16_ERROR = 2.0  # times transformers' own
MOST_SWAP_MEMORY = 1.2  # times the weights, beside those that are served
QUIET_S = 2.0  # of requests before a swap
BAD_EVERY = 8  # requests


def environment(job: Job) -> Found:
    """Card, driver and versions, and its rates at best."""
    yield {"Python": sys.version.split()[0], "PyTorch": f"{torch.__version__}, CUDA {torch.version.cuda}"}
    if job.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,persistence_mode", "--format=csv,noheader"]
        with contextlib.suppress(OSError):  # as on a simulated device
            yield {"Driver, power limit, persistence": subprocess.check_output(query, text=True).strip()}
        yield {
            "card": f"{card.name}, {card.total_memory / 2**30:.1f} GiB, compute capability {card.major}.{card.minor}"
        }
    yield Target("bfloat16 matrix product, TFLOP/s", _dense_rate(job) / 1e12)
    block = torch.zeros((1 << 20 if job.small else 1 << 28), device=job.device)
    yield Target("copy within the device, GB/s, read and written", 2 * block.nbytes / _seconds(job, block.clone) / 1e9)
    if job.device == "cuda":
        host = torch.zeros(block.numel() // 8, pin_memory=True)
        rate = host.nbytes / _seconds(job, lambda: host.to(job.device, non_blocking=True)) / 1e9
        yield Target("copy from pinned host memory, GB/s", rate)
    one = torch.zeros(1, device=job.device)
    yield Target(
        "a small kernel, launched 1,000 times, us", 1e3 * _seconds(job, lambda: [one.add_(1) for _ in range(1000)])
    )


def device_tests(job: Job) -> Found:
    """The tests of the device code."""
    if job.device == "cpu":
        raise Skipped("there is no GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *shlex.split(job.tests)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    counts = {
        what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.splitlines()[-1])
    }
    yield Target("tests passed", counts.get("passed", 0), 1)
    yield Target("tests failed", counts.get("failed", 0) + counts.get("error", 0) + (done.returncode > 1), None, 0)
    yield Target("tests skipped", counts.get("skipped", 0), detail="device_tests.log names them and the reasons")


def served_score(job: Job) -> Found:
    """Served scores against transformers' own."""
    rows = job.rows(IN_FLIGHT)
    exact = _direct(job, rows, torch.float32)

    def error(scores: np.ndarray) -> float:
        return float(np.abs(scores - exact).max() / exact.std())

    served = {dtype: error(_served(job.config(dtype=dtype), rows)) for dtype in ("float32", "bfloat16")}
    yield Target("float32: error of served scores", served["float32"], None, FP32_ERROR)
    own = error(_direct(job, rows, torch.bfloat16))
    yield Target("bfloat16: error of transformers' own scores", own)
    yield Target("bfloat16: error of served scores, times that", served["bfloat16"] / own, None, MOST_BF16_ERROR)


@torch.no_grad()
def _direct(job: Job, rows: list[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """Return transformers' scores of each row alone, float64 `[n]`."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(job.config().reward.checkpoint, dtype=dtype)
    model = model.to(job.device).eval()
    return np.asarray([float(model(torch.from_numpy(row)[None].to(job.device)).logits[0, 0]) for row in rows])


def _served(config: RunConfig, rows: list[np.ndarray]) -> np.ndarray:
    with Served(config, REWARD_MODEL) as served:
        return served.score(rows)[REWARDS][:, 0].astype(float)


def throughput(job: Job) -> Found:
    """Scoring of 64 requests in flight, for each model, without and with a server."""
    rate = _dense_rate(job)
    models = [job.model]
    if not job.small:
        if min(torch.cuda.mem_get_info()[0], shutil.disk_usage(job.scratch).free) < HUGE_GIB << 30:
            yield Target(HUGE, None, detail=f"skipped: needs {HUGE_GIB} GiB of the card's memory and of disk space")
        else:
            models.append(HUGE)
    rows = job.rows(IN_FLIGHT * (2 if job.small else ROUNDS))
    for model in models:
        config = job.config(model=model, algorithm="reinforce++")
        for place, open_client in {"in process": _in_process, "tritonserver": _with_tritonserver}.items():
            try:
                seconds = asyncio.run(_score_all(open_client(config), rows))
            except Skipped as why:
                yield Target(f"{model}, {place}: tokens/s", None, detail=f"skipped: {why}")
                continue
            yield Target(f"{model}, {place}: tokens/s", sum(row.size for row in rows) / seconds)
            if job.device == "cuda":
                share = _operations(config, rows) / seconds / rate
                yield Target(f"{model}, {place}: share of the dense rate", share, detail=f"{rate / 1e12:.3g} TFLOP/s")


async def _score_all(opening: Any, rows: list[np.ndarray]) -> float:
    """Return the seconds in which a client scores all rows, one a request."""
    async with opening as send:
        await closed_loop(send, rows[:IN_FLIGHT], IN_FLIGHT)
        seconds, _, answers = await closed_loop(send, rows, IN_FLIGHT)
        assert np.isfinite(np.concatenate(answers)).all()
        return seconds


@contextlib.asynccontextmanager
async def _in_process(config: RunConfig) -> Any:
    loop = asyncio.get_running_loop()
    with Served(config, REWARD_MODEL) as served, ThreadPoolExecutor(IN_FLIGHT) as threads:
        yield lambda row: loop.run_in_executor(threads, lambda: served.score([row])[REWARDS])


@contextlib.asynccontextmanager
async def _with_tritonserver(config: RunConfig) -> Any:
    from tools.server.triton_home import ServerStartError, find_tritonserver

    try:
        home = find_tritonserver()
    except ServerStartError as error:
        raise Skipped(f"no tritonserver ({error})") from error
    if home.from_wheel and np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        raise Skipped(f"NumPy {np.__version__} is installed, and the wheel's tritonserver needs numpy<2")
    from actor.scoring.client import TritonClient
    from benchmarks.support.servers import start_triton

    with contextlib.ExitStack() as running:
        server = start_triton(config)
        running.callback(server.stop)
        settings = ClientSection(deadline_s=60, retries=0, max_outage_s=0, max_in_flight=IN_FLIGHT)
        async with TritonClient(server.section.http_url, settings) as client:

            async def send(row: np.ndarray) -> np.ndarray:
                return (await client.rewards([row]))[REWARDS]

            yield send


def _operations(config: RunConfig, rows: list[np.ndarray]) -> float:
    """Return the operations of a forward pass over these rows, without padding: causal attention counts half."""
    shape = json.loads((config.reward.checkpoint / "config.json").read_text())
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    attention = width * (2 + 2 * shape["num_key_value_heads"] / shape["num_attention_heads"])
    weights = layers * width * (attention + 3 * shape["intermediate_size"])
    return sum(2.0 * weights * row.size + 2.0 * layers * width * row.size**2 for row in rows)


def swap(job: Job) -> Found:
    """A new critic version under requests."""
    config = job.config()
    store = WeightsStore(config.run.weights_dir)
    initialise_store(store, config.critic, run_id="check")
    with Served(config, CRITIC) as served:
        weights = sum(p.nbytes for p in served.model.current_model().model.model.parameters())
        replies: list[tuple[float, int]] = []
        stop = threading.Event()
        row = job.rows(1)[0]

        def request() -> None:
            while not stop.is_set():
                version = int(served.score([row])["weights_version"][0, 0])
                replies.append((time.monotonic(), version))

        with ThreadPoolExecutor(8) as threads:
            clients = [threads.submit(request) for _ in range(8)]
            try:
                write = functools.partial(copy_checkpoint, store.folder(0))
                manifest = store.add(write, run_id="check", step=1, parent=0, epoch=0, reuse=False)
                quiet = time.monotonic()
                time.sleep(QUIET_S)
                before = memory.reset_peak(job.device)
                published = time.monotonic()
                store.set_current(manifest.version)
                while replies[-1][1] != manifest.version and not any(client.done() for client in clients):
                    time.sleep(0.01)
                time.sleep(QUIET_S / 2)
                peak = memory.peak_bytes(job.device)
            finally:
                stop.set()
            for client in clients:
                client.result()
    served_at = next(at for at, version in replies if version == manifest.version)
    yield Target("published to served, s", served_at - published, detail=f"weights of {weights / 1e9:.2f} GB")
    for name, begin, end in (("as long before it", quiet, published), ("the swap", published, served_at + QUIET_S / 2)):
        times = [begin, *sorted(at for at, _ in replies if begin < at < end)]
        yield Target(f"longest time without a reply, {name}, ms", 1e3 * float(np.diff(times).max()))
    if job.device == "cuda":
        more = (peak - before) / weights
        yield Target("most memory beside the served version, times the weights", more, None, MOST_SWAP_MEMORY)


def planner(job: Job) -> Found:
    """The dry run's memory against the peak."""
    settings = argparse.Namespace(models=[job.model], roles=list(memory.ROLES), budget=1024, device=job.device)
    record = Record(Path(job.scratch) / "planner", {"samples": []})
    memory.measure(settings, record)
    limited = not job.small
    for sample in memory.summarise(record.result):
        yield Target(
            f"{sample['role']}: planned / peak",
            sample["planned / peak"],
            1 - memory.NEAR if limited else None,
            1 + memory.NEAR if limited else None,
            f"{sample['planned_mb'] / 1e3:.3g} / {sample['peak_mb'] / 1e3:.3g} GB",
        )


def mixed_requests(job: Job) -> Found:
    """Good and bad requests, many at a time."""
    count = 200 if job.small else 1000
    config = job.config(dtype="float32")
    pool, generator = job.rows(IN_FLIGHT), np.random.default_rng(1)
    chosen = [generator.integers(0, len(pool), 1 + i % 4) for i in range(count)]
    with Served(config, REWARD_MODEL) as served, ThreadPoolExecutor(16) as threads:
        alone = np.concatenate([served.score([row])[REWARDS] for row in pool])

        def send(i: int) -> Any:
            if i % BAD_EVERY == 0:
                bad = _bad_requests(pool[chosen[i][0]])
                return served.ask(**bad[i // BAD_EVERY % len(bad)])
            if i % 5 == 0:
                texts = [" ".join(f"w{token}" for token in pool[k]).encode() for k in chosen[i]]
                return served.ask(**{SENTENCES: np.asarray(texts, np.object_)[:, None]})
            return served.ask(**token_inputs([pool[k] for k in chosen[i]]))

        seconds, replies = timed(lambda: list(threads.map(send, range(count))))
    good = [i for i in range(count) if i % BAD_EVERY]
    answered = [i for i in good if replies[i].error is None]
    errors = [np.abs(replies[i].outputs[REWARDS] - alone[chosen[i]]).max() / alone.std() for i in answered]
    taken = [i for i in range(0, count, BAD_EVERY) if "INVALID_ARG" not in (replies[i].error or "")]
    refusals = {replies[i].error for i in good if replies[i].error is not None}
    yield Target("requests with a reply", len(replies), count, detail=f"in {seconds:.1f} s")
    yield Target("good requests refused", len(good) - len(answered), None, 0, "; ".join(sorted(refusals))[:200])
    yield Target("bad requests not refused as invalid", len(taken), None, 0)
    yield Target("largest difference from the row scored alone", float(max(errors)), None, FP32_ERROR)


def _bad_requests(row: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Return requests that a server must refuse, made of a good row."""
    tokens = row[None]
    return [
        token_inputs([np.append(row, 10_000_000)]),  # outside the vocabulary
        token_inputs([np.append(row, -1)]),
        token_inputs([np.full(100_000, 3)]),  # more than the model's positions
        {TOKENS: tokens, SEQUENCE_LENGTHS: np.asarray([[0]])},
        {TOKENS: tokens, SEQUENCE_LENGTHS: np.asarray([[row.size + 1]])},
        {TOKENS: tokens.astype(np.float32)},
        {TOKENS: tokens[:0]},
        {SENTENCES: np.asarray([[b"\xff"]], np.object_)},
    ]


def _seconds(job: Job, do: Callable[[], Any]) -> float:
    """Return the shortest of three times of `do`, after a first one that warms up."""

    def run() -> None:
        do()
        job.synchronise()

    run()
    return min(timed(run)[0] for _ in range(3))


def _dense_rate(job: Job) -> float:
    """Return the operations per second of a large bfloat16 matrix product of random numbers."""
    size = 256 if job.small else 8192
    one, other = (torch.randn(size, size, device=job.device).bfloat16() for _ in range(2))
    return 2.0 * size**3 / _seconds(job, lambda: one @ other)


if __name__ == "__main__":
    parts = (environment, device_tests, served_score, throughput, swap, planner, mixed_requests)
    main({part.__name__: part for part in parts})
