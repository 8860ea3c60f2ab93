"""Benchmark of the dry run: the memory that it predicts for each role against the measured peak.

Each role runs in a process of its own, with rows of the longest length, so that it does what the plan counts.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actor.algorithms.method import Method
from actor.data.rollout import PPOBatch, Prompt
from actor.policy.policy import Policy
from actor.policy.update import PolicyUpdate
from benchmarks.measurement import Option, Record, Result, Target, peak_rss_bytes
from benchmarks.processes import output_of
from benchmarks.workload import SIZES, make_checkpoint, trace_tokenizer
from python_backend.config import RunConfig
from python_backend.models.modeling import load_critic, load_reward, quiet_transformers, save_critic
from python_backend.process import keep_freed_memory
from python_backend.wire.training_payload import TrainPayload
from tools.plan.command import roles_of
from tools.plan.roles import generation_sizes, policy_training
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

KINDS = ("policy", "reward", "critic")
ROLES = ("actor", "generation", "trainer", "reward", "critic")
WARM_UP = "tiny"
NEAR = 0.15
PROMPT, RESPONSE, ROWS = 96, 160, 8
OPTIONS = {
    "models": Option(["5m", "20m", "60m"], f"any of {', '.join(SIZES)}", quick=["2m"], known=SIZES),
    "roles": Option(list(ROLES), f"any of {', '.join(ROLES)}", known=ROLES),
    "budget": Option(1024, "tokens in one forward pass"),
    "device": Option("cpu", "device of the roles, in bfloat16 unless it is the CPU"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Run every role of every model."""
    with tempfile.TemporaryDirectory() as scratch:
        make_checkpoints(WARM_UP, Path(scratch) / WARM_UP, device=settings.device)
        for model in settings.models:
            folder = Path(scratch) / model
            make_checkpoints(model, folder, device=settings.device)
            for role in settings.roles:
                arguments = [role, str(folder), str(settings.budget), settings.device]
                command = [sys.executable, "-m", "benchmarks.memory", *arguments]
                sample = json.loads(output_of(f"{role} of {model}", command).splitlines()[-1])
                record.add({"model": model, "role": role, **sample})
                record.say(f"{model}  {role}: planned {sample['planned_mb']:.0f}, peak {sample['peak_mb']:.0f} MB")


def make_checkpoints(model: str, folder: Path, *, device: str = "cpu", kinds: Sequence[str] = KINDS) -> None:
    """Write a policy, a reward model and a critic of the reward's weights, or those in `kinds`, with random weights."""
    for kind in kinds:
        if kind == "critic":
            (folder / "critic").mkdir(exist_ok=True)
            save_critic(load_critic(folder / "reward"), folder / "critic")  # as its versions are stored
            trace_tokenizer().save_pretrained(folder / "critic")
        else:
            make_checkpoint(SIZES[model], folder / kind, kind, device=device)


