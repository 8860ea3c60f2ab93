"""Benchmark of learning: every algorithm must reach a known optimum.

The reward is the share of one given word in the response; the vocabulary has sixty words.
"""

import argparse
import json
import shutil
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement import Option, Record, Result, Target, grouped
from benchmarks.processes import SERVED
from benchmarks.reward_functions import OPTIMUM, WORD
from benchmarks.workload import random_llama, word_tokenizer
from python_backend.store.jsonl import read_jsonl, write_jsonl
from tools.report.curves import figure_of
from tools.server.child import Child

LEAST_SHARE = 0.95
LAST_STEPS = 5  # a run's result is the mean reward of this many last steps
STOP_TIMEOUT_S = 60.0
NUM_WORDS = 60
NUM_PROMPTS = 64
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "reinforce++": {},
    "rloo": {"responses_per_prompt": 4},
    "grpo": {"responses_per_prompt": 4},
}
COLOURS = {"ppo": "#0072B2", "reinforce++": "#D55E00", "rloo": "#009E73", "grpo": "#CC79A7"}
OPTIONS = {
    "algorithms": Option(list(ALGORITHMS), f"any of {', '.join(ALGORITHMS)}", quick=["rloo"], known=ALGORITHMS),
    "seeds": Option([0, 1, 2], "seeds of prompts, weights and sampling", quick=[0]),
    "steps": Option(60, "training steps of each run", quick=2),
    "rollout_size": Option(64, "responses per step"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Train every algorithm with every seed. Raises RlhfError if a run fails."""
    for algorithm in settings.algorithms:
        for seed in settings.seeds:
            samples = train(settings, record.out, algorithm, seed)
            record.result["samples"] += samples
            record.save()
            record.say(f"{algorithm}, seed {seed}: {samples[0]['reward']:.3f} -> {reached(samples):.3f}")


def train(settings: argparse.Namespace, out: Path, algorithm: str, seed: int) -> list[dict[str, Any]]:
    """Train once with the whole system; return a sample for each step."""
    folder = out / "runs" / f"{algorithm.replace('+', 'p')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_checkpoints(folder, seed)
    config = folder / "run.yaml"
    config.write_text(json.dumps(configuration(settings, folder, algorithm, seed), indent=1))  # JSON is YAML
    child = Child(f"{algorithm} run, seed {seed},", ["tools", "run", "--config", str(config)], folder / "run.log", {})
    try:
        child.process.wait()
    finally:
        child.stop(signal.SIGINT, STOP_TIMEOUT_S)
    child.raise_if_failed()
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)
    return [
        {
            "algorithm": algorithm,
            "seed": seed,
            "step": line["step"],
            "reward": line["train_rollouts/rewards"],
            "optimum": OPTIMUM,
            "kl": line["train_rollouts/init_policy_kl_per_sequence"],
        }
        for line in lines
    ]


def configuration(settings: argparse.Namespace, folder: Path, algorithm: str, seed: int) -> dict[str, Any]:
    """Return the run's YAML; algorithms differ only in the settings of `ALGORITHMS`."""
    served = {**SERVED, "model": str(folder / "critic"), "token_budget": 1024}
    return {
        "run": {"dir": str(folder / "run"), "seed": seed},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "reward": served,
        "rewards": {"share": {"function": "benchmarks.reward_functions:share_of_word"}},
        "critic": served,
        "trainer": {
            "optimizer": {
                "lr": 3e-3,
                "warmup_steps": 0,
                "constant_steps": 1000,
                "max_steps": 2000,
                "weight_decay": 0.0,
                "betas": [0.9, 0.95],
            },
            "checkpoint_every": 1000,
            "reload_on_save": "none",
        },
        "actor": {
            "steps": settings.steps,
            "rollout_size": settings.rollout_size,
            "checkpoint_every": 1000,
            "policy": {"model": str(folder / "policy")},
            "prompts": {"path": str(folder / "prompts.jsonl"), "max_tokens": 32},
            "generation": {"batch_size": settings.rollout_size, "max_new_tokens": 12},
            "algorithm": {"name": algorithm, "mask_unfinished": False, **ALGORITHMS[algorithm]},
            "kl": {"coef": 0.0, "every": 1},
            "update": {"minibatch_size": settings.rollout_size // 4},
            "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "betas": [0.9, 0.95]},
            "validation": {"size": 0},
        },
    }


def make_checkpoints(folder: Path, seed: int) -> None:
    """Write a policy and a critic with random weights over the same sixty words, and prompts of three words."""
    words = [f"w{i}" for i in range(NUM_WORDS)]
    tokenizer = word_tokenizer(["<pad>", "<eos>", "<unk>", *words], eos="<eos>", unknown="<unk>")
    ids = {"vocab_size": NUM_WORDS + 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for kind in ("policy", "critic"):
        random_llama(kind, seed=seed, max_position_embeddings=64, **ids).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    generator = np.random.default_rng(seed)
    write_jsonl(folder / "prompts.jsonl", ({"text": " ".join(generator.choice(words, 3))} for _ in range(NUM_PROMPTS)))


def reached(samples: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward of a run's last steps as a share of the optimum."""
    return statistics.fmean(sample["reward"] for sample in samples[-LAST_STEPS:]) / OPTIMUM


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each run's share of the optimum, the step from which it stays above the target, and its last KL."""
    rows = []
    for (name, seed), run in grouped(result["samples"], "algorithm", "seed").items():
        first = max((sample["step"] for sample in run if sample["reward"] < LEAST_SHARE * OPTIMUM), default=0) + 1
        above = first if first <= run[-1]["step"] else None
        rows.append({"algorithm": name, "seed": seed, "reached": reached(run), "from_step": above, "kl": run[-1]["kl"]})
    return rows


def targets(result: Result) -> list[Target]:
    """Return a target for each algorithm: the share of the optimum that its worst seed reaches."""
    found = grouped(result["summary"], "algorithm").items()
    return [
        Target(f"{name}: share of the optimum, worst seed", min(row["reached"] for row in rows), LEAST_SHARE)
        for (name,), rows in found
    ]


def draw(result: Result, out: Path) -> None:
    """Draw the reward over steps, with a panel for each algorithm and a line for each seed."""
    runs = grouped(result["samples"], "algorithm")
    with figure_of(out / "learning.png", (3.2 * len(runs), 3.2)) as figure:
        axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for ax, ((name,), samples) in zip(axes, runs.items(), strict=True):
            for alpha, ((seed,), run) in zip((1.0, 0.65, 0.4), grouped(samples, "seed").items(), strict=False):
                x, y = [s["step"] for s in run], [s["reward"] for s in run]
                ax.plot(x, y, color=COLOURS[name], alpha=alpha, lw=1.6, label=f"seed {seed}")
            ax.axhline(LEAST_SHARE * OPTIMUM, color="#9AA0A6", lw=1, ls=(0, (4, 3)))
            ax.set(title=name, xlabel="step", ylim=(0, 1.04))
            ax.legend(loc="lower right", fontsize=8)
        axes[0].set_ylabel(f"share of “{WORD}” in the responses")
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 8}
        axes[0].annotate(f"{LEAST_SHARE:.0%} of the optimum", (0.98, LEAST_SHARE - 0.07), color="#5F6368", **place)
