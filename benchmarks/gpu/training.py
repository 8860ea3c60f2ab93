"""Parts of the GPU check that generate and train, in this process, as actor and sidecar do."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from actor.algorithms.experience import critic_payload, make_batch
from actor.algorithms.methods import Method
from actor.algorithms.shaping import RewardShaper
from actor.data.rollout import Prompt, Rollout, ScoredRollout, Scores
from actor.policy.policy import Policy
from actor.policy.update import PolicyUpdate
from benchmarks import memory
from benchmarks.gpu.job import Found, Job, main
from benchmarks.support.benchmark import Target
from benchmarks.support.usage import timed
from python_backend.config import RunConfig
from python_backend.models.batching import padded_rows, plan_micro_batches
from python_backend.models.modeling import load_reward
from python_backend.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS
from python_backend.wire.training_payload import TrainPayload
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

LORA = {"lora_rank": 16, "gradient_checkpointing": True}


def decoding(job: Job) -> Found:
    """Generation with all weights, and with adapters."""
    for name, trained in (("all weights trained", {}), ("LoRA", {"lora_rank": 16})):
        config = _config(job, trained)
        policy, prompts = Policy.of(config.actor), _prompts(config)
        policy.generate(prompts, seed=0)  # its proofs, and the kernels' first use
        seconds, rollout = timed(functools.partial(policy.generate, prompts, seed=1))
        tokens = int((rollout.lengths - rollout.prompt_lengths).sum())
        yield Target(f"{name}: tokens/s", tokens / seconds, detail=f"{len(prompts)} responses, {tokens} tokens")
        yield Target(
            f"{name}: a token of all responses, ms", 1e3 * seconds / int(rollout.lengths.max() - memory.PROMPT)
        )


def ppo_step(job: Job) -> Found:
    """Two PPO steps, of which the second one is reported."""
    config = _config(job, LORA)
    actor = config.actor
    # A random model hardly ever ends a response.
    method = dataclasses.replace(Method.of(actor.algorithm, actor.kl), mask_unfinished=False)
    torch.manual_seed(0)
    policy = Policy.of(actor)
    policy_update = PolicyUpdate.of(actor, policy, method)
    shaper = RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)
    served = config.reward
    reward = load_reward(served.checkpoint, device=served.device, dtype=served.dtype)
    critic_update = CriticUpdate(build_critic(config.critic.checkpoint, config.trainer, seed=0), config.trainer)
    found: dict[str, tuple[float, int]] = {}

    def phase(name: str, do: Callable[[], Any]) -> Any:
        memory.reset_peak(job.device)
        start, result = time.perf_counter(), do()
        job.synchronise()
        found[name] = time.perf_counter() - start, memory.peak_bytes(job.device)
        return result

    for step in (1, 2):
        rollout: Rollout = phase("generation", functools.partial(policy.generate, _prompts(config), seed=step))
        rows = rollout.rows()
        rewards = phase("rewards", functools.partial(_in_batches, job, rows, reward.score))
        values = phase("values", functools.partial(_in_batches, job, rows, critic_update.critic.values))
        logprobs = phase("log-probs", functools.partial(policy.sampled_logprobs, rollout))
        ref_logprobs = phase("log-probs of the reference", functools.partial(policy.logprobs, rollout, reference=True))
        scores = Scores(
            torch.from_numpy(np.concatenate(rewards)),
            torch.from_numpy(padded_rows(values, rollout.tokens.shape[1])),
            torch.zeros(len(rows)).long(),
            torch.ones(len(rows)).bool(),
            [],
        )
        shaped = shaper.shape_scores(scores, rollout)
        batch = make_batch(ScoredRollout(rollout, scores, logprobs, ref_logprobs), method, rewards=shaped, kl_coef=0.1)
        sent = critic_payload(batch)
        sent[SEQUENCE_LENGTHS] = sent[SEQUENCE_LENGTHS].T
        payload = TrainPayload(*(sent[name][0] for name in (TOKENS, SEQUENCE_LENGTHS, RETURNS, PREV_VALUES, MASK)))
        report = phase("critic's update", functools.partial(critic_update.train, payload, lambda _: None))
        metrics = phase("policy's update", functools.partial(policy_update.run, batch, seed=step, kl_coef=0.1))
    tokens = int(rollout.lengths.sum())
    for name, (seconds, peak) in found.items():
        yield Target(f"{name}, s", seconds, detail=f"peak {peak / 2**30:.1f} GiB")
    whole = sum(seconds for seconds, _ in found.values())
    yield Target("whole step, s", whole, detail=f"{len(rows)} rows, {tokens} tokens, prompts included")
    yield Target("critic's loss", report.loss_mean, 1e-6)
    yield Target("norm of the policy's gradient", metrics["train_optim/grad_norm"], 1e-6)


def _config(job: Job, trained: Mapping[str, Any]) -> RunConfig:
    rows, longest = (8, 24) if job.small else (64, 256)
    return job.config(trained=trained, rows=rows, max_new_tokens=longest)


def _prompts(config: RunConfig) -> list[Prompt]:
    rows = np.random.default_rng(0).integers(3, 4096, (config.actor.rollout_size, memory.PROMPT))
    return [Prompt(str(i), "", row) for i, row in enumerate(rows)]


def _in_batches(job: Job, rows: list[np.ndarray], score: Callable[[list[np.ndarray]], Any]) -> list[Any]:
    """Return the outputs of each row, computed in the batches that serving would make of them."""
    lengths = [row.size for row in rows]
    outputs: list[Any] = [None] * len(rows)
    for batch in plan_micro_batches(lengths, token_budget=job.budget, max_rows=len(rows)):
        for i, output in zip(batch, score([rows[i] for i in batch]), strict=True):
            outputs[i] = output
    return outputs


if __name__ == "__main__":
    main({"decoding": decoding, "ppo_step": ppo_step})
