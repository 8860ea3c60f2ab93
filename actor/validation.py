"""Held-out prompts, sampled with the same seeds before and after, scored through the server.
Given: policy, scorer, prompts. Returns: rewards, KL, texts, and how well the served critic explains the returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from actor.advantages import explained_variance, response_mask
from actor.experience import score_returns
from actor.policy import Policy, join_rollouts
from actor.reference import OwnReference, ServedReference, only_known
from actor.rollout import Prompt, Rollout, Scores
from actor.scoring import Scorer, join_scores

SEED_OFFSET = 1_000_000  # apart from the seeds of the training rollouts


@dataclass(frozen=True)
class Validation:
    """One pass over the held-out prompts."""

    rollout: Rollout
    scores: Scores
    kl: float  # nats per sequence against the reference, k1
    explained_variance: float | None  # of the score's Monte-Carlo returns, by the critic version that served

    @property
    def reward(self) -> float:
        """Mean reward of the scored rows."""
        return float(self.scores.rewards[self.scores.scored].mean())


async def validate(
    policy: Policy, scorer: Scorer, reference: OwnReference | ServedReference, prompts: list[Prompt], *, batch: int,
    seed: int, greedy: bool = False, in_thread: Callable[..., Any],
) -> Validation:  # fmt: skip
    """Sample one response per prompt, or take the likeliest, and score it; batch i draws from seed + i."""
    rollouts, tasks, asked = [], [], []
    for i in range(0, len(prompts), batch):
        part = prompts[i : i + batch]
        rollout = await in_thread(policy.generate, part, seed=seed + SEED_OFFSET + i, greedy=greedy)
        rollouts.append(rollout)
        tasks.append(asyncio.create_task(scorer.score(rollout)))
        asked.append(reference.ask(rollout))
    whole = join_rollouts(rollouts, policy.pad_id)
    logprobs = await in_thread(policy.logprobs, whole)
    start = await reference.logprobs(whole, asked)
    scores = only_known(join_scores(await asyncio.gather(*tasks), whole.tokens.shape[1]), start)
    mask = response_mask(whole.prompt_lengths, whole.lengths, whole.tokens.shape[1])
    kl = float(torch.where(mask > 0, logprobs - start.logprobs, 0.0).sum(-1)[start.known].mean())
    return Validation(whole, scores, kl, explained(whole, scores.rewards, scores) if scores.has_values else None)


def explained(rollout: Rollout, rewards: torch.Tensor, scores: Scores) -> float:
    """Share of the returns' variance that the values explain, over scored rows."""
    returns, mask = score_returns(rewards, rollout)
    mask = mask * scores.scored[:, None]
    return float(explained_variance(scores.values[:, :-1], returns, mask))


def samples(validation: Validation, when: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Lines for samples.jsonl."""
    lines = []
    rollout = validation.rollout
    for i, (prompt, row) in enumerate(zip(rollout.prompts, rollout.rows(), strict=True)):
        response = tokenizer.decode(row[prompt.tokens.size :].tolist(), skip_special_tokens=True)
        lines.append(
            {
                "prompt_id": prompt.prompt_id,
                "when": when,
                "prompt": prompt.text,
                "response": response,
                "reward": float(validation.scores.rewards[i]) if validation.scores.scored[i] else None,
                "ended": bool(rollout.is_end[i]),
            }
        )
    return lines
