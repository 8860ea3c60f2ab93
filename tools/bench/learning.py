"""`python -m tools bench learning --out DIR`: does every algorithm reach an optimum that is known?
Given: algorithms, seeds. Returns: 0 with result.json, learning.png and a table. Each run is the whole system, server,
sidecar where there is a critic, and actor, on the same task: the reward is the share of one word among sixty.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.pictures import STYLE
from tools.bench.share_reward import OPTIMUM, WORD
from tools.child import tail

BAR = 0.95
LAST_STEPS = 5  # whose mean is what a run has reached
NUM_WORDS = 60
NUM_PROMPTS = 64
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "reinforce++": {},
    "rloo": {"responses_per_prompt": 4},
    "grpo": {"responses_per_prompt": 4},
}
COLOURS = {"ppo": "#0072B2", "reinforce++": "#D55E00", "rloo": "#009E73", "grpo": "#CC79A7"}
QUICK: dict[str, Any] = {"algorithms": "rloo", "seeds": "0", "steps": 2}


class RunFailed(RuntimeError):
    """A run ended without its metrics; the message has the end of its log."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train every algorithm from every seed; 0 when done, whatever the bar says, 1 when a run failed."""
    arguments = parse_arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(), "bar": BAR,
        "optimum": OPTIMUM, "settings": {"steps": arguments.steps, "rollout_size": arguments.rollout_size},
        "samples": [],
    }  # fmt: skip
    try:
        for algorithm in arguments.algorithms.split(","):
            for seed in map(int, arguments.seeds.split(",")):
                samples = train(arguments, algorithm, seed)
                result["samples"] += samples
                print(f"{algorithm}, seed {seed}: {samples[0]['reward']:.3f} -> {reached(samples):.3f}", flush=True)
                (arguments.out / "result.json").write_text(json.dumps(result, indent=1))
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    draw(result["samples"], arguments.out / "learning.png")
    print(report(result["samples"]))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to train."""
    parser = argparse.ArgumentParser(prog="python -m tools bench learning", description="Do the algorithms learn?")
    parser.add_argument("--out", type=Path, required=True, help="folder of result.json and learning.png")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="any of them, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="of prompts, weights and sampling")
    parser.add_argument("--steps", type=int, default=60, help="of each run: the budget")
    parser.add_argument("--rollout-size", type=int, default=64, help="responses of a step")
    parser.add_argument("--quick", action="store_true", help="one short run: shows that it works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args(argv)
    unknown = set(arguments.algorithms.split(",")) - set(ALGORITHMS)
    if unknown:
        parser.error(f"unknown algorithm {sorted(unknown)[0]!r}; known: {', '.join(ALGORITHMS)}")
    return arguments


def train(arguments: argparse.Namespace, algorithm: str, seed: int) -> list[dict[str, Any]]:
    """One run of the whole system; a sample for each of its steps. Raises RunFailed."""
    folder = arguments.out / "runs" / f"{algorithm.replace('+', 'p')}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_checkpoints(folder, seed)
    config = folder / "run.yaml"  # JSON is YAML
    config.write_text(json.dumps(configuration(arguments, folder, algorithm, seed), indent=1))
    log = folder / "run.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "tools", "run", "--config", str(config)]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise RunFailed(f"{algorithm}, seed {seed}, ended with exit code {code}; {log} ends with:\n{tail(log)}")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)
    return [
        {
            "algorithm": algorithm, "seed": seed, "step": line["step"], "reward": line["train_rollouts/rewards"],
            "optimum": OPTIMUM, "kl": line["train_rollouts/init_policy_kl_per_sequence"],
        }
        for line in lines
    ]  # fmt: skip


def configuration(arguments: argparse.Namespace, folder: Path, algorithm: str, seed: int) -> dict[str, Any]:
    """The run's YAML: the same for all but for the algorithm and what it cannot do without."""
    served = {
        "workers": 1,
        "threads": 1,
        "token_budget": 1024,
        "forward_overhead_tokens": 64,
        "allocator": "retain",
    }
    return {
        "run": {"dir": str(folder / "run"), "seed": seed},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 1},
        "reward": {"checkpoint": str(folder / "critic"), **served},
        "rewards": {"share": {"function": "tools.bench.share_reward:share_of_word"}},
        "critic": {"checkpoint": str(folder / "critic"), **served},
        "trainer": {
            "lr": 3e-3, "warmup_steps": 0, "constant_steps": 1000, "max_steps": 2000, "weight_decay": 0.0,
            "betas": [0.9, 0.95], "checkpoint_every": 1000, "reload_on_save": "none",
        },
        "actor": {
            "algorithm": algorithm, "checkpoint": str(folder / "policy"), "prompts": str(folder / "prompts.jsonl"),
            "validation_size": 0, "steps": arguments.steps, "rollout_size": arguments.rollout_size,
            "generation_batch": arguments.rollout_size, "minibatch_size": arguments.rollout_size // 4,
            "max_new_tokens": 12, "lr": 3e-3, "weight_decay": 0.0, "betas": [0.9, 0.95], "kl_coef": 0.0, "kl_every": 1,
            "mask_unfinished": False, "checkpoint_every": 1000, **ALGORITHMS[algorithm],
        },
    }  # fmt: skip


