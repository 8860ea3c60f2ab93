"""Metrics of rollouts: the `train_rollouts/…` of a step, and those of a validation."""

from __future__ import annotations

import numpy as np
import torch

from actor.algorithms.advantages import explained_variance, masked_mean
from actor.algorithms.batch import sequence_kl
from actor.data.rollout import PPOBatch, Rollout, ScoredRollout, Scores


def rollout_metrics(scored: ScoredRollout, batch: PPOBatch, *, kl_coef: float) -> dict[str, float]:
    """Return the `train_rollouts/…` metrics of one step: means over scored rows or response tokens."""
    scores = scored.scores
    rewards = scores.rewards[scores.scored]
    metrics = {**text_metrics(scored.rollout, scores), "kl_coef": kl_coef}
    distance = sequence_kl(scored, batch.mask)
    if batch.kl is not None and distance is not None:
        kl_sum = (batch.kl * batch.mask).sum(-1)[scores.scored]
        metrics |= {
            "init_policy_kl": float(masked_mean(batch.kl, batch.mask)),
            "init_policy_kl_per_sequence": distance,
            "rewards_with_kl": float((rewards - kl_coef * kl_sum).mean()),
        }
    ours, theirs = scored.logprobs, scored.rollout.logprobs
    if ours is not None and theirs is not None and ours is not theirs:
        gap = torch.where(batch.mask > 0, ours - theirs, 0.0).abs()
        metrics |= {
            "generation_logprob_gap": float(masked_mean(gap, batch.mask)),
            "generation_logprob_gap_max": float(gap.max()),
        }
    charted = {"advantages": (batch.advantages, batch.policy_weights > 0), "returns": (batch.returns, batch.mask)}
    if batch.rewards_to_go is not None:
        charted["values"] = batch.prev_values, batch.mask
        metrics |= {
            # Not `returns`: with lam below 1 they contain the values, so even an untrained critic would score well.
            "explained_variance": float(explained_variance(batch.prev_values, batch.rewards_to_go, batch.mask)),
            "weights_version": float(scores.versions.max()),
            "weights_version_min": float(scores.versions[scores.scored].min()),
        }
    for name, (tensor, mask) in charted.items():
        mean = masked_mean(tensor, mask)
        metrics[f"{name}_mean"] = float(mean)
        metrics[f"{name}_std"] = float(masked_mean((tensor - mean) ** 2, mask).sqrt())
    return {f"train_rollouts/{name}": value for name, value in metrics.items()}


def text_metrics(rollout: Rollout, scores: Scores) -> dict[str, float]:
    """Return metrics of any rollout, training or validation: lengths, rewards of scored rows, diversity."""
    rewards = scores.rewards[scores.scored]
    metrics = {
        "rollout_size": float(len(scores.scored)),
        "response_lengths": float(rollout.lengths.float().mean()),
        "prompt_lengths": float(rollout.prompt_lengths.float().mean()),
        "generation_length": float((rollout.lengths - rollout.prompt_lengths).float().mean()),
        "rewards": float(rewards.mean()),
        "rewards_std": float(rewards.std(correction=0)),
        "fraction_of_samples_properly_ended": float(rollout.is_end.float().mean()),
        "masked_samples": float((~scores.scored).sum()),
        "distinct2": distinct_bigrams(rollout),
    }
    if scores.reward_version is not None:
        metrics["reward_version"] = float(scores.reward_version)
    metrics |= process_metrics(scores)
    for name, component in scores.components.items():
        finite = component[torch.isfinite(component)]
        if finite.numel():  # a reward that failed on every row has no mean
            metrics[f"reward_{name}"] = float(finite.mean())
    return metrics


def process_metrics(scores: Scores) -> dict[str, float]:
    """Return the mean reward of a step and the mean number of steps of scored rows; empty without process rewards."""
    if scores.process is None or not scores.scored.any():
        return {}
    ends = scores.process.ends[scores.scored]
    steps = scores.process.rewards[scores.scored][ends]
    return {"process_rewards": float(steps.mean()), "steps_per_response": float(ends.sum(-1).float().mean())}


def distinct_bigrams(rollout: Rollout) -> float:
    """Return the share of distinct token bigrams in all responses; it drops early when the policy collapses."""
    tokens, first = rollout.tokens, torch.arange(rollout.tokens.shape[1] - 1)
    is_pair = (first >= rollout.prompt_lengths[:, None]) & (first + 1 < rollout.lengths[:, None])
    pairs = (tokens[:, :-1] * (tokens.max() + 1) + tokens[:, 1:])[is_pair].numpy()
    return np.unique(pairs).size / max(1, pairs.size)
