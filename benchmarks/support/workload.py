"""Workload of the benchmarks: a trace of token rows, sent in a closed loop, and models with random weights.

The trace is the same on every machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.random_models import random_llama
from python_backend.wire.training_payload import TrainPayload

SEED = 0
VOCAB_SIZE = 4096
SHORTEST, LONGEST = 16, 512  # tokens
LOG_MEAN, LOG_SD = 4.8, 0.8


@dataclass(frozen=True)
class ModelSize:
    """Size of a Llama with random weights, and how extensively the scoring benchmark measures it."""

    name: str
    layers: int
    width: int
    """Hidden size; each attention head has 64 dimensions."""
    feed_forward: int
    concurrency: tuple[int, ...] = ()
    """Concurrency levels to measure; empty: all."""
    rows: tuple[int, ...] = ()
    """Rows per request to measure; empty: all."""
    max_repeats: int = 99
    effort: float = 1.0
    """Factor on the seconds per cell: fast models score enough rows in less time."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LlamaConfig`."""


LLAMA_3 = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
SIZES = {
    size.name: size
    for size in (
        ModelSize("tiny", layers=2, width=64, feed_forward=128),
        ModelSize("1m", layers=4, width=128, feed_forward=336, effort=0.5),  # the demo's shape
        ModelSize("2m", layers=4, width=192, feed_forward=512),
        ModelSize("5m", layers=4, width=256, feed_forward=896),
        ModelSize("7m", layers=6, width=256, feed_forward=896),
        ModelSize("10m", layers=8, width=256, feed_forward=896),
        ModelSize("20m", layers=8, width=384, feed_forward=1280),
        ModelSize("60m", layers=12, width=512, feed_forward=2048),
        ModelSize("110m", layers=12, width=768, feed_forward=2816, concurrency=(1, 64), rows=(1,), max_repeats=1),
        ModelSize("1b", layers=16, width=2048, feed_forward=8192, more={**LLAMA_3, "tie_word_embeddings": True}),
        ModelSize("8b", layers=32, width=4096, feed_forward=14336, more=LLAMA_3),
    )
}


def model_size(model: str) -> float:
    """Return the millions of parameters that a model's name states: 7 for `7m`, 0 for a name without a number."""
    return float(model.removesuffix("m")) if model[:1].isdigit() else 0.0


def model_title(model: str) -> str:
    """Return a model's name for a title: `7 M parameters` for `7m`."""
    return f"{model.upper().replace('M', ' M')} parameters" if model[:1].isdigit() else f"{model} model"


def trace_lengths(num_rows: int) -> np.ndarray:
    """Return the number of tokens of each row, int64 `[num_rows]`; a shorter trace is a prefix of a longer one."""
    drawn = np.random.default_rng(SEED).lognormal(LOG_MEAN, LOG_SD, num_rows)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)


def make_trace(num_rows: int) -> list[np.ndarray]:
    """Return token rows int64 `[length_i]` with ids of at least 3; a shorter trace is a prefix of a longer one."""
    generator = np.random.default_rng(SEED + 1)
    return [generator.integers(3, VOCAB_SIZE, length, dtype=np.int64) for length in trace_lengths(num_rows)]


def as_requests(rows: Sequence[np.ndarray], rows_per_request: int) -> list[list[np.ndarray]]:
    """Split the rows into requests of `rows_per_request` consecutive rows; the last request may have fewer."""
    return [list(rows[i : i + rows_per_request]) for i in range(0, len(rows), rows_per_request)]


async def closed_loop(
    send: Callable[[Any], Awaitable[Any]], requests: Sequence[Any], concurrency: int
) -> tuple[float, list[float], list[Any]]:
    """Send all requests, `concurrency` at a time; return the seconds in all, and each request's latency and answer."""
    latencies = [0.0] * len(requests)
    answers: list[Any] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def work() -> None:
        for index in waiting:  # one event loop: the workers share the iterator
            sent = time.perf_counter()
            answers[index] = await send(requests[index])
            latencies[index] = time.perf_counter() - sent

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start, latencies, answers


def noise_payload(rows: Sequence[np.ndarray]) -> TrainPayload:
    """Return a training payload of the rows, with random targets and a mask of ones."""
    generator = np.random.default_rng(SEED + 2)
    lengths = np.asarray([row.size for row in rows], np.int64)
    count = int(lengths.sum()) - len(rows)
    returns, prev_values = (generator.normal(size=count).astype(np.float32) for _ in range(2))
    return TrainPayload(np.concatenate(rows), lengths, returns, prev_values, np.ones_like(returns))


def make_model(kind: str, size: ModelSize, max_positions: int = LONGEST, device: str = "cpu") -> Any:
    """Return a `policy`, `reward` or `critic` of this size with random weights, in bfloat16 unless on the CPU."""
    import torch

    heads = max(1, size.width // 64)
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.width,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.1,
        **size.more,
    }
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return random_llama(kind, seed=SEED, **shape).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def make_checkpoint(size: ModelSize, folder: Path, kind: str = "reward", *, device: str = "cpu") -> int:
    """Write a model and a tokenizer to `folder`; return its number of parameters."""
    model = make_model(kind, size, 1024 if kind == "policy" else LONGEST, device)
    model.save_pretrained(folder)
    trace_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def trace_tokenizer() -> Any:
    """Return the tokenizer of the models in this module: the word `w3` is token 3, and so on."""
    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB_SIZE))]
    return word_tokenizer(words, eos="</s>", unknown="<pad>")


def word_tokenizer(words: Sequence[str], *, eos: str, unknown: str) -> Any:
    """Return a tokenizer that splits text at spaces; `words[i]` is token i, and one word must be `<pad>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token=eos, unk_token=unknown)
