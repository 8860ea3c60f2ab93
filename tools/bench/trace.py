"""What the scoring measurement sends, and the models it sends it to: a trace of token rows, random checkpoints.
Given: how many rows, a size. Returns: int64 rows that are the same on every machine; a checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEED = 0
VOCAB_SIZE = 4096
SHORTEST, LONGEST = 16, 512  # tokens
LOG_MEAN, LOG_SD = 4.8, 0.8


@dataclass(frozen=True)
class ModelSize:
    """A Llama with a reward head and random weights."""

    name: str
    layers: int
    width: int
    """Hidden size; heads are 64 wide."""
    feed_forward: int
    concurrency: tuple[int, ...] = ()
    """The only concurrency levels to measure; none: all."""
    rows: tuple[int, ...] = ()
    """The only numbers of rows per request; none: all."""
    max_repeats: int = 99
    effort: float = 1.0
    """Times the seconds of a cell: where rows are quick, fewer seconds hold as many."""


SIZES = {
    size.name: size
    for size in (
        ModelSize("tiny", layers=2, width=64, feed_forward=128),
        ModelSize("1m", layers=4, width=128, feed_forward=336, effort=0.5),  # the demo's shape
        ModelSize("7m", layers=6, width=256, feed_forward=896),
        ModelSize("110m", layers=12, width=768, feed_forward=2816, concurrency=(1, 64), rows=(1,), max_repeats=1),
    )
}


def trace_lengths(num_rows: int) -> np.ndarray:
    """Tokens of each row, int64 `[num_rows]`; a shorter trace is a prefix of a longer one."""
    drawn = np.random.default_rng(SEED).lognormal(LOG_MEAN, LOG_SD, num_rows)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)


def make_trace(num_rows: int) -> list[np.ndarray]:
    """Token rows int64 `[length_i]`, ids from 3 on; a shorter trace is a prefix of a longer one."""
    generator = np.random.default_rng(SEED + 1)
    return [generator.integers(3, VOCAB_SIZE, length, dtype=np.int64) for length in trace_lengths(num_rows)]


def rows_for_tokens(num_tokens: int) -> int:
    """The shortest trace that has `num_tokens` tokens."""
    lengths = trace_lengths(num_tokens // SHORTEST + 1)
    return int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1


def as_requests(rows: Sequence[np.ndarray], rows_per_request: int) -> list[list[np.ndarray]]:
    """Consecutive rows as requests; the last one may be smaller."""
    return [list(rows[i : i + rows_per_request]) for i in range(0, len(rows), rows_per_request)]


def make_checkpoint(size: ModelSize, folder: Path) -> int:
    """Write the checkpoint, with a tokenizer that renders but is never used; returns its number of parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from python_backend.modeling import quiet_transformers

    quiet_transformers()
    torch.manual_seed(SEED)
    heads = max(1, size.width // 64)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=size.width, intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=LONGEST, num_labels=1, pad_token_id=2, bos_token_id=0, eos_token_id=1,
        initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
