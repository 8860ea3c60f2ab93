"""Builds the training batch for policy and critic from a scored rollout."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import explained_variance, masked_mean, masked_whiten
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.actor.algorithms.losses import kl_estimate
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.reinforce_plus_plus import advantage as returns_to_go
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.rollout import PPOBatch, Rollout, ScoredRollout, Scores
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS


def make_batch(
    scored: ScoredRollout,
    method: Method,
    shaper: RewardShaper,
    *,
    kl_coef: float,
    responses_per_prompt: int = 1,
    num_dropped: int = 0,
) -> PPOBatch:
    """Return the training batch of a rollout, with advantages and returns; rows without a score are masked out.

    Within a group, conversations are compared, whatever their number of rows: rows with other `owners` than themselves
    have the advantage of these, if the algorithm needs groups, and share the weight of the conversation.

    Args:
        kl_coef: KL coefficient of this step.
        responses_per_prompt: number of consecutive rows that share a prompt.
        num_dropped: rows at the end that only the critic learns from.
    """
    rollout, scores, process = scored.rollout, scored.scores, scored.scores.process
    mask = rollout.mask * scores.scored[:, None]
    if rollout.trajectories is not None and method.settings.defaults.needs_groups:
        process = None  # total rewards are compared within groups
    kl = _token_kl(scored, mask, method)
    owner, is_other = _owners(rollout)
    learned = scores.scored & (torch.arange(len(mask)) < len(mask) - num_dropped)
    if method.settings.mask_unfinished:
        learned &= rollout.is_end
    in_groups, penalty = method.settings.defaults.needs_groups, torch.zeros_like(mask)
    if kl is not None and not method.kl_in_loss:
        penalty = kl_coef * kl
    rewards = scores.rewards if process is None else process.outcome
    if in_groups:  # they are compared by totals
        rewards = rewards.index_add(0, owner[is_other], -(penalty * mask)[is_other].sum(-1).to(rewards))
    inputs = AdvantageInputs(
        rewards,
        penalty,
        torch.where(mask > 0, scores.values[:, :-1], 0.0),
        mask,
        rollout.lengths,
        owner // responses_per_prompt,
        scores.scored & ~(is_other & in_groups),
        rollout.is_end,
        learned & ~is_other,
        method.settings.gamma,
        method.settings.lam,
        method.settings.lam_values,
        method.settings.lam_length,
        None if process is None else process.rewards[:, 1:],  # index t is given for token t, position t - 1
        None if process is None else process.ends[:, 1:],
    )
    inputs = shaper.run(inputs)
    advantages, returns = method.advantage(inputs)
    sampled = mask.sum(-1)
    if in_groups:  # then all tokens of a conversation have the same advantage
        each = (advantages * mask).sum(-1) / sampled.clamp(min=1)
        advantages = torch.where(is_other[:, None], each[owner, None] * mask, advantages)
    weights = learned_mask = mask * (learned & inputs.counted[owner])[:, None]
    if method.loss_mean == "sequence":
        weights = weights / torch.zeros_like(sampled).index_add(0, owner, sampled)[owner, None].clamp(min=1)
    return PPOBatch(
        rollout.tokens,
        rollout.lengths,
        mask,
        weights,
        scored.logprobs if scored.old_logprobs is None else scored.old_logprobs,
        scored.ref_logprobs,
        masked_whiten(advantages, learned_mask) if method.whitens else advantages * learned_mask,
        returns * mask,
        inputs.values,
        kl,
        returns_to_go(inputs)[1] if scores.has_values else None,
        groups=inputs.groups,
        versions=scores.versions,
        positive=scores.rewards > 0 if method.settings.positive_nll else None,
        sampled_logprobs=scored.logprobs if rollout.logprobs is None else rollout.logprobs,
    )


def _owners(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return the row whose conversation each row belongs to, int64 `[B]`, and whether that is another one."""
    own = torch.arange(len(rollout.lengths))
    owner = own if rollout.owners is None else rollout.owners
    return owner, owner != own


