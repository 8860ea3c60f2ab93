"""Collects a scored rollout, overlapping generation, scoring and log-probs."""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import subtract_mean
from rlhf_triton.actor.algorithms.batch import with_limits
from rlhf_triton.actor.data.compute import InThread
from rlhf_triton.actor.data.prompts import chances
from rlhf_triton.actor.data.rollout import Prompt, Rollout, ScoredRollout, join_rollouts, joined_logprobs
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.metrics import Timers
from rlhf_triton.actor.scoring.environment import scores_of_others
from rlhf_triton.actor.scoring.reference import Reference, only_known, with_one_version
from rlhf_triton.actor.scoring.scorer import Scorer, join_scores
from rlhf_triton.actor.scoring.stream import ScoringStream
from rlhf_triton.config import AlgorithmSection
from rlhf_triton.wire.contract import VersionRange


async def collect(
    policy: Policy,
    scorer: Scorer,
    reference: Reference,
    prompts: list[Prompt],
    *,
    seed: int,
    ready: asyncio.Future[VersionRange | None],
    in_thread: InThread,
    timers: Timers,
    greedy: bool = False,
    with_kl: bool = True,
    with_logprobs: bool = True,
    group_size: int = 1,
    old_logprobs: str = "recomputed",
) -> ScoredRollout:
    """Generate responses, score each one as soon as it has ended and `ready` is done, and return the scored rollout.

    A served reference also receives each row as soon as it ends; the policy's own log-probs are computed while requests
    are in flight. A row without reference log-probs counts as not scored.

    Args:
        ready: a future that completes when the critic's weights are new enough for scoring; its result is what the
            scoring requests demand of the critic. None: any version.
        with_kl: compute reference log-probs.
        with_logprobs: compute the policy's log-probs even without `with_kl`.
        old_logprobs: `sampler`: those of generation take the place of the policy's in probability ratios.
        group_size: number of consecutive prompts that are the same one, which form an advantage group; groupwise reward
            functions receive its responses together.

    Raises:
        NotFinite from generation, or the error of `ready`.
    """
    stream = ScoringStream(scorer, ready=ready, rows_per_request=scorer.rows_per_request, group_size=group_size)
    asked = reference.stream(in_thread) if with_kl else None

    def finished(index: int, row: Rollout) -> None:
        stream.take(index, row)
        if asked is not None:
            asked.take(index, row)

    try:
        with timers.phase("generate"):
            rollout = await in_thread(policy.generate, prompts, seed=seed, greedy=greedy, finished=finished)
        logprobs = start = None
        old = rollout.logprobs if old_logprobs == "sampler" else None
        if asked is not None or (with_logprobs and old is None):
            with timers.phase("logprobs"):
                logprobs = await in_thread(policy.sampled_logprobs, rollout)
        if asked is not None:
            with timers.phase("init_logprobs"):
                start = await asked.logprobs(rollout)
        if scorer.has_critic:
            with timers.phase("critic_wait"):
                await ready
        with timers.phase("score_wait"):
            scores = await stream.scores(rollout.tokens.shape[1])
            score = functools.partial(scorer.score, versions=await ready)
            scores = await with_one_version(score, rollout, scores, group_size=group_size)
        timers.note("scoring", *stream.span)
    finally:
        await asyncio.gather(*(each.close() for each in (stream, asked) if each is not None))
    if start is not None:
        scores = await in_thread(only_known, scores, start)
    scored = ScoredRollout(rollout, scores, logprobs, None if start is None else start.logprobs, old)
    if not rollout.others:
        return scored
    return await with_others(policy, scorer, reference, scored, versions=await ready, in_thread=in_thread)


async def with_others(
    policy: Policy,
    scorer: Scorer,
    reference: Reference,
    scored: ScoredRollout,
    *,
    versions: VersionRange | None,
    in_thread: InThread,
) -> ScoredRollout:
    """Return a scored rollout of conversations together with their other rows, scored likewise.

    A conversation counts as scored if all of its rows are.
    """
    rollout = join_rollouts(scored.rollout.others, policy.pad_id)
    assert rollout.owners is not None
    logprobs = start = values = None
    if scored.logprobs is not None:
        logprobs = await in_thread(policy.sampled_logprobs, rollout)
    if scored.ref_logprobs is not None:
        asked = reference.stream(in_thread)
        try:
            for index, row in enumerate(scored.rollout.others):
                asked.take(index, row)
            await asyncio.sleep(0)  # the rows are queued
            start = await asked.logprobs(rollout)
        finally:
            await asked.close()
    if scorer.has_critic:
        values = await scorer.values(rollout, versions)
    own, scores = scores_of_others(rollout, scored.scores, values, scorer.environment_weight)
    if start is not None:
        scores = await in_thread(only_known, scores, start)
    whole = own.scored.index_fill(0, rollout.owners[~scores.scored], value=False)
    own = replace(own, scored=whole, failures=sorted({*own.failures, *scores.failures}))
    old = rollout.logprobs if scored.old_logprobs is not None else None
    ref, scores = None if start is None else start.logprobs, replace(scores, scored=whole[rollout.owners])
    return replace(scored, scores=own, others=ScoredRollout(rollout, scores, logprobs, ref, old))


