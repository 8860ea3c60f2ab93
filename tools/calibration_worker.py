"""`python -m tools.calibration_worker`: measures one copy of a model, in a process of its own.
Given: a JSON object on the command line (checkpoint, role, device, dtype, threads, max_length). Returns: a JSON line of
tokens per second by allocator and token budget, and of what a forward costs beyond its tokens.
Prints "ready" when the model is loaded and begins at a line on stdin, so that several copies measure at once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from python_backend.allocator import use_allocator
from python_backend.modeling import load_critic, load_reward, quiet_transformers
from python_backend.scheduling import RowPool

SHORT_TOKENS = 16
PASS_S = 0.5  # how long one pass over the rows should take
MIN_TOKENS, MAX_TOKENS = 1200, 40_000
ROUNDS = 3
SLOW_S = 1.5  # of a pass: a large model gets one round
MAX_ROWS = 64

Score = Callable[[list[np.ndarray]], object]


def measure(spec: dict[str, Any], wait: Callable[[], None]) -> dict[str, Any]:
    """`{"speeds": {allocator: {budget: tokens/s}}, "overhead_tokens": n}`."""
    torch.set_num_threads(spec["threads"])
    load: Any = load_reward if spec["role"] == "reward" else load_critic
    model = load(Path(spec["checkpoint"]), device=spec["device"], dtype=spec["dtype"])
    score: Score = model.score if spec["role"] == "reward" else model.values
    wait()
    limits = [512, model.limits.max_length, spec["max_length"]]
    rows = _rows(score, min(limit for limit in limits if limit))
    overhead_tokens = _overhead_tokens(score, rows)
    speeds = {}
    for allocator in ("default", "retain"):  # in this order: a process cannot go back
        if use_allocator(allocator):
            speeds[allocator] = _speeds(score, rows, overhead_tokens, spec["budgets"])
    return {"speeds": speeds, "overhead_tokens": overhead_tokens}


def _rows(score: Score, longest: int) -> list[np.ndarray]:
    """Rows of many lengths, as many as one pass can take."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(4.8, 0.8, 512), 1, longest).astype(int)
    rows = [np.arange(length, dtype=np.int64) % 7 for length in lengths]
    sample = rows[:4]
    for row in sample:
        score([row])
    start = time.perf_counter()
    for row in sample:
        score([row])
    speed = sum(row.size for row in sample) / (time.perf_counter() - start)
    wanted = min(max(speed * PASS_S, MIN_TOKENS), MAX_TOKENS)
    return rows[: int(np.searchsorted(np.cumsum(lengths), wanted)) + 1]


def _overhead_tokens(score: Score, rows: list[np.ndarray]) -> int:
    """What a forward costs beyond its tokens, in tokens: a short row's time against a long row's slope."""
    short, long = rows[0][:1].repeat(SHORT_TOKENS), max(rows, key=len)
    short_s = min(_seconds(lambda: score([short])) for _ in range(10))
    long_s = min(_seconds(lambda: score([long])) for _ in range(5))
    per_token_s = (long_s - short_s) / max(1, long.size - SHORT_TOKENS)
    return max(0, round(short_s / per_token_s) - SHORT_TOKENS) if per_token_s > 0 else SHORT_TOKENS


def _speeds(score: Score, rows: list[np.ndarray], overhead_tokens: int, budgets: list[int]) -> dict[int, float]:
    tokens = sum(row.size for row in rows)
    budgets = [budget for budget in budgets if budget <= tokens]
    seconds: dict[int, list[float]] = {budget: [] for budget in budgets}
    rounds = ROUNDS if _seconds(lambda: _pass(score, rows, budgets[0], overhead_tokens)) < SLOW_S else 1
    for _ in range(rounds):
        for budget in budgets:
            seconds[budget].append(_seconds(lambda budget=budget: _pass(score, rows, budget, overhead_tokens)))  # type: ignore[misc]
    return {budget: tokens / statistics.median(times) for budget, times in seconds.items()}


def _pass(score: Score, rows: list[np.ndarray], budget: int, overhead_tokens: int) -> None:
    pool: RowPool[str] = RowPool(token_budget=budget, max_rows=MAX_ROWS, overhead_tokens=overhead_tokens)
    pool.add("all", [row.size for row in rows])
    while batch := pool.take():
        score([rows[index] for _, index in batch])


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Measure what the command line says."""

    def wait() -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for the measurement")

    quiet_transformers()
    try:
        print(json.dumps(measure(json.loads(sys.argv[1]), wait)), flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
