"""`python -m tools bench update --out DIR`: the critic's update under the token budget beside the same update padded.
Given: models, rows of the scoring trace. Returns: DIR/result.json and a table; ratios are of samples of one round.
Padded: each row is given the longest row's length, with a mask of 0, and trained by the same code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from python_backend.allocator import use_allocator
from python_backend.batching import plan_micro_batches
from python_backend.config import TrainerSection
from python_backend.training_payload import TrainPayload
from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.trace import SEED, SIZES, make_checkpoint, make_trace

OURS, PADDED, FIXED = "ours", "padded", "fixed"
BAR = 2.0
TOLERANCE = 1e-6
QUICK: dict[str, Any] = {"models": "tiny", "rows": 16, "repeats": 1, "budgets": "512"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when done, whatever the bar says."""
    arguments = parse_arguments(argv)
    result = measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1))
    print(report(result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure."""
    defaults = TrainerSection()
    parser = argparse.ArgumentParser(description="Throughput of the critic's update.")
    parser.add_argument("--out", type=Path, required=True, help="folder of result.json")
    parser.add_argument("--models", default="1m,7m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rows", type=int, default=128, help="rows of the payload")
    parser.add_argument("--repeats", type=int, default=3, help="matched rounds")
    parser.add_argument("--budgets", default="512,1024,2048,8192", help="further budgets of ours, to choose from")
    parser.add_argument("--fixed-rows", type=int, default=4, help="rows of a micro-batch in the fixed contender")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="torch threads")
    parser.add_argument("--allocator", choices=("retain", "default"), default="retain", help="malloc, for all alike")
    parser.add_argument("--quick", action="store_true", help="seconds only: shows that it works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of every contender on every model, and how far the results differ."""
    import torch

    torch.set_num_threads(arguments.threads)
    use_allocator(arguments.allocator)
    payload = make_payload(arguments.rows)
    plain = TrainerSection()
    budgets = [plain.token_budget, *(int(text) for text in arguments.budgets.split(",") if text)]
    contenders = contenders_of(payload, list(dict.fromkeys(budgets)), arguments.fixed_rows)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result: dict[str, Any] = {
        "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(), "settings": settings,
        "bar_budget": plain.token_budget, "tokens": int(payload.lengths.sum()), "samples": [], "differences": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models.split(","):
            checkpoint = Path(scratch) / model
            make_checkpoint(SIZES[model], checkpoint)
            for number in range(arguments.repeats):
                for name, (sent, budget) in contenders.items():
                    sample = one_update(checkpoint, sent, budget)
                    result["samples"].append({"model": model, "round": number, "contender": name, **sample})
                    print(f"{model}  round {number}  {name}: {sample['seconds']:.2f} s", file=sys.stderr, flush=True)
            result["differences"][model] = differences(checkpoint, payload, plain.token_budget)
    return result


def make_payload(num_rows: int) -> TrainPayload:
    """The scoring trace as a training payload: targets are noise, the mask covers each row's second half."""
    rows = make_trace(num_rows)
    generator = np.random.default_rng(SEED + 2)
    lengths = np.asarray([row.size for row in rows], np.int64)
    count = int(lengths.sum()) - num_rows
    returns, prev_values = (generator.normal(size=count).astype(np.float32) for _ in range(2))
    mask = np.concatenate([(np.arange(row.size - 1) >= row.size // 2).astype(np.float32) for row in rows])
    return TrainPayload(np.concatenate(rows), lengths, returns, prev_values, mask)


def padded_payload(payload: TrainPayload) -> TrainPayload:
    """The same rows, each as long as the longest; what was added trains nothing, no row looks ahead at it."""
    longest = int(payload.lengths.max())
    ends = np.cumsum(payload.lengths)
    tokens = _padded(np.split(payload.tokens, ends[:-1]), longest)
    target_ends = np.cumsum(payload.lengths - 1)[:-1]
    fields = [
        _padded(np.split(field, target_ends), longest - 1)
        for field in (payload.returns, payload.prev_values, payload.mask)
    ]
    return TrainPayload(tokens, np.full_like(payload.lengths, longest), *fields)


def contenders_of(
    payload: TrainPayload, budgets: Sequence[int], fixed_rows: int
) -> dict[str, tuple[TrainPayload, int]]:
    """Payload and budget of each contender; the first of `budgets` is the one that the bar compares."""
    padded, longest = padded_payload(payload), int(payload.lengths.max())
    return {
        **{f"{OURS}-{budget}": (payload, budget) for budget in budgets},
        f"{PADDED}-{budgets[0]}": (padded, budgets[0]),
        f"{FIXED}-{fixed_rows}-rows": (padded, fixed_rows * longest),
    }


def one_update(checkpoint: Path, payload: TrainPayload, budget: int) -> dict[str, float]:
    """Wall and CPU seconds of one update from the checkpoint, and the tokens that it computed, padding included."""
    from python_backend.modeling import load_critic
    from trainer.critic_update import CriticUpdate

    settings = TrainerSection(token_budget=budget)
    update = CriticUpdate(load_critic(checkpoint), settings)
    wall, cpu = time.monotonic(), time.process_time()
    update.train(payload, lambda _: None)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    lengths, size = payload.lengths.tolist(), settings.global_batch_size
    batches = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    computed = sum(computed_tokens(batch, budget) for batch in batches)
    return {"seconds": wall, "cpu_seconds": cpu, "computed_tokens": computed}


def computed_tokens(lengths: Sequence[int], budget: int) -> int:
    """Tokens of a global batch's forwards, padding included."""
    plan = plan_micro_batches(lengths, token_budget=budget, max_rows=len(lengths))
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)


def differences(checkpoint: Path, payload: TrainPayload, budget: int) -> dict[str, dict[str, float]]:
    """Largest difference of a weight after the update, ours and padded, absolute and over the largest change.

    In float64 it is the plan's doing; in float32 AdamW, which divides by the gradient's size, blows up the rounding
    of weights whose gradient is nearly 0.
    """
    import torch

    from python_backend.modeling import CriticModel, load_critic
    from trainer.critic_update import CriticUpdate

    def trained(sent: TrainPayload | None, dtype: torch.dtype) -> torch.Tensor:
        update = CriticUpdate(CriticModel(load_critic(checkpoint).model.to(dtype)), TrainerSection(token_budget=budget))
        if sent is not None:
            update.train(sent, lambda _: None)
        return torch.cat([p.detach().double().flatten() for p in update.parameters.values()])

    found = {}
    for dtype in (torch.float32, torch.float64):
        before, ours, padded = (trained(sent, dtype) for sent in (None, payload, padded_payload(payload)))
        largest, change = float((ours - padded).abs().max()), float((ours - before).abs().max())
        found[str(dtype).removeprefix("torch.")] = {"absolute": largest, "of_the_update": largest / change}
    return found


def report(result: dict[str, Any]) -> str:
    """The table, the bar of each model, and the differences."""
    lines = [f"{result['tokens']} tokens in {result['settings']['rows']} rows"]
    for model, different in result["differences"].items():
        samples = [sample for sample in result["samples"] if sample["model"] == model]
        names = list(dict.fromkeys(sample["contender"] for sample in samples))
        lines += ["", f"{model:<18}tokens/s  ours is x as fast   in CPU time  CPU s  computed/real tokens"]
        for name in names:
            own = [sample for sample in samples if sample["contender"] == name]
            speed = result["tokens"] / statistics.median(sample["seconds"] for sample in own)
            cpu = statistics.median(sample["cpu_seconds"] for sample in own)
            waste = own[0]["computed_tokens"] / result["tokens"]
            wall, work = (ratio(samples, names[0], name, key) for key in ("seconds", "cpu_seconds"))
            lines.append(f"  {name:<16}{speed:>8,.0f}{wall:>19.2f}{work:>14.2f}{cpu:>7.2f}{waste:>22.2f}")
        value = ratio(samples, names[0], f"{PADDED}-{result['bar_budget']}", "seconds")
        lines.append(f"  {'PASS' if value >= BAR else 'MISS'}: {value:.2f} x padded to the longest, must be >= {BAR:g}")
        for dtype, found in different.items():
            lines.append(
                f"  weights differ in {dtype} by {found['absolute']:.1e}, {found['of_the_update']:.1e} of the update"
            )
        worst = different["float64"]["of_the_update"]
        lines.append(f"  {'PASS' if worst <= TOLERANCE else 'MISS'}: float64, must be <= {TOLERANCE:g} of the update")
    return "\n".join(lines)


def ratio(samples: Sequence[dict[str, Any]], ours: str, other: str, key: str) -> float:
    """Median over the rounds of how many times the `key` (seconds) of `ours` the one of `other` was."""
    seconds = {(sample["contender"], sample["round"]): sample[key] for sample in samples}
    rounds = {sample["round"] for sample in samples}
    return statistics.median(seconds[other, number] / seconds[ours, number] for number in rounds)


def _padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """The rows, each filled up with 0 to `width`, one after the other."""
    return np.concatenate([np.pad(row, (0, width - row.size)) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
