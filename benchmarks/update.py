"""Benchmark of the critic update on ragged rows, against the same code on rows padded to the longest row."""

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement import Option, Record, Result, Target, speeds, time_in_turn
from benchmarks.workload import SIZES, make_checkpoint, make_trace, noise_payload
from python_backend.config import TrainerSection
from python_backend.process import keep_freed_memory
from python_backend.wire.training_payload import TrainPayload

OURS, PADDED = "ours", "padded"
LEAST_RATIO = 2.0
OPTIONS = {
    "models": Option(["1m", "7m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "rows": Option(128, "number of rows in the payload", quick=16),
    "repeats": Option(3, "rounds; each measures every contender", quick=1),
    "token_budget": Option(TrainerSection().token_budget, "tokens in one forward pass"),
    "threads": Option(TrainerSection().threads, "torch threads"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Time one update of each model's critic for every contender."""
    import torch

    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    payload = make_payload(settings.rows)
    padded, tokens = padded_payload(payload), int(payload.lengths.sum())
    with tempfile.TemporaryDirectory() as scratch:
        for model in settings.models:
            make_checkpoint(SIZES[model], Path(scratch) / model)
            contenders = {
                name: critic_update(Path(scratch) / model, sent, settings.token_budget)
                for name, sent in ((OURS, payload), (PADDED, padded))
            }
            time_in_turn(record, contenders, settings.repeats, model=model, tokens=tokens)


def make_payload(num_rows: int) -> TrainPayload:
    """Return the trace as a training payload with random targets; the mask keeps the second half of each row."""
    rows = make_trace(num_rows)
    mask = np.concatenate([(np.arange(row.size - 1) >= row.size // 2).astype(np.float32) for row in rows])
    return dataclasses.replace(noise_payload(rows), mask=mask)


def padded_payload(payload: TrainPayload) -> TrainPayload:
    """Return the payload with every row padded to the longest row.

    The mask excludes the padding, and causal attention hides it from the row's own tokens.
    """
    longest = int(payload.lengths.max())
    ends = np.cumsum(payload.lengths)
    tokens = _padded(np.split(payload.tokens, ends[:-1]), longest)
    target_ends = np.cumsum(payload.lengths - 1)[:-1]
    fields = [
        _padded(np.split(field, target_ends), longest - 1)
        for field in (payload.returns, payload.prev_values, payload.mask)
    ]
    return TrainPayload(tokens, np.full_like(payload.lengths, longest), *fields)


def critic_update(checkpoint: Path, payload: TrainPayload, budget: int) -> Callable[[], Any]:
    """Return a function that updates the critic in `checkpoint` once."""
    from python_backend.models.modeling import load_critic
    from trainer.critic_update import CriticUpdate

    update = CriticUpdate(load_critic(checkpoint), TrainerSection(token_budget=budget))
    return lambda: update.train(payload, lambda _: None)


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each contender's tokens/s, and its speed-up over the padded update."""
    return speeds(result["samples"], PADDED, "model")


def targets(result: Result) -> list[Target]:
    """Return the speed-up over the padded update for each model."""
    return [
        Target(f"{row['model']}: ours / padded to the longest, times as fast", row["speed_up"], LEAST_RATIO)
        for row in result["summary"]
        if row["contender"] == OURS
    ]


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Concatenate the rows, each padded with 0 to `width`."""
    return np.concatenate([np.pad(row, (0, width - row.size)) for row in rows])