def with_limits(scored: ScoredRollout, treatment: str, gamma: float) -> ScoredRollout:
    """Return the rollout with `environment.truncated` applied to the conversations that a limit has ended.

    `mask` leaves them out, even if none remains, `bootstrap` adds the discounted value of their last token to the
    reward of their last turn, and `score` takes them as they are.
    """
    rollout, scores = scored.rollout, scored.scores
    limits = [trajectory.truncated for trajectory in rollout.trajectories or ()]
    is_over = torch.tensor([not limit for limit in limits])
    if not any(limits):
        return scored
    if treatment == "mask":
        return replace(scored, scores=replace(scores, scored=scores.scored & is_over))
    if treatment == "bootstrap":
        assert scores.process is not None
        rewards, owner = scores.process.rewards.clone(), _owners(rollout)[0]
        ends = scores.values[owner, rollout.lengths[owner] - 1]  # of the conversations
        for row, trajectory in enumerate(rollout.trajectories or ()):
            if trajectory.truncated and trajectory.turns:
                rewards[row, trajectory.turns[-1].end - 1] += gamma * ends[row]
        scores = replace(scores, process=replace(scores.process, rewards=rewards))
    return replace(scored, rollout=replace(rollout, is_end=rollout.is_end | ~is_over), scores=scores)


def _token_kl(scored: ScoredRollout, mask: Tensor, method: Method) -> Tensor | None:
    """Return KL estimates `[B, S-1]`, or None without reference log-probs."""
    if scored.logprobs is None or scored.ref_logprobs is None:
        return None
    # Outside the mask log-probs may be -inf (banned tokens in a prompt), which would make the KL non-finite.
    return torch.where(mask > 0, kl_estimate(scored.logprobs, scored.ref_logprobs, method.kl_estimator), 0.0)


def critic_payload(batch: PPOBatch) -> dict[str, np.ndarray]:
    """Return the inputs of a critic_train request, packed as `TrainPayload`: the scored rows, without padding.

    A row may lack its score because the critic cannot take it, and the server refuses a payload that has such a row.
    The journal has an update of each step: if limits have ended all conversations, two tokens without targets are sent.
    """
    scored, lengths = batch.mask.any(-1), batch.lengths
    if not scored.any():
        scored, lengths = torch.arange(len(lengths)) == lengths.argmax(), lengths.clamp(max=2)
    ends = lengths[:, None] * scored[:, None]  # nothing of the other rows
    inside = torch.arange(batch.tokens.shape[1]) < ends
    targets = {RETURNS: batch.returns, PREV_VALUES: batch.prev_values, MASK: batch.mask}
    return {
        TOKENS: batch.tokens[inside][None].numpy(),
        SEQUENCE_LENGTHS: lengths[scored, None].numpy(),
        **{name: tensor[inside[:, 1:]][None].numpy() for name, tensor in targets.items()},
    }


class RewardsFailed(RlhfError):
    """Too many rewards of a rollout are unavailable."""


def failures(rollout: Rollout, scores: Scores) -> str:
    """Return how many rewards are unavailable, of which prompts, and why; "" if all are there."""
    failed = (~scores.scored).nonzero().flatten().tolist()
    if not failed:
        return ""
    prompts = [*dict.fromkeys(rollout.prompts[row].where or rollout.prompts[row].prompt_id for row in failed)]
    named = ", ".join(prompts[:3]) + (", …" if len(prompts) > 3 else "")
    causes = "; ".join(scores.failures[:3])
    return f"{len(failed)} of {len(scores.scored)} rewards are unavailable (prompts {named}): {causes}"


def check_failures(rollout: Rollout, scores: Scores, max_failed_fraction: float) -> None:
    """Raise RewardsFailed if more than `max_failed_fraction` of the rows, or all, have no score."""
    failed = int((~scores.scored).sum())
    if failed > max_failed_fraction * len(scores.scored) or failed == len(scores.scored):
        raise RewardsFailed(
            f"{failures(rollout, scores)}; at most actor.rewards.max_failed_fraction ({max_failed_fraction:g}) may be"
        )


def sequence_kl(whole: ScoredRollout, mask: Tensor) -> float | None:
    """Return the mean KL per sequence (summed k1, nats), of all rows of a conversation, over those in the mask.

    None if the mask is empty, or without reference log-probs.
    """
    if whole.logprobs is None or whole.ref_logprobs is None or not mask.any():
        return None
    return _mean_per_sequence(whole, torch.where(mask > 0, whole.logprobs - whole.ref_logprobs, 0.0), mask)


