"""Benchmark of training steps against TRL's, in matched rounds.

Both sides train the same model on the same prompts with the same reward, full parameters in float32, one optimizer step
per rollout; every response has the same number of new tokens. In each round each side starts anew and is measured from
the end of its warm-up on. Our side is `rlhf-triton run` with its reward behind a real tritonserver; with PPO, that
serves a reward model and a critic of the policy's size. All of its processes count.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import (
    FREE_PORTS,
    MIN_TOKENS,
    SEED,
    SIZES,
    Measurement,
    Record,
    cpu_seconds,
    grouped,
    in_turn,
    make_checkpoint,
    make_trace,
    matched_ratio,
)
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.tools.server.child import LIBRARY_ENV, Child

ROOT = Path(__file__).resolve().parents[1]
PPO_TRL = "trl-ppo"  # folder of the last TRL that has PPO, in its environment
ALGORITHMS = ("grpo", "ppo")
WARM_UP = 2  # steps of a turn before the measured ones
STEPS = 4  # measured steps of a turn
THREADS = 2  # cores of each side, and torch threads of each trainer
GROUP = 8  # responses per prompt, without a critic
OURS = "ours"
TRL = "trl"
SMOLLM2 = "135m"
CELL = ("model", "rows", "new_tokens", "algorithm")
MANY = 1_000_000  # steps: the driver ends both sides before
PROMPTS = (
    "Explain to a child why the sky is blue during the day and turns red in the evening.",
    "Write the first sentence of a short story about a lighthouse keeper who is afraid of the sea.",
    "What should I pack for a week of hiking in the mountains in early spring?",
    "My neighbour practises the trumpet every night until eleven. How can I ask for quiet and stay friends?",
    "List three ways to cook potatoes.",
    "Describe how a bicycle stays upright while it moves, without using any formula at all.",
    "A shop sells two apples for one euro and three pears for two euros. Which fruit is cheaper, by how much?",
    "Give me some advice for learning to play chess as an adult with little time.",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    models = (SMOLLM2, *SIZES)
    add("--models", nargs="+", choices=models, default=["7m"], help=f"{SMOLLM2} is SmolLM2")
    add("--smollm2", type=Path, help="folder of SmolLM2-135M; rlhf-triton example-model --smollm2 writes it")
    add("--cells", nargs="+", default=["16x32"], help=f"rows (times {GROUP}) x new tokens")
    add("--contenders", nargs="+", choices=(TRL, OURS), default=[TRL, OURS], help="sides to measure")
    add("--rounds", type=int, default=5, help="turns of each side in each cell")
    add("--trl-micro-batch", type=int, default=64, help="rows per forward pass of TRL, which accumulates gradients")
    add("--environment", type=Path, default=Path("runs/trl-environment"), help="TRL's environment")


def measure(settings: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Measure all cells; return medians of each. Raises RlhfError if a side fails or something is missing."""
    if SMOLLM2 in settings.models and settings.smollm2 is None:
        raise RlhfError(f"--models {SMOLLM2} requires --smollm2 DIR, the model's folder; add it or drop {SMOLLM2}")
    if TRL in settings.contenders and not (settings.environment / "complete").is_file():
        raise RlhfError(f"{settings.environment} is not TRL's environment: run `make trl-environment`")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    for model in settings.models:
        policy = settings.smollm2 if model == SMOLLM2 else record.out / "models" / model
        if model in SIZES:
            make_checkpoint("policy", model, policy)
        scoring = record.out / "models" / f"{model}-scoring"
        make_scoring_model(policy, scoring)
        for size, algorithm in itertools.product(settings.cells, ALGORITHMS):
            cell = dict(zip(CELL, (model, *map(int, size.split("x")), algorithm), strict=True))
            for number, name in in_turn(settings.contenders, settings.rounds):
                prepared = prepare(cell, settings, record.out / "turn", policy, scoring)
                timing = turn(name, prepared, settings)
                record.add({**cell, "contender": name, "round": number, **timing})
                record.say(f"{cell}, round {number + 1}: {name} {timing['seconds']:.2f} s a step")
    return summary(record.samples)