def join_scored(parts: Sequence[ScoredRollout], pad_id: int) -> ScoredRollout:
    """Concatenate scored rollouts, padded to the longest row; the others of all parts are joined, too."""
    joined, first, others = _joined(parts, pad_id), 0, list[ScoredRollout]()
    for part in parts:
        count = len(part.rollout.prompts)
        if part.others is not None and (found := part.others.of_owners({i: first + i for i in range(count)})):
            others.append(found)
        first += count
    return replace(joined, others=_joined(others, pad_id)) if others else joined


def all_rows(scored: ScoredRollout, dropped: Sequence[ScoredRollout], pad_id: int) -> ScoredRollout:
    """Return the rows of a rollout, its others behind them, and the dropped ones at the end, with the owner of each."""
    parts = [part for part in (scored, scored.others, *dropped) if part is not None]
    if len(parts) == 1:
        return scored
    whole, first = _joined(parts, pad_id), len(scored.rollout.prompts)
    if scored.others is None or (own := scored.others.rollout.owners) is None:
        return whole
    owners = torch.cat([torch.arange(first), own, torch.arange(first + len(own), len(whole.rollout.prompts))])
    return replace(whole, rollout=replace(whole.rollout, owners=owners))


def _joined(parts: Sequence[ScoredRollout], pad_id: int) -> ScoredRollout:
    rollout = join_rollouts([part.rollout for part in parts], pad_id)
    width = rollout.tokens.shape[1]
    return ScoredRollout(
        rollout,
        join_scores([part.scores for part in parts], width),
        joined_logprobs([part.logprobs for part in parts], width),
        joined_logprobs([part.ref_logprobs for part in parts], width),
        joined_logprobs([part.old_logprobs for part in parts], width),
    )


def by_spread(scored: ScoredRollout, settings: AlgorithmSection, truncated: str) -> tuple[ScoredRollout, ScoredRollout]:
    """Divide the rows into those of groups whose scores differ, and those of groups that give no gradient.

    Args:
        settings: consecutive `responses_per_prompt` rows are a group; with `mask_unfinished`, responses that did not
            end do not count.
        truncated: `environment.truncated`, of conversations that a limit has ended.

    Source: Yu et al. 2025 (arXiv 2503.14476), section 3.2.
    """
    differs = has_spread(scored, settings, truncated)
    rows = torch.arange(len(scored.scores.scored)).view(-1, settings.responses_per_prompt)
    return scored.select(rows[differs].flatten()), scored.select(rows[~differs].flatten())


def has_spread(scored: ScoredRollout, settings: AlgorithmSection, truncated: str) -> Tensor:
    """Return whether the scores of each group differ, bool `[groups]`; the arguments are those of `by_spread`."""
    scored, size = with_limits(scored, truncated, settings.gamma), settings.responses_per_prompt
    scores, groups = scored.scores, torch.arange(len(scored.scores.scored)) // size
    counted = scores.scored & scored.rollout.is_end if settings.mask_unfinished else scores.scored
    return (subtract_mean(scores.rewards, groups, counted) != 0).view(-1, size).any(-1)


def group_metrics(
    parts: Sequence[ScoredRollout], settings: AlgorithmSection, truncated: str, seen: tuple[float, float] | None
) -> dict[str, float]:
    """Return the share of the prompts of all parts whose responses differ in score, and how well the critic knew which.

    That is the AUC of its predictions: the probability that it gives a prompt with such responses a higher chance of
    them than one without.

    Args:
        settings, truncated: as of `by_spread`.
        seen: lowest and highest score so far; None: the critic is not asked about prompts.
    """
    size = settings.responses_per_prompt
    differs = torch.cat([has_spread(part, settings, truncated) for part in parts])
    metrics = {"train_rollouts/useful_prompts": float(differs.float().mean())}
    if seen and differs.any() and not differs.all():
        first = [part.scores.values.gather(1, part.rollout.prompt_lengths[:, None] - 1)[::size, 0] for part in parts]
        chance = torch.from_numpy(chances(torch.cat(first).numpy(), seen, size))
        gap = chance[differs][:, None] - chance[~differs]
        metrics["train_rollouts/prompt_auc"] = float((gap > 0).float().mean() + (gap == 0).float().mean() / 2)
    return metrics
