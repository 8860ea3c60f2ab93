"""Workload of the benchmarks: a trace of token rows, sent in a closed loop, and models with random weights.

The trace is the same on every machine. Fuzz test, demo and tests use the small models and tokenizers, too.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.wire.training_payload import TrainPayload

SEED = 0
VOCAB_SIZE = 4096
SHORTEST, LONGEST = 16, 512  # tokens
LOG_MEAN, LOG_SD = 4.8, 0.8


@dataclass(frozen=True)
class ModelSize:
    """Size of a Llama with random weights."""

    layers: int
    width: int
    """Hidden size; each attention head has 64 dimensions."""
    feed_forward: int
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `LlamaConfig`."""


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_labels": 1,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_3 = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
SIZES = {
    "tiny": ModelSize(2, 64, 128),
    "1m": ModelSize(4, 128, 336),  # the demo's shape
    "2m": ModelSize(4, 192, 512),
    "5m": ModelSize(4, 256, 896),
    "7m": ModelSize(6, 256, 896),
    "10m": ModelSize(8, 256, 896),
    "20m": ModelSize(8, 384, 1280),
    "60m": ModelSize(12, 512, 2048),
    "110m": ModelSize(12, 768, 2816),
    "1b": ModelSize(16, 2048, 8192, {**LLAMA_3, "tie_word_embeddings": True}),
    "8b": ModelSize(32, 4096, 14336, LLAMA_3),
}
"""By name, which states the number of parameters; ascending."""


def trace_lengths(num_rows: int) -> np.ndarray:
    """Return the number of tokens of each row, int64 `[num_rows]`; a shorter trace is a prefix of a longer one."""
    drawn = np.random.default_rng(SEED).lognormal(LOG_MEAN, LOG_SD, num_rows)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)


def make_trace(num_rows: int) -> list[np.ndarray]:
    """Return token rows int64 `[length_i]` with ids of at least 3; a shorter trace is a prefix of a longer one."""
    generator = np.random.default_rng(SEED + 1)
    return [generator.integers(3, VOCAB_SIZE, length, dtype=np.int64) for length in trace_lengths(num_rows)]


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


def random_llama(kind: str, *, seed: int, **settings: Any) -> Any:
    """Return a model; `kind`: policy, reward or critic; `settings`: `LlamaConfig` arguments that override `SMALL`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

    from rlhf_triton.python_backend.models.modeling import quiet_transformers

    quiet_transformers()
    torch.manual_seed(seed)
    kinds = {
        "policy": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
        "critic": LlamaForTokenClassification,
    }
    return kinds[kind](LlamaConfig(**{**SMALL, **settings}))


def train_bpe(
    texts: Sequence[str],
    *,
    alphabet: Sequence[str] | None = None,
    vocab_size: int = 30_000,
    special: Sequence[str] = ("<s>", "</s>", "<pad>"),
) -> Any:
    """Return a byte-level BPE `Tokenizer` learned from `texts`; the first ids are those of `special`, in this order.

    Args:
        alphabet: symbols that the vocabulary always contains; default: all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=alphabet or sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


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