def make_checkpoints(folder: Path, seed: int) -> None:
    """A policy and a critic with random weights over the same sixty words, and prompts of three words."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification, PreTrainedTokenizerFast

    from python_backend.modeling import quiet_transformers

    quiet_transformers()
    words = [f"w{i}" for i in range(NUM_WORDS)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    bare = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config: dict[str, Any] = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    for name, kind in (("policy", LlamaForCausalLM), ("critic", LlamaForTokenClassification)):
        model = kind(LlamaConfig(**config, num_labels=1))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = np.random.default_rng(seed)
    lines = [json.dumps({"text": " ".join(generator.choice(words, 3))}) for _ in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def reached(samples: Sequence[dict[str, Any]]) -> float:
    """Mean reward of a run's last steps, as a share of the optimum."""
    return statistics.fmean(sample["reward"] for sample in samples[-LAST_STEPS:]) / OPTIMUM


def runs_of(samples: Sequence[dict[str, Any]]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The samples of each run in the order of its steps, by algorithm and seed."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for sample in sorted(samples, key=lambda sample: sample["step"]):
        found.setdefault(sample["algorithm"], {}).setdefault(sample["seed"], []).append(sample)
    return {name: dict(sorted(found[name].items())) for name in ALGORITHMS if name in found}


def report(samples: Sequence[dict[str, Any]]) -> str:
    """What each run has reached, the step from which it stays above the bar, and how far it went."""
    lines = [f"{'':<13}seed  reached  from step     KL"]
    for name, runs in runs_of(samples).items():
        for seed, run in runs.items():
            below = [sample["step"] for sample in run if sample["reward"] < BAR * OPTIMUM]
            first = max(below, default=0) + 1
            shown = str(first) if first <= run[-1]["step"] else "-"
            lines.append(f"{name:<13}{seed:>4}{reached(run):>9.3f}{shown:>11}{run[-1]['kl']:>7.1f}")
        worst = min(map(reached, runs.values()))
        verdict = "PASS" if worst >= BAR else "MISS"
        lines.append(f"  {verdict}: {worst:.3f} of the optimum at worst, must be >= {BAR:g}")
    return "\n".join(lines)


def draw(samples: Sequence[dict[str, Any]], path: Path) -> None:
    """Reward over steps, a panel for each algorithm, a line for each seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    runs = runs_of(samples)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.2 * len(runs), 3.2), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for ax, (name, by_seed) in zip(axes, runs.items(), strict=True):
            for alpha, (seed, run) in zip((1.0, 0.65, 0.4), by_seed.items(), strict=False):
                x, y = [s["step"] for s in run], [s["reward"] for s in run]
                ax.plot(x, y, color=COLOURS[name], alpha=alpha, lw=1.6, label=f"seed {seed}")
            ax.axhline(BAR * OPTIMUM, color="#9AA0A6", lw=1, ls=(0, (4, 3)))
            ax.set(title=name, xlabel="step", ylim=(0, 1.04))
            ax.legend(loc="lower right", fontsize=8)
        axes[0].set_ylabel(f"share of “{WORD}” in the responses")
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": 8}
        axes[0].annotate(f"{BAR:.0%} of the optimum", (0.98, BAR - 0.07), color="#5F6368", **place)
        figure.savefig(path)
