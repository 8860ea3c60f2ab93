"""Four scored responses of different lengths, and their training batch."""

from typing import Any

import torch

from rlhf_triton.actor.algorithms import batch as batches
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.rollout import PPOBatch, Prompt, Rollout, ScoredRollout, Scores
from tests.support.settings import actor_section

PROMPT_LENGTHS, LENGTHS, WIDTH = [2, 1, 3, 2], [5, 4, 6, 3], 6


def scored_rollout(*, scored: list[bool] | None = None, seed: int = 0) -> ScoredRollout:
    """Four rows of different lengths; row 1 did not end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 30, (4, WIDTH), generator=generator)
    prompts = [Prompt(str(i), "", tokens[i, :n].numpy()) for i, n in enumerate(PROMPT_LENGTHS)]
    is_end = torch.tensor([True, False, True, True])
    rollout = Rollout(prompts, tokens, torch.tensor(LENGTHS), torch.tensor(PROMPT_LENGTHS), is_end)
    ok = torch.tensor(scored or [True] * 4)
    rewards = torch.where(ok, torch.tensor([1.0, 2.0, -1.0, 0.5]), 0.0)
    values = torch.randn(4, WIDTH, generator=generator) * ok[:, None]
    scores = Scores(rewards, values, torch.where(ok, 7, -1), ok, [] if ok.all() else ["503"])
    logprobs = -torch.rand(2, 4, WIDTH - 1, generator=generator)
    return ScoredRollout(rollout, scores, logprobs[0], logprobs[1])


def method_of(**settings: Any) -> Method:
    actor = actor_section(**settings)
    return Method.of(actor.algorithm, actor.kl)


def make_batch(scored: ScoredRollout, *, num_dropped: int = 0, **settings: Any) -> PPOBatch:
    """The batch under these settings of the actor, of the bare scores."""
    actor = actor_section(**settings)
    return batches.make_batch(
        scored,
        method_of(**settings),
        RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens),
        kl_coef=actor.kl.coef,
        responses_per_prompt=actor.algorithm.responses_per_prompt,
        num_dropped=num_dropped,
    )