def config_of(
    folder: Path,
    budget: int,
    *,
    served: Mapping[str, Any] = {},
    trained: Mapping[str, Any] = {},
    rows: int = ROWS,
    max_new_tokens: int = RESPONSE,
    algorithm: str = "ppo",
) -> RunConfig:
    """Return the run whose roles are measured.

    Args:
        served: further settings of reward and critic.
        trained: further settings of policy and critic trainer.
        rows: responses of a rollout, all generated at once, and all in one minibatch.
    """
    scoring = {"workers": 1, "threads": 1, "token_budget": budget, **served}
    return RunConfig.model_validate(
        {
            "run": {"dir": folder / "run", "share_cards": True},
            "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
            "reward": {"model": folder / "reward", **scoring},
            "critic": {"model": folder / "critic", **scoring},
            "trainer": {"token_budget": budget, "global_batch_size": rows, **trained},
            "actor": {
                "rollout_size": rows,
                "algorithm": {"name": algorithm},
                "policy": {"model": folder / "policy", "token_budget": budget, **trained},
                "prompts": {"max_tokens": PROMPT},
                "generation": {"max_new_tokens": max_new_tokens, "batch_size": rows},
                "kl": {"coef": 0.0},
                "update": {"minibatch_size": rows},
                "validation": {"size": 0},
            },
        }
    )


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return a row for each model and role."""
    return [{**sample, "planned / peak": sample["planned_mb"] / sample["peak_mb"]} for sample in result["samples"]]


def targets(result: Result) -> list[Target]:
    """Return the target of each measurement."""
    return [
        Target("planned / peak", row["planned / peak"], 1 - NEAR, 1 + NEAR, f"{row['model']} {row['role']}")
        for row in result["summary"]
    ]


def run_role(role: str, config: RunConfig) -> None:
    """Do the work of one role that needs the most memory, twice, so that the optimizer's state exists."""
    longest = PROMPT + RESPONSE
    rows = [np.full(longest, 5 + i, np.int64) for i in range(ROWS)]  # distinct: a shared prompt is computed once
    if role == "trainer":
        _update_critic(config, rows)
    elif role in ("reward", "critic"):
        _serve(role, config, rows[: max(1, config.reward.token_budget // longest)])
    else:
        _run_policy(role, config, rows)


def _update_critic(config: RunConfig, rows: list[np.ndarray]) -> None:
    lengths = np.array([row.size for row in rows])
    targets = np.ones(int(lengths.sum()) - len(rows), np.float32)
    payload = TrainPayload(np.concatenate(rows), lengths, targets, targets, targets)
    update = CriticUpdate(build_critic(config.critic.model, config.trainer, seed=0), config.trainer)
    for _ in range(2):
        update.train(payload, lambda done: None)


def _serve(role: str, config: RunConfig, rows: list[np.ndarray]) -> None:
    """Score rows; a critic loads its next version, too."""
    keep_freed_memory()
    if role == "reward":
        reward = load_reward(config.reward.model, device=config.reward.device, dtype=config.reward.dtype)
        for _ in range(3):
            reward.score(rows)
        return
    critic = load_critic(config.critic.model, device=config.critic.device, dtype=config.critic.dtype)
    critic.values(rows)
    following = critic.with_weights(config.critic.model)
    following.check_finite()
    critic.values(rows)
    following.values(rows)


def _run_policy(role: str, config: RunConfig, rows: list[np.ndarray]) -> None:
    """Generate, or train as the actor does: in a thread."""
    policy = Policy.of(config.actor)
    if role == "generation":
        policy.generate([Prompt(str(i), "", row[:PROMPT]) for i, row in enumerate(rows)], seed=0)
        return
    batch = batch_of(torch.from_numpy(np.stack(rows)), torch.full((ROWS,), rows[0].size))
    training = policy_update(config, policy)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            thread.submit(training.run, batch, seed=0, kl_coef=0.0).result()


def policy_update(config: RunConfig, policy: Any) -> Any:
    """Return the policy's update as the run makes it."""
    return PolicyUpdate.of(config.actor, policy, Method.of(config.actor.algorithm, config.actor.kl))


def batch_of(tokens: Any, lengths: Any) -> Any:
    """Return a training batch of `tokens` `[B, S]` whose rows have prompts of `PROMPT` tokens; all advantages are 1."""
    weights = torch.zeros(tokens.shape[0], tokens.shape[1] - 1)
    weights[:, PROMPT - 1 :] = 1.0
    zeros = torch.zeros_like(weights)
    return PPOBatch(tokens, lengths, weights, weights, zeros, None, weights, zeros, zeros, None)


def main() -> None:
    """Run the role, folder, token budget and device in `sys.argv`; print planned and measured megabytes as JSON."""
    role, folder, budget, device = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    quiet_transformers()
    torch.set_num_threads(1)
    dtype = "float32" if device == "cpu" else "bfloat16"
    served, trained = {"device": device, "dtype": dtype}, {"device": device, "precision": dtype}
    config = config_of(folder, budget, served=served, trained=trained)
    planned = planned_bytes(role, config)
    warm_up = config_of(folder.parent / WARM_UP, budget, served=served, trained=trained)
    run_role(role, warm_up)  # imports libraries and lets them allocate their own
    gc.collect()
    before = reset_peak(device)
    run_role(role, config)
    print(json.dumps({"planned_mb": planned / 1e6, "peak_mb": (peak_bytes(device) - before) / 1e6}))


def reset_peak(device: str) -> int:
    """Set the peak of `peak_bytes` to what is allocated now; return that."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        return peak_rss_bytes()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: str) -> int:
    """Return the largest memory of this process: that of its tensors on a GPU, or all of it on the CPU."""
    return peak_rss_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)


def planned_bytes(role: str, config: RunConfig) -> int:
    """Return the plan for the work of `run_role`: an update without generation, and without verifying a version."""
    if role == "actor":
        return policy_training(config).sizes.total
    if role == "generation":
        return policy_training(config).sizes.weights + generation_sizes(config)[0].total
    sizes = roles_of(config)[role].sizes
    return sizes.total - (sizes.copies if role == "trainer" else 0)


if __name__ == "__main__":
    main()
