"""Samples that no model has generated, and the training batch of four scored ones."""

from dataclasses import replace

import numpy as np
import torch
from settings import actor_section

from rlhf_triton.actor.algorithms import batch as batches
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import UNSCORED, Group, RolloutRow, Score, padded

FAILED = Score(failure="503")
PROMPT_LENGTHS = [2, 1, 3, 2]
LENGTHS = [5, 4, 6, 3]
WIDTH = 6


def a_sample(tokens, prompt=1, *, ended=True, name="", score=UNSCORED, **more):
    """A response to the first `prompt` of these tokens."""
    row = np.asarray(tokens, np.int64)
    asked = Prompt(name, "", row[:prompt])
    return replace(
        RolloutRow(prompt=asked, tokens=row, sampled=np.arange(len(row)) >= prompt, ended=ended, score=score), **more
    )


def rewarded(reward, **more):
    """The score of a response without process rewards."""
    return Score(reward=reward, outcome=reward, **more)


def groups_of(rows, size=1):
    """Groups of `size` conversations each; a sample is a conversation of one row."""
    found = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [Group(tuple(found[i : i + size])) for i in range(0, len(found), size)]


def scored_samples(*, scored=(True,) * 4):
    """Four rows of different lengths; row 1 did not end."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 30, (4, WIDTH), generator=generator).numpy()
    values = torch.randn(4, WIDTH, generator=generator).numpy()
    logprobs = -torch.rand(2, 4, WIDTH, generator=generator).numpy()
    rows = []
    for i, (start, end) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        row = a_sample(tokens[i, :end], start, ended=i != 1, name=str(i))
        own, ref = (np.where(row.sampled, each[i, :end], 0).astype(np.float32) for each in logprobs)
        score = rewarded([1.0, 2.0, -1.0, 0.5][i], values=values[i, :end], version=7)
        rows.append(replace(row, policy_logprobs=own, ref_logprobs=ref, score=score if scored[i] else FAILED))
    return rows


def tokens_of(rows):
    """The tokens of samples, padded, int64 [B, S]."""
    return padded([row.tokens for row in rows])


def logprobs_of(policy, rows, **more):
    """The policy's log-probs of samples by position, [B, S-1]."""
    return padded(policy.logprobs(rows, **more))[:, 1:]


def method_of(*, whitens=True, **settings):
    """The algorithm under these settings of the actor; `whitens`: leave that to the algorithm."""
    actor = actor_section(**settings)
    method = Method.from_settings(actor.algorithm, actor.kl)
    return method if whitens else replace(method, whitens=False)


def advantage_inputs(rewards, groups, mask, **more):
    """Return inputs with these rewards [N] and mask [N, S-1]; by default all responses have ended and count."""
    zeros = torch.zeros_like(mask)
    yes = torch.ones(len(mask), dtype=torch.bool)
    usual = {"penalty": zeros, "values": zeros, "scored": yes, "ended": yes, "counted": yes}
    return AdvantageInputs(rewards=rewards, groups=groups, mask=mask, **{**usual, **more})


def make_batch(
    rows,
    *,
    num_dropped=0,
    truncated="score",
    whitens=True,
    **settings,
):
    """The batch under these settings of the actor."""
    actor = actor_section(**settings)
    return batches.make_batch(
        groups_of(rows, actor.algorithm.responses_per_prompt),
        method_of(whitens=whitens, **settings),
        RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens),
        kl_coef=actor.kl.coef,
        truncated=truncated,
        num_dropped=num_dropped,
    )
