"""Benchmark of learning: every algorithm must reach a known optimum, and the critic must save tokens.

The reward is the share of one given word in the response; the vocabulary has sixty words. In the second task, prompts
have five difficulties, for which no, one, two or four words of the response must be right, or more than it has. GRPO
learns it with dynamic sampling alone, and with prompts that the critic chooses.
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

from benchmarks.measurement import Option, Record, Result, Target, grouped, quotient
from benchmarks.processes import SERVED
from benchmarks.reward_functions import DIFFICULTIES, OPTIMUM, WORD
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
GROUP_SIZE = 8
DYNAMIC, GUIDED = "dynamic", "guided"
DYNAMIC_SAMPLING = {"name": "grpo", "responses_per_prompt": GROUP_SIZE, "max_resampled": 10, "entropy_bonus": 0.03}
MIXTURE: dict[str, dict[str, Any]] = {DYNAMIC: DYNAMIC_SAMPLING, GUIDED: {**DYNAMIC_SAMPLING, "prompt_candidates": 4}}
MOST_TOKENS, LEAST_AUC = 0.7, 0.75
LEAST_GAIN = -0.05  # accuracy; about two standard errors on 256 prompts
RUNS = {**ALGORITHMS, **MIXTURE}
COLOURS = dict(zip(RUNS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"), strict=True))
OPTIONS = {
    "algorithms": Option(list(RUNS), f"any of {', '.join(RUNS)}", quick=["rloo", GUIDED], known=RUNS),
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
    make_checkpoints(folder, seed, is_mixture=algorithm in MIXTURE)
    config = folder / "run.yaml"
    config.write_text(json.dumps(configuration(settings, folder, algorithm, seed), indent=1))  # JSON is YAML
    child = Child(f"{algorithm} run, seed {seed},", ["tools", "run", "--config", str(config)], folder / "run.log", {})
    try:
        child.process.wait()
    finally:
        child.stop(signal.SIGINT, STOP_TIMEOUT_S)
    child.raise_if_failed()
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    found = read_jsonl(folder / "run" / "validations.jsonl") if algorithm in MIXTURE else []
    accuracies = {line["step"]: line["reward"] for line in found}
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)
    return [
        {
            "algorithm": algorithm,
            "seed": seed,
            "step": line["step"],
            "reward": line["train_rollouts/rewards"],
            "optimum": OPTIMUM,
            "kl": line["train_rollouts/init_policy_kl_per_sequence"],
            "accuracy": accuracies.get(line["step"]),
            "auc": line.get("train_rollouts/prompt_auc"),
            "tokens": line["train_rollouts/generation_length"] * settings.rollout_size
            + line.get("train_rollouts/dropped_tokens", 0),
            "prompts": settings.rollout_size // GROUP_SIZE + line.get("train_rollouts/resampled_prompts", 0),
            "useful": line.get("train_rollouts/useful_prompts"),  # share of the prompts
        }
        for line in lines
    ]


def configuration(settings: argparse.Namespace, folder: Path, algorithm: str, seed: int) -> dict[str, Any]:
    """Return the run's YAML; the runs of a task differ only in the settings of `ALGORITHMS` or `MIXTURE`."""
    is_mixture = algorithm in MIXTURE
    validation = {"prompts": str(folder / "validation.jsonl"), "size": 256, "every": 10}
    served = {**SERVED, "model": str(folder / "critic"), "token_budget": 1024}
    return {
        "run": {"dir": str(folder / "run"), "seed": seed},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "rewards": {
            "task": {"function": f"benchmarks.reward_functions:{'is_solved' if is_mixture else 'share_of_word'}"}
        },
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
            **({"epochs": 2, "clip_value": 0} if is_mixture else {}),
        },
        "actor": {
            "steps": settings.steps,
            "rollout_size": settings.rollout_size,
            "checkpoint_every": 1000,
            "policy": {"model": str(folder / "policy")},
            "prompts": {"path": str(folder / "prompts.jsonl"), "max_tokens": 32},
            "generation": {"batch_size": settings.rollout_size, "max_new_tokens": 4 if is_mixture else 12},
            "algorithm": {"name": algorithm, "mask_unfinished": False, **RUNS[algorithm]},
            "kl": {"coef": 0.0, "every": 1},
            "update": {"minibatch_size": settings.rollout_size // 4},
            "optimizer": {"lr": 2e-3 if is_mixture else 3e-3, "weight_decay": 0.0, "betas": [0.9, 0.95]},
            "validation": validation if is_mixture else {"size": 0},
        },
    }


