"""Metrics of sampled conversations: the `train_rollouts/…` metrics of a training step, and metrics of a validation."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rlhf_triton.actor.algorithms.advantages import masked_mean
from rlhf_triton.actor.algorithms.batch import logprobs_by_position
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import (
    Conversation,
    Group,
    RolloutRow,
    conversations_of,
    failure_of,
    rows_of,
    scores_of,
)
from rlhf_triton.training_engine.explained_variance import explained_variance


def rollout_metrics(
    groups: Sequence[Group], batch: PPOBatch, *, dropped: Sequence[Group] = (), kl_coef: float
) -> dict[str, float]:
    """Return the `train_rollouts/…` metrics of one step: means over scored conversations or sampled tokens.

    Args:
        batch: the training batch of the rows of `groups`.
        dropped: groups that dynamic sampling replaced; only their failures count.
    """
    conversations = conversations_of(groups)
    rows = rows_of(conversations)
    failures = _failure_metrics([*conversations, *conversations_of(dropped)])
    metrics = {**text_metrics(conversations), **failures, "kl_coef": kl_coef}
    counted = [conversations[i] for i in batch.conversations[batch.mask.any(-1)].unique().tolist()]
    kl_per_sequence = sequence_kl(counted)
    if batch.kl is not None and kl_per_sequence is not None:
        metrics |= {
            "init_policy_kl": float(masked_mean(batch.kl, batch.mask)),
            "init_policy_kl_per_sequence": kl_per_sequence,
            "rewards_with_kl": metrics["rewards"] - kl_coef * float((batch.kl * batch.mask).sum()) / len(counted),
        }
    if any(row.policy_logprobs is not None and row.policy_logprobs is not row.logprobs for row in rows):
        policy_logprobs = logprobs_by_position(rows, "policy_logprobs")
        engine_logprobs = logprobs_by_position(rows, "logprobs")
        if policy_logprobs is not None and engine_logprobs is not None:
            gap = torch.where(batch.mask > 0, policy_logprobs - engine_logprobs, 0.0).abs()
            metrics |= {
                "generation_logprob_gap": float(masked_mean(gap, batch.mask)),
                "generation_logprob_gap_max": float(gap.max()),
            }
    charted = {"advantages": (batch.advantages, batch.policy_weights > 0), "returns": (batch.returns, batch.mask)}
    if batch.rewards_to_go is not None:
        versions = [row.score.version for row in rows if row.score.version >= 0]
        used = batch.mask > 0
        charted["values"] = batch.prev_values, batch.mask
        metrics |= {
            # Not `returns`: with lam below 1 they contain the values, so even an untrained critic would score well.
            "explained_variance": explained_variance(
                batch.prev_values[used].numpy(), batch.rewards_to_go[used].numpy()
            ),
            "weights_version": float(max(versions)),
            "weights_version_min": float(min(versions)),
        }
    for name, (tensor, mask) in charted.items():
        mean = masked_mean(tensor, mask)
        metrics[f"{name}_mean"] = float(mean)
        metrics[f"{name}_std"] = float(masked_mean((tensor - mean) ** 2, mask).sqrt())
    return {f"train_rollouts/{name}": value for name, value in metrics.items()}


def sequence_kl(conversations: Sequence[Conversation]) -> float | None:
    """Return the mean KL per scored conversation: k1 summed over its sampled tokens, in nats.

    None if no conversation is scored, or a row has no log-probs under policy or reference.
    """
    sums = list[float]()
    for conversation in conversations:
        pairs = [(row.policy_logprobs, row.ref_logprobs, row.sampled) for row in conversation]
        if failure_of(conversation) or not any(row.sampled.any() for row in conversation):
            continue
        log_ratios = [(own - ref)[sampled] for own, ref, sampled in pairs if own is not None and ref is not None]
        if len(log_ratios) < len(pairs):
            return None
        sums.append(sum(float(log_ratio.sum()) for log_ratio in log_ratios))
    return float(np.mean(sums)) if sums else None


def text_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return metrics of training or validation conversations: lengths, rewards of the scored ones, diversity."""
    ends = [conversation[-1] for conversation in conversations]
    rows = rows_of(conversations)
    scored = scores_of(conversations)
    rewards = np.array([score.reward for score in scored] or [np.nan], np.float32)
    metrics = {
        "rollout_size": float(len(ends)),
        "response_lengths": _mean(len(end.tokens) for end in ends),
        "prompt_lengths": _mean(len(end.prompt.tokens) for end in ends),
        "generation_length": sum(int(row.sampled.sum()) for row in rows) / len(ends),
        "rewards": float(rewards.mean()),
        "rewards_std": float(rewards.std()),
        "fraction_of_samples_properly_ended": _mean(end.ended for end in ends),
        "distinct2": distinct_bigrams(rows),
    }
    if versions := [score.reward_version for score in scored if score.reward_version is not None]:
        metrics["reward_version"] = float(max(versions))
    metrics |= process_metrics(conversations) | _conversation_metrics(conversations) | _failure_metrics(conversations)
    for name, values in _components(ends).items():
        if finite := [value for value in values if np.isfinite(value)]:  # else the reward failed on every row
            metrics[f"reward_{name}"] = _mean(finite)
    return metrics


def _components(ends: Sequence[RolloutRow]) -> dict[str, list[float]]:
    """Return the values of each term of the reward, NaN where it or its request failed, or it does not apply."""
    names = dict.fromkeys(name for end in ends for name in end.score.components)
    return {name: [end.score.components.get(name, np.nan) for end in ends] for name in names}


def _failure_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return how many conversations, environments and terms of the reward failed."""
    ends = [conversation[-1] for conversation in conversations]
    metrics = {"masked_samples": float(len(ends) - len(scores_of(conversations)))}
    if ends[0].turns is not None:
        metrics["failed_environments"] = _mean(bool(end.error) for end in ends)
        metrics["restarted_environments"] = _mean(end.restarts for end in ends)
    for name, values in _components(ends).items():
        if missing := int((~np.isfinite(values)).sum()):
            metrics[f"reward_{name}_missing"] = float(missing)
    return metrics


def process_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the mean reward of a step and the number of steps per scored conversation; {} without process rewards."""
    scored = [conversation for conversation in conversations if not failure_of(conversation)]
    step_rewards = [row.score.steps[row.score.ends] for row in rows_of(scored) if row.score.steps is not None]
    if not step_rewards:
        return {}
    steps = np.concatenate(step_rewards)
    mean = float(steps.mean()) if len(steps) else float("nan")
    return {"process_rewards": mean, "steps_per_response": len(steps) / len(scored)}


def _conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of conversations with environments; {} without environments."""
    ends = [conversation[-1] for conversation in conversations]
    if ends[0].turns is None:
        return {}
    return {
        "turns": sum(len(row.turns or ()) for row in rows_of(conversations)) / len(ends),
        "truncated": _mean(bool(end.truncated) for end in ends),
    }


def distinct_bigrams(rows: Sequence[RolloutRow]) -> float:
    """Return the share of distinct bigrams among the sampled tokens; it drops early when the policy collapses."""
    base = max(int(row.tokens.max()) for row in rows) + 1
    pairs = np.concatenate(
        [(row.tokens[:-1] * base + row.tokens[1:])[row.sampled[:-1] & row.sampled[1:]] for row in rows]
    )
    return np.unique(pairs).size / max(1, pairs.size)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))
