"""`python -m tools.calibrate.worker SPEC`: measures a model in its own process, set up like a serving instance.

Takes a JSON object (checkpoint, role, options, device, dtype, workers, threads, max_length, budgets) and prints a JSON
line: tokens per second by token budget, and the fixed cost of a forward pass in tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from python_backend.models.language_model import load_language_model
from python_backend.models.modeling import load_critic, load_reward, quiet_transformers
from python_backend.models.readout.token_reward import load_logit_reward, load_process_reward
from python_backend.serving.allocator import keep_freed_memory
from python_backend.serving.scheduling import SWITCH_INTERVAL_S, RowPool

SHORT_TOKENS = 16
PASS_S = 0.3  # target duration of one pass over the rows
MIN_TOKENS, MAX_TOKENS = 1500, 40_000  # tokens in one pass over the rows
ROUNDS = 3
SLOW_S = 1.5  # a model whose pass takes longer is measured in one round
MAX_ROWS = 64
ROLES: dict[str, tuple[Any, str]] = {  # role -> (loader, name of the method that scores rows)
    "reward": (load_reward, "score"),
    "logit": (load_logit_reward, "score"),
    "process": (load_process_reward, "token_scores"),
    "critic": (load_critic, "values"),
    "reference": (load_language_model, "logprobs"),
}

Score = Callable[[list[np.ndarray]], object]


class Measurement:
    """Times one loaded model on rows whose lengths are log-normally distributed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._threads, self._workers = int(spec["threads"]), int(spec["workers"])
        torch.set_num_threads(self._threads)
        load, forward = ROLES[spec["role"]]
        model = load(Path(spec["checkpoint"]), device=spec["device"], dtype=spec["dtype"], **spec["options"])
        self._score: Score = getattr(model, forward)
        limits = [512, model.limits.max_length, spec["max_length"]]
        self._rows = self._make_rows(min(limit for limit in limits if limit))
        self._tokens = sum(row.size for row in self._rows)
        self.overhead_tokens = self._overhead_tokens()

    def speeds(self, budgets: list[int]) -> dict[int, float]:
        """Return {token budget: tokens per second}."""
        # With a larger budget, the first micro-batches would take all rows and leave some workers idle.
        budgets = [budget for budget in budgets if budget <= self._tokens / self._workers] or budgets[:1]
        seconds: dict[int, list[float]] = {budget: [] for budget in budgets}
        rounds = ROUNDS if self._pass(budgets[0]) < SLOW_S else 1
        for _ in range(rounds):
            for budget in budgets:
                seconds[budget].append(self._pass(budget))
        return {budget: self._tokens / statistics.median(times) for budget, times in seconds.items()}

    def _make_rows(self, longest: int) -> list[np.ndarray]:
        """Return as many rows as the workers score in `PASS_S` seconds, each of at most `longest` tokens."""
        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(4.8, 0.8, 1024), 1, longest).astype(int)
        rows = [np.arange(length, dtype=np.int64) % 7 for length in lengths]
        for row in rows[:4]:  # warm-up
            self._score([row])
        speed = sum(row.size for row in rows[:4]) / _seconds(lambda: [self._score([row]) for row in rows[:4]])
        wanted = min(max(speed * self._workers * PASS_S, MIN_TOKENS), MAX_TOKENS)
        return rows[: int(np.searchsorted(np.cumsum(lengths), wanted)) + 1]

    def _overhead_tokens(self) -> int:
        """Return a forward pass's fixed cost in tokens: a short row's time / time per additional token - its length."""
        long = max(self._rows, key=len)
        short = long[:SHORT_TOKENS]
        short_s = min(_seconds(lambda: self._score([short])) for _ in range(10))
        long_s = min(_seconds(lambda: self._score([long])) for _ in range(5))
        per_token_s = (long_s - short_s) / max(1, long.size - SHORT_TOKENS)
        return max(0, round(short_s / per_token_s) - SHORT_TOKENS) if per_token_s > 0 else SHORT_TOKENS

    def _pass(self, budget: int) -> float:
        """Return the seconds that the workers take to score all rows."""
        pool: RowPool[str] = RowPool(token_budget=budget, max_rows=MAX_ROWS, overhead_tokens=self.overhead_tokens)
        pool.add("all", [row.size for row in self._rows])
        lock = threading.Lock()

        def work() -> None:
            torch.set_num_threads(self._threads)  # torch keeps a part of this setting per thread
            while True:
                with lock:
                    batch = pool.take()
                if not batch:
                    return
                self._score([self._rows[index] for _, index in batch])

        workers = [threading.Thread(target=work) for _ in range(self._workers)]

        def together() -> None:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        return _seconds(together)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """Measure the model in `sys.argv[1]` and print the result; return 1 if it cannot be loaded."""
    quiet_transformers()
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    spec = json.loads(sys.argv[1])
    try:
        measurement = Measurement(spec)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    speeds = measurement.speeds(spec["budgets"])
    print(json.dumps({"speeds": speeds, "overhead_tokens": measurement.overhead_tokens}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