def make_checkpoints(folder: Path, seed: int, *, is_mixture: bool = False) -> None:
    """Write a policy and a critic with random weights over the same words, and prompts of some of them.

    A prompt has three of sixty words; or a difficulty and one of twelve words.
    """
    words = [f"w{i}" for i in range(NUM_WORDS)]
    vocabulary = [*words, *(DIFFICULTIES if is_mixture else ())]
    tokenizer = word_tokenizer(["<pad>", "<eos>", "<unk>", *vocabulary], eos="<eos>", unknown="<unk>")
    ids = {"vocab_size": len(vocabulary) + 3, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    for kind in ("policy", "critic"):
        random_llama(kind, seed=seed, max_position_embeddings=64, **ids).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    generator = np.random.default_rng(seed)

    def prompt() -> str:
        if is_mixture:
            return f"{generator.choice([*DIFFICULTIES])} {generator.choice(words[:12])}"
        return " ".join(generator.choice(words, 3))

    for name, number in (("prompts", 4096 if is_mixture else NUM_PROMPTS), ("validation", 256)):
        write_jsonl(folder / f"{name}.jsonl", ({"text": prompt()} for _ in range(number)))


def reached(samples: Sequence[dict[str, Any]]) -> float:
    """Return the mean reward of a run's last steps as a share of the optimum, or its last accuracy."""
    rewards = [sample["reward"] for sample in samples[-LAST_STEPS:]]
    accuracies = [sample["accuracy"] for sample in samples if sample["accuracy"] is not None]
    return accuracies[-1] if accuracies else statistics.fmean(rewards) / OPTIMUM


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return what each run reached, from which step it stays above the target, its last KL, and the cost of prompts."""
    rows = []
    for (name, seed), run in grouped(result["samples"], "algorithm", "seed").items():
        row = {"algorithm": name, "seed": seed, "reached": reached(run), "from_step": None, "kl": run[-1]["kl"]}
        if name in MIXTURE:
            useful = sum(sample["useful"] * sample["prompts"] for sample in run)
            row["tokens_a_useful_prompt"] = quotient(sum(sample["tokens"] for sample in run), useful)
            ranked = [sample for sample in run if sample["auc"] is not None]
            pairs = [sample["useful"] * (1 - sample["useful"]) * sample["prompts"] ** 2 for sample in ranked]
            row["auc"] = quotient(sum(sample["auc"] * n for sample, n in zip(ranked, pairs, strict=True)), sum(pairs))
        else:
            first = max((sample["step"] for sample in run if sample["reward"] < LEAST_SHARE * OPTIMUM), default=0) + 1
            row["from_step"] = first if first <= run[-1]["step"] else None
        rows.append(row)
    return rows


def targets(result: Result) -> list[Target]:
    """Return a target for each algorithm, its worst seed's share of the optimum, and those of guided prompts."""
    found = {name: rows for (name,), rows in grouped(result["summary"], "algorithm").items()}
    results = [
        Target(f"{name}: share of the optimum, worst seed", min(row["reached"] for row in rows), LEAST_SHARE)
        for name, rows in found.items()
        if name in ALGORITHMS
    ]
    if GUIDED not in found:
        return results
    aucs = [row["auc"] for row in found[GUIDED] if row["auc"] is not None]
    pairs = [
        (ours, theirs) for ours in found[GUIDED] for theirs in found.get(DYNAMIC, []) if ours["seed"] == theirs["seed"]
    ]
    ratios = [quotient(ours["tokens_a_useful_prompt"], theirs["tokens_a_useful_prompt"]) for ours, theirs in pairs]
    gains = [ours["reached"] - theirs["reached"] for ours, theirs in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    return [
        *results,
        Target(
            f"{GUIDED} / {DYNAMIC}: tokens a useful prompt, worst seed", max(known, default=None), None, MOST_TOKENS
        ),
        Target(f"{GUIDED} - {DYNAMIC}: final accuracy, worst seed", min(gains, default=None), LEAST_GAIN),
        Target(f"{GUIDED}: AUC of the predicted spread, worst seed", min(aucs, default=None), LEAST_AUC),
    ]


def draw(result: Result, out: Path) -> None:
    """Draw the reward over steps, with a panel for each algorithm and a line for each seed."""
    runs = grouped(result["samples"], "algorithm")
    with figure_of(out / "learning.png", (3.2 * len(runs), 3.2)) as figure:
        axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for ax, ((name,), samples) in zip(axes, runs.items(), strict=True):
            for alpha, ((seed,), run) in zip((1.0, 0.65, 0.4), grouped(samples, "seed").items(), strict=False):
                key = "accuracy" if name in MIXTURE else "reward"
                x, y = zip(*((s["step"], s[key]) for s in run if s[key] is not None), strict=True)
                ax.plot(x, y, color=COLOURS[name], alpha=alpha, lw=1.6, label=f"seed {seed}")
            if name in ALGORITHMS:
                ax.axhline(LEAST_SHARE * OPTIMUM, color="#9AA0A6", lw=1, ls=(0, (4, 3)))
                place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 8}
                text = f"{LEAST_SHARE:.0%} of the optimum"
                ax.annotate(text, (0.98, LEAST_SHARE - 0.07), color="#5F6368", **place)
            task = "held-out prompts" if name in MIXTURE else f"share of “{WORD}”"
            ax.set(title=f"{name}: {task}", xlabel="step", ylim=(0, 1.04))
            ax.legend(loc="lower right", fontsize=8)
        axes[0].set_ylabel("reward")
