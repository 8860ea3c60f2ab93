"""Inputs of the served models."""

import numpy as np


def random_rows(lengths, *, seed, vocab_size=100):
    """Return token rows int64 `[length_i]` without special tokens: transformers' reward models skip padding ids."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab_size, length, dtype=np.int64) for length in lengths]


def scoring_inputs(rows, width=None):
    """Return `tokens` [B, S] and `sequence_lengths` [B, 1]; the padding is a valid token, which must not count."""
    width = width or max(row.size for row in rows)
    tokens = np.full((len(rows), width), 7, np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    return {"tokens": tokens, "sequence_lengths": np.asarray([[row.size] for row in rows], np.int64)}


def training_inputs(*, seed, width=12):
    """Return a padded training payload of four rows: tokens [4, S]; returns, prev_values, mask [4, S-1]."""
    generator = np.random.default_rng(seed)
    shape = (4, width - 1)
    return {
        "tokens": generator.integers(0, 100, (4, width), dtype=np.int64),
        "returns": generator.normal(size=shape).astype(np.float32),
        "prev_values": generator.normal(size=shape).astype(np.float32) * 0.1,
        "mask": np.ones(shape, np.float32),
    }


def identity(run_id, step):
    """Return `run_id` and `step` of a training request."""
    return {"run_id": np.asarray([run_id.encode()], dtype=np.object_), "step": np.asarray([step], np.int64)}
