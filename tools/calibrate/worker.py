"""`python -m tools.calibrate.worker SPEC`: measures a model in its own process, set up like a serving instance.

Takes a JSON object (checkpoint, role, options, device, dtype, workers, threads, max_length, budgets) and prints a JSON
line: by token budget, tokens per second and the fixed cost of a forward pass in tokens; and the tokens, if any, that
were too many for the memory of a card.
"""

import gc
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from python_backend.models.card import is_out_of_memory, use_own_stream
from python_backend.models.language_model import load_language_model
from python_backend.models.modeling import load_critic, load_reward, quiet_transformers
from python_backend.models.placement import device_of
from python_backend.models.token_reward import load_logit_reward, load_process_reward
from python_backend.process import keep_freed_memory
from python_backend.serving.scheduling import SWITCH_INTERVAL_S, RowPool

SHORT_TOKENS = 16
# device -> maximum tokens of a row; factor of the rows' lengths, whose median is 120 tokens; seconds that the rows of a
# pass would take if they were scored one by one; maximum tokens in a pass
SCALES = {"cpu": (512, 1, 0.3, 40_000), "cuda": (2048, 4, 4.0, 131_072)}
MIN_TOKENS = 1500  # in one pass over the rows
FITTED_TOKENS = (2048, 4096, 8192, 16_384, 32_768)  # of a forward pass on a card: most take longer than its launch
ROUNDS = 3
SLOW_S = 1.5  # a model whose pass takes longer is measured in one round
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
        self._device = torch.device(device_of(spec["device"], 0))
        self._pool = ThreadPoolExecutor(self._workers, initializer=self._prepare_thread)
        self._prepare_thread()
        load, forward = ROLES[spec["role"]]
        model = load(Path(spec["model"]), device=self._device, dtype=spec["dtype"], **spec["options"])
        self._score: Score = getattr(model, forward)
        self.too_many: int | None = None
        """Fewest tokens of a forward pass that did not fit into the card's memory."""
        self._rows = self._make_rows([limit for limit in (model.limits.max_length, spec["max_length"]) if limit])
        self._tokens = sum(row.size for row in self._rows)
        self._overhead = self._overhead_tokens()

    def speeds(self, budgets: list[int]) -> dict[int, float]:
        """Return {token budget: tokens per second}, without those that do not fit. Raises ValueError if none does."""
        # With a larger budget, the first micro-batches would take all rows and leave some workers idle.
        budgets = [budget for budget in budgets if budget <= self._tokens / self._workers] or budgets[:1]
        seconds: dict[int, list[float]] = {budget: [] for budget in budgets}
        rounds = ROUNDS if self._within_memory(budgets[0], partial(self._pass, budgets[0])) < SLOW_S else 1
        for _ in range(rounds):
            for budget in budgets:
                seconds[budget].append(self._within_memory(budget, partial(self._pass, budget)))
        fitting = {budget: times for budget, times in seconds.items() if max(times) < math.inf}
        if not fitting:
            raise ValueError(f"not even {budgets[0]} tokens at a time fit into the memory of {self._device}")
        return {budget: self._tokens / statistics.median(times) for budget, times in fitting.items()}

    def overhead_of(self, budget: int) -> int:
        """Return the fixed cost of a forward pass in tokens; on a card at most an eighth of the budget."""
        return round(self._overhead if self._device.type == "cpu" else min(self._overhead, budget // 8))

    def _make_rows(self, limits: list[int]) -> list[np.ndarray]:
        """Return rows for one pass, see `SCALES`; none has more tokens than the `limits`."""
        longest, stretch, pass_s, max_tokens = SCALES[self._device.type]
        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(4.8, 0.8, 1024) * stretch, 1, min([longest, *limits])).astype(int)
        rows = [np.arange(length, dtype=np.int64) % 7 for length in lengths]
        for row in rows[:4]:  # warm-up
            self._score([row])
        speed = sum(row.size for row in rows[:4]) / _seconds(lambda: [self._score([row]) for row in rows[:4]])
        wanted = min(max(speed * self._workers * pass_s, MIN_TOKENS), max_tokens)
        return rows[: int(np.searchsorted(np.cumsum(lengths), wanted)) + 1]

    def _overhead_tokens(self) -> float:
        """Return a forward pass's fixed cost in tokens: a short row's time / time per additional token - its length.

        On a card both rows may take the time of the launch, so the time per token is fitted to larger passes.
        """
        long = max(self._rows, key=len)
        short = long[:SHORT_TOKENS]
        short_s = min(_seconds(lambda: self._score([short])) for _ in range(10))
        if self._device.type != "cpu":
            sizes = [max(1, tokens // long.size) * long.size for tokens in FITTED_TOKENS]
            times = [self._within_memory(n, partial(self._fastest, [long] * (n // long.size))) for n in sizes]
            fitted = {n: time_s for n, time_s in zip(sizes, times, strict=True) if time_s < math.inf}
            slope = statistics.linear_regression(*zip(*fitted.items(), strict=True)).slope if len(fitted) > 1 else 0.0
            return short_s / slope if slope > 0 else math.inf
        per_token_s = (self._fastest([long]) - short_s) / max(1, long.size - SHORT_TOKENS)
        return max(0, round(short_s / per_token_s) - SHORT_TOKENS) if per_token_s > 0 else SHORT_TOKENS

    def _fastest(self, rows: list[np.ndarray]) -> float:
        return min(_seconds(lambda: self._score(rows)) for _ in range(5))

    def _within_memory(self, tokens: int, work: Callable[[], float]) -> float:
        """Return the seconds of work with so many tokens at a time; infinite if they do not fit, or fewer did not."""
        if tokens < (self.too_many or math.inf):
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.too_many = tokens
            gc.collect()  # the error, which is in a cycle with its thread's future, holds the tensors of the pass
            torch.cuda.empty_cache()
        return math.inf

    def _pass(self, budget: int) -> float:
        """Return the seconds that the workers take to score all rows."""
        rows: RowPool[str] = RowPool(token_budget=budget, overhead_tokens=self.overhead_of(budget))
        rows.add("all", [row.size for row in self._rows])
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    batch = rows.take()
                if not batch:
                    return
                self._score([self._rows[index] for _, index in batch])

        def together() -> None:
            for worker in wait([self._pool.submit(work) for _ in range(self._workers)]).done:
                worker.result()

        return _seconds(together)

    def _prepare_thread(self) -> None:
        """Set what torch keeps for each thread: the number of its threads, in part, and the card and its stream."""
        torch.set_num_threads(self._threads)
        use_own_stream(self._device)


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
        speeds = measurement.speeds(spec["budgets"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    overheads = {budget: measurement.overhead_of(budget) for budget in speeds}
    print(json.dumps({"speeds": speeds, "overheads": overheads, "too_many": measurement.too_many}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
