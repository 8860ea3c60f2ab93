"""Code shared by the benchmarks: random models and requests, servers, rounds, CPU time, and the report."""

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import write_json
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.starting import start_server
from rlhf_triton.tools.server.tritonserver import TritonServer

Measurement = dict[str, Any]
HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
FREE_PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}

# ---- models and requests, the same on every machine ----

SEED = 0
VOCAB_SIZE = 4096
MIN_TOKENS = 16  # tokens
MAX_TOKENS = 512
SIZES = {  # layers, width, width of the MLP
    "tiny": (2, 64, 128),
    "1m": (4, 128, 336),
    "7m": (6, 256, 896),
    "110m": (12, 768, 2816),
    "1b": (16, 2048, 8192),
    "8b": (32, 4096, 14336),
}


def make_trace(num_rows: int) -> list[np.ndarray]:
    """Return token rows int64 `[length_i]` of log-normal lengths; a shorter trace is a prefix of a longer one."""
    lengths = np.clip(np.rint(np.random.default_rng(SEED).lognormal(4.8, 0.8, num_rows)), MIN_TOKENS, MAX_TOKENS)
    generator = np.random.default_rng(SEED + 1)
    return [generator.integers(3, VOCAB_SIZE, int(length), dtype=np.int64) for length in lengths]


def make_checkpoint(kind: str, size: str, folder: Path, *, device: str = "cpu", **settings: Any) -> int:
    """Write a random Llama with a tokenizer to `folder`; return its number of parameters.

    Args:
        kind: policy or reward.
        size: a key of `SIZES`.
        device: where its weights are drawn; in bfloat16 unless that is the CPU.
        settings: arguments of `LlamaConfig` in place of those of a small model.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    layers, width, feed_forward = SIZES[size]
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "num_labels": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    kinds: dict[str, Any] = {
        "policy": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
    }
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            model = kinds[kind](LlamaConfig(**{**config, **settings}))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    # The word `w3` is token 3, and so on.
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB_SIZE))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def closed_loop(
    send: Callable[[Any], Awaitable[Any]], requests: Sequence[Any], concurrency: int
) -> tuple[float, list[float], list[Any]]:
    """Send all requests, `concurrency` at a time; return the seconds in all, and each request's latency and answer."""
    latencies = [0.0] * len(requests)
    answers: list[Any] = [None] * len(requests)
    waiting = iter(range(len(requests)))  # one event loop: the workers share the iterator

    async def work() -> None:
        for index in waiting:
            sent = time.perf_counter()
            answers[index] = await send(requests[index])
            latencies[index] = time.perf_counter() - sent

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start, latencies, answers


# ---- processes ----


@contextlib.contextmanager
def running_triton(config: RunConfig) -> Iterator[TritonServer]:
    """Run a tritonserver on the run's repository; yield it once it is ready.

    Raises:
        ServerStartError: the block failed because the server had died.
    """
    server = start_server(config, log=lambda line: None)
    try:
        yield server
    except RlhfError:
        server.raise_if_dying()
        raise
    finally:
        server.stop()


@contextlib.contextmanager
def running(child: Child, address: str, path: str) -> Iterator[int]:
    """Yield the child's pid once its server is ready by the status of `path`; stop it and its descendants at the end.

    `address`: host:port.
    """
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while get_page(address, path) != "OK":
            if child.poll() is not None:
                raise RlhfError(child.exit_message())
            if time.monotonic() > deadline:
                raise RlhfError(f"{child.name} was not ready within {START_TIMEOUT_S:g} s; its log: {child.log_path}")
            time.sleep(0.05)
        yield child.process.pid
    finally:
        family = psutil.Process(child.process.pid).children(recursive=True) if child.poll() is None else []
        child.stop(signal.SIGTERM, 20)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return CPU seconds, user and system, of the processes and all their descendants that still run."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(process.cpu_times()[:2])
    return total


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Call `do`; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


# ---- rounds ----


def in_turn(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each round has every name once and starts with another name than the round before."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            yield number, name


def grouped(samples: Iterable[Measurement], *keys: str) -> dict[tuple[Any, ...], list[Measurement]]:
    """Group samples by the values of `keys`, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample[key] for key in keys), []).append(sample)
    return groups


def matched_ratio(samples: Iterable[Measurement], one: str, other: str, key: str) -> float | None:
    """Return the median over the rounds of `one`'s `key` divided by `other`'s; None if no round has both."""
    values = {(sample["contender"], sample["round"]): sample[key] for sample in samples}
    ratios = [
        value / values[other, number]
        for (name, number), value in values.items()
        if name == one and (other, number) in values
    ]
    return median(ratios) if ratios else None


# ---- the report ----


class Record:
    """A measurement in progress; result.json is rewritten after each sample, so that an interruption loses no other."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.out: Path = settings.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.samples: list[Measurement] = []
        self.has_failed = False
        self._about = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "settings": {key: str(value) for key, value in vars(settings).items()},
            "machine": machine(),
            "versions": versions(),
        }
        self._start = time.monotonic()

    def add(self, sample: Measurement) -> None:
        """Append a sample and write result.json."""
        self.samples.append(sample)
        self._write([])

    def say(self, line: str) -> None:
        """Print a line of progress, preceded by the seconds since the start."""
        print(f"{time.monotonic() - self._start:6.0f} s  {line}", file=sys.stderr, flush=True)

    def report(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Write result.json with the rows and report.md; return the text of the latter."""
        self._write(rows)
        about = [f"* {key}: {value}" for key, value in self._about.items()]
        text = "\n".join([*about, "", markdown(rows)])
        (self.out / "report.md").write_text(text + "\n")
        return text

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.out / "result.json", {**self._about, "rows": rows, "samples": self.samples}, durable=False)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a column for each key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, ["---"] * len(keys), *([_shown(row.get(key)) for key in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and load."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return {
        "processor": match[1] if match else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, and the commit of this checkout."""
    packages = ("torch", "transformers", "numpy", "tritonclient", "nvidia-pytriton")
    installed = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name in packages
    }
    describe = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"python": platform.python_version(), **installed, "commit": done.stdout.strip() or "unknown"}