def make_scoring_model(policy: Path, folder: Path) -> None:
    """Write reward model and critic of PPO: the policy's body under a head of one output with random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def prepare(
    cell: dict[str, Any], options: argparse.Namespace, folder: Path, policy: Path, scoring: Path
) -> dict[str, Any]:
    """Empty the folder, write the prompts of every step to it, and return the settings of both sides."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_ppo = cell["algorithm"] == "ppo"
    group = 1 if is_ppo else GROUP
    count = cell["rows"] // group
    if cell["model"] == SMOLLM2:
        texts = [f"{i + 1}. {PROMPTS[i % len(PROMPTS)]}" for i in range(count)]
    else:
        texts = [" ".join(f"w{token}" for token in row[:MIN_TOKENS]) for row in make_trace(count)]
    prompts = folder.absolute() / "prompts.jsonl"
    write_jsonl(prompts, ({"text": text} for text in texts))
    return {
        **cell,
        "folder": str(folder.absolute()),
        "prompts": str(prompts),
        "checkpoint": str(policy.absolute()),
        "scoring": str(scoring.absolute()),
        "group": group,
        "kl_coef": 0.05 if is_ppo else 0.0,  # TRL's defaults
        "lr": 1e-6,
        "threads": THREADS,
        "trl_micro_batch": options.trl_micro_batch,
        "steps": str(folder.absolute() / "steps"),
    }


def turn(name: str, settings: dict[str, Any], options: argparse.Namespace) -> Measurement:
    """Run one side from its start until it has done its steps; return means over those after the warm-up."""
    folder = Path(settings["folder"])
    environment = {**LIBRARY_ENV}
    if name == OURS:
        path = folder / "run.yaml"
        path.write_text(json.dumps(configuration(settings)))  # JSON is YAML
        done = folder / "run" / "metrics.jsonl"
        child = Child(name, ["rlhf_triton.tools", "run", "--config", str(path)], folder / "ours.log", environment)
    else:
        python = options.environment.absolute() / "bin" / "python"
        older = [str(options.environment.absolute() / PPO_TRL)] if settings["algorithm"] == "ppo" else []
        environment["PYTHONPATH"] = os.pathsep.join([*older, str(ROOT)])
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
        done = Path(settings["steps"])
        command = [str(python), "-m", "benchmarks.trl_side"]
        child = Child(name, [json.dumps(settings)], folder / "trl.log", environment, command=command)
    try:
        begin_s, begin_cpu_s = _after(WARM_UP, done, child)
        end_s, end_cpu_s = _after(WARM_UP + STEPS, done, child)
    finally:
        child.stop(signal.SIGINT if name == OURS else signal.SIGTERM, 120)
    return {"seconds": (end_s - begin_s) / STEPS, "cpu_seconds": (end_cpu_s - begin_cpu_s) / STEPS}


def _after(num_steps: int, done: Path, child: Child) -> tuple[float, float]:
    """Wait until the file has a line for each of the steps; return the time and the CPU seconds of the child then."""
    while not done.is_file() or done.read_bytes().count(b"\n") < num_steps:
        if child.poll() is not None:
            raise RlhfError(child.exit_message())
        time.sleep(0.01)
    return time.monotonic(), cpu_seconds([child.process.pid])


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """Return our run's YAML, all settings equal to TRL's; the reward is a function, or with PPO a model."""
    optimizer = {"lr": settings["lr"], "weight_decay": 0.0}
    # Processes of one thread share the cores: the two models score at the same time, the sidecar trains beside the
    # actor.
    model = {"model": settings["scoring"], "threads": 1}
    parts: dict[str, Any] = {
        "reward": model,
        "critic": model,
        "trainer": {"optimizer": optimizer, "checkpoint_every": MANY},
    }
    if settings["algorithm"] != "ppo":
        parts = {"rewards": {"variety": {"function": f"{ROOT}/benchmarks/trl_side.py:variety"}}}
    return {
        "run": {"dir": f"{settings['folder']}/run", "run_id": "bench"},
        "server": FREE_PORTS,
        **parts,
        "actor": {
            "steps": MANY,
            "checkpoint_every": MANY,
            "threads": settings["threads"],
            "rollout_size": settings["rows"],
            "max_staleness": 0,
            "update": {"minibatch_size": settings["rows"]},
            "policy": {"model": settings["checkpoint"]},
            "prompts": {"path": settings["prompts"]},
            "generation": {"max_new_tokens": settings["new_tokens"], "min_new_tokens": settings["new_tokens"]},
            "validation": {"size": 0},
            "algorithm": {
                "name": settings["algorithm"],
                "responses_per_prompt": settings["group"],
                "mask_unfinished": False,
            },
            "kl": {"coef": settings["kl_coef"]},
            "optimizer": optimizer,
        },
    }


def summary(samples: list[Measurement]) -> list[dict[str, Any]]:
    """Return medians over the rounds for each cell, and the medians of the ratios of matched rounds."""
    rows = []
    for key, in_cell in grouped(samples, *CELL).items():
        row = dict(zip(CELL, key, strict=True))
        for (name,), own in grouped(in_cell, "contender").items():
            row[f"{name}_seconds"] = median(sample["seconds"] for sample in own)
        row["ours_over_trl"] = matched_ratio(in_cell, OURS, TRL, "seconds")
        row["in_cpu_time"] = matched_ratio(in_cell, OURS, TRL, "cpu_seconds")
        rows.append(row)
    return rows