def _mean_per_sequence(whole: ScoredRollout, values: Tensor, mask: Tensor) -> float:
    """Return the mean over conversations of the sums of `[B, S-1]`, 0 outside the mask, in all of their rows."""
    owner, is_other = _owners(whole.rollout)
    sums = torch.zeros_like(values[:, 0]).index_add(0, owner, values.sum(-1))
    return float(sums[mask.any(-1) & ~is_other].mean())


def score_returns(scores: Scores, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return (returns, response mask), each `[B, S-1]`: undiscounted sums of the scores alone, without KL penalty."""
    mask = rollout.mask
    if scores.process is None:
        return scores.rewards[:, None] * mask, mask
    steps = (scores.process.rewards[:, 1:] * mask).flip(1).cumsum(1).flip(1)
    return (steps + scores.process.outcome[:, None]) * mask, mask


# Metrics of rollouts: the `train_rollouts/…` of a step, and those of a validation.


def rollout_metrics(
    scored: ScoredRollout, whole: ScoredRollout, batch: PPOBatch, *, kl_coef: float
) -> dict[str, float]:
    """Return the `train_rollouts/…` metrics of one step: means over scored rows or response tokens.

    `whole` and `batch` have the others of `scored` as well.
    """
    scores = scored.scores
    rewards = scores.rewards[scores.scored]
    others = () if scored.others is None else (scored.others.rollout,)
    metrics = {**text_metrics(replace(scored.rollout, others=others), scores), "kl_coef": kl_coef}
    distance = sequence_kl(whole, batch.mask)
    if batch.kl is not None and distance is not None:
        penalty = kl_coef * _mean_per_sequence(whole, batch.kl, batch.mask)
        metrics |= {
            "init_policy_kl": float(masked_mean(batch.kl, batch.mask)),
            "init_policy_kl_per_sequence": distance,
            "rewards_with_kl": float(rewards.mean()) - penalty,
        }
    ours, theirs = whole.logprobs, whole.rollout.logprobs
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
        "generation_length": sum(float(part.mask.sum()) for part in (rollout, *rollout.others)) / len(scores.scored),
        "rewards": float(rewards.mean()),
        "rewards_std": float(rewards.std(correction=0)),
        "fraction_of_samples_properly_ended": float(rollout.is_end.float().mean()),
        "masked_samples": float((~scores.scored).sum()),
        "distinct2": distinct_bigrams(rollout),
    }
    if scores.reward_version is not None:
        metrics["reward_version"] = float(scores.reward_version)
    metrics |= process_metrics(scores) | _conversation_metrics(rollout)
    for name, component in scores.components.items():
        finite = component[torch.isfinite(component)]
        if missing := len(component) - len(finite):  # it failed, or does not apply
            metrics[f"reward_{name}_missing"] = float(missing)
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


def _conversation_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the mean number of turns and the share of them that is trained as sampled, and the shares of conversations
    that a limit ended and that failed; empty without environments.
    """
    found = rollout.trajectories
    if found is None:
        return {}
    others = [each for part in rollout.others for each in part.trajectories or ()]
    return {
        "turns": sum(len(each.turns) for each in (*found, *others)) / len(found),
        "truncated": sum(bool(each.truncated) for each in found) / len(found),
        "exact_turns": rollout.exact_turns,
        "failed_environments": sum(bool(each.error) for each in found) / len(found),
        "restarted_environments": sum(each.restarts for each in found) / len(found),
    }


def distinct_bigrams(rollout: Rollout) -> float:
    """Return the share of distinct token bigrams in all responses; it drops early when the policy collapses."""
    tokens, mask = rollout.tokens, rollout.mask > 0
    is_pair = torch.nn.functional.pad(mask[:, :-1], (1, 0)) & mask
    pairs = (tokens[:, :-1] * (tokens.max() + 1) + tokens[:, 1:])[is_pair].numpy()
    return np.unique(pairs).size / max(1, pairs.size)
