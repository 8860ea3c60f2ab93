"""Collects scored groups: scores each response as soon as it ends, while others are still being generated.

Each group is a coroutine. Its responses wait for each other only if a reward function is groupwise.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from rlhf_triton.actor.algorithms.baselines import subtract_mean
from rlhf_triton.actor.algorithms.batch import apply_truncation
from rlhf_triton.actor.data.compute import MAX_CONCURRENT, ComputeThread, cancel_all
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import (
    Conversation,
    Group,
    RolloutRow,
    conversations_of,
    failure_of,
    rows_of,
    scores_of,
)
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.sampling import PolicySampling
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.actor.scoring.reference import ServedReference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.config.actor import ActorSection, AlgorithmSection
from rlhf_triton.wire.contract import VersionRange

T = TypeVar("T")
MAX_RESCORES = 3  # per group; a swap during scoring causes one, so more than one is rare


class Collector:
    """Generates responses to prompts, and scores each one as soon as it ends."""

    def __init__(
        self,
        settings: ActorSection,
        policy: Policy,
        scorer: Scorer,
        reference: ServedReference | None,
        in_thread: ComputeThread,
    ) -> None:
        """`reference`: None if the policy has the reference, or there is none."""
        self.policy = policy
        self.scorer = scorer
        self.in_thread = in_thread
        self.sampling = PolicySampling(policy, in_thread)
        self._uses_reference = settings.kl.uses_reference
        self._served_reference = reference if settings.kl.uses_reference else None
        # Otherwise the update computes old log-probs itself, or takes the sampler's.
        self._computes_old = settings.algorithm.old_logprobs == "recomputed" and not settings.max_off_policy_steps
        self._starting = asyncio.Semaphore(MAX_CONCURRENT)  # requests; thousands of rows may be ready at once

    def start(
        self, prompts: Mapping[int, Prompt], *, seed: int, group_size: int = 1, greedy: bool = False
    ) -> list[GroupInFlight]:
        """Start to respond to prompts, and to score each response once it has ended and its group's `versions` are set.

        Args:
            prompts: by index, see `SamplingJob`.
            group_size: number of consecutive equal prompts that form an advantage group; groupwise reward functions
                receive the responses of a group together.
        """
        ended = self.sampling.start(prompts, seed=seed, greedy=greedy)
        return [self._in_flight(ended[i : i + group_size]) for i in range(0, len(ended), group_size)]

    def start_sampled(self, conversations: Sequence[Conversation]) -> GroupInFlight:
        """Start to score a group that has been sampled."""
        ended = [asyncio.get_running_loop().create_future() for _ in conversations]
        for future, conversation in zip(ended, conversations, strict=True):
            future.set_result(conversation)
        return self._in_flight(ended)

    def _in_flight(self, ended: Sequence[asyncio.Future[Conversation]]) -> GroupInFlight:
        return GroupInFlight(self.scorer, self._served_reference, self._starting, ended)

    async def complete(
        self, groups: Sequence[GroupInFlight], *, timers: Timers, with_logprobs: bool = False
    ) -> list[Group]:
        """Wait until the groups are generated and scored; return them.

        A served reference also receives each row as soon as it ends; the policy's own log-probs are computed while
        requests are in flight. A row without reference log-probs counts as unscored.

        Args:
            with_logprobs: compute the policy's log-probs even without a KL, unless the sampler's log-probs replace them
                in probability ratios.

        Raises:
            NotFinite from generation, or the error of `GroupInFlight.versions`.
        """
        try:
            with timers.phase("generate"):
                rows = rows_of(await asyncio.gather(*(future for group in groups for future in group.ended)))
            has_old = not self._computes_old and all(row.logprobs is not None for row in rows)
            if self._uses_reference or (with_logprobs and not has_old):
                with timers.phase("logprobs"):
                    logprobs = await self.in_thread(self.policy.sampled_logprobs, rows)
                rows = [replace(row, policy_logprobs=each) for row, each in zip(rows, logprobs, strict=True)]
            if self._uses_reference and self._served_reference is None:
                with timers.phase("init_logprobs"):
                    logprobs = await self.in_thread(self.policy.logprobs, rows, reference=True)
                rows = [replace(row, ref_logprobs=each) for row, each in zip(rows, logprobs, strict=True)]
            if self.scorer.has_critic:
                with timers.phase("critic_wait"):
                    await asyncio.gather(*(group.versions for group in groups))
            with timers.phase("score_wait"):
                scored_groups = await asyncio.gather(*(group.scored for group in groups))
        finally:
            for group in groups:
                await group.cancel()
        for name in {name for group in groups for name in group.spans}:
            spans = [group.spans[name] for group in groups if name in group.spans]
            timers.add_span(name, min(start for start, _ in spans), max(end for _, end in spans))
        next_rows = iter(rows)
        return [
            Group(tuple(tuple(map(_with_logprobs, conversation, next_rows)) for conversation in group))
            for group in scored_groups
        ]

    async def collect(
        self, prompts: Sequence[Prompt], *, seed: int, timers: Timers, greedy: bool = False
    ) -> list[Group]:
        """Generate and score one response to each prompt, with any version of the critic."""
        groups = self.start(dict(enumerate(prompts)), seed=seed, greedy=greedy)
        for group in groups:
            group.versions.set_result(None)
        return await self.complete(groups, timers=timers)


def _with_logprobs(scored: RolloutRow, row: RolloutRow) -> RolloutRow:
    ref = row.ref_logprobs if scored.ref_logprobs is None else scored.ref_logprobs
    return replace(scored, policy_logprobs=row.policy_logprobs, ref_logprobs=ref)


class GroupInFlight:
    """A group whose responses are being sampled or scored. Create it on the event loop."""

    def __init__(
        self,
        scorer: Scorer,
        reference: ServedReference | None,
        starting: asyncio.Semaphore,
        ended: Sequence[asyncio.Future[Conversation]],
    ) -> None:
        """
        Args:
            starting: limits the requests that start at the same time.
            ended: each completes when a conversation of the group has ended.
        """
        self.ended = ended
        self.versions: asyncio.Future[VersionRange | None] = asyncio.get_running_loop().create_future()
        """When it completes, scoring starts and demands these versions of the critic; None: any."""
        self.spans: dict[str, tuple[float, float]] = {}
        """By phase, `scoring` or `init_logprobs`: `time.monotonic` of its first request and its last response."""
        self._scorer = scorer
        self._reference = reference
        self._starting = starting
        self._requests = set[asyncio.Task[Any]]()
        self.scored = asyncio.create_task(self._score_group())

    async def cancel(self) -> None:
        """Stop scoring."""
        await cancel_all([self.scored, *self._requests])

    async def _score_group(self) -> list[Conversation]:
        """Wait for the conversations of the group to end; return them scored by one version of the reward model."""
        units = [self.ended] if self._scorer.reward.groupwise else [[conversation] for conversation in self.ended]
        scored = await asyncio.gather(*map(self._score_unit, units))
        return await self._with_one_version([*itertools.chain(*scored)])

    async def _score_unit(self, ended: Sequence[asyncio.Future[Conversation]]) -> list[Conversation]:
        """Wait until the conversations of one scoring request have ended, and return them scored."""
        conversations = await asyncio.gather(*ended)
        scores = self._start_request(self._score(conversations))
        if self._reference is None:
            return await scores
        request = functools.partial(self._reference.request_logprobs, rows_of(conversations))
        logprobs = self._start_request(self._timed("init_logprobs", request))
        scored, ref_logprobs = await asyncio.gather(scores, logprobs)
        remaining = iter(ref_logprobs)
        return [tuple(_with_reference(row, next(remaining)) for row in conversation) for conversation in scored]

    def _start_request(self, request: Coroutine[Any, Any, list[T]]) -> asyncio.Task[list[T]]:
        task = asyncio.create_task(request)
        self._requests.add(task)
        return task

    async def _score(self, conversations: list[Conversation]) -> list[Conversation]:
        versions = await asyncio.shield(self.versions)  # cancelling one request must not cancel the future
        score = functools.partial(self._scorer.score, conversations, versions=versions)
        return await self._timed("scoring", score)

    async def _timed(self, name: str, request: Callable[[], Awaitable[T]]) -> T:
        """Let the event loop handle responses and signals, then send the request; record its span."""
        async with self._starting:
            await asyncio.sleep(0)
        start = time.monotonic()
        result = await request()
        self.spans[name] = min(self.spans.get(name, (start, 0.0))[0], start), time.monotonic()
        return result

    async def _with_one_version(self, conversations: list[Conversation]) -> list[Conversation]:
        """Score the conversations again until one version of a live reward model has scored all; return them.

        If the versions still differ after `MAX_RESCORES`, because the server keeps swapping or the servers disagree,
        conversations scored by an older version count as unscored.
        """
        for _ in range(MAX_RESCORES):
            if len(_reward_versions(conversations)) < 2:
                return conversations
            again = await self._scorer.score(conversations, versions=self.versions.result())
            conversations = [tuple(map(_with_new_reward, *pair)) for pair in zip(conversations, again, strict=True)]
        failure = (
            f"the reward model's version changed more than {MAX_RESCORES} times while the rows of a group were scored"
        )
        newest = max(_reward_versions(conversations), default=-1)
        return [
            tuple(row.with_score(failure=row.score.failure or failure) for row in conversation)
            if conversation[-1].score.reward_version != newest
            else conversation
            for conversation in conversations
        ]


def _reward_versions(conversations: Sequence[Conversation]) -> set[int]:
    """Return the versions of a live reward model that scored the conversations; empty for any other reward."""
    return {score.reward_version for score in scores_of(conversations) if score.reward_version is not None}


def _with_new_reward(row: RolloutRow, again: RolloutRow) -> RolloutRow:
    """Return `row` with the rewards of `again`; it keeps its own values."""
    old = row.score
    failure = old.failure or again.score.failure
    return replace(row, score=replace(again.score, values=old.values, version=old.version, failure=failure))


def _with_reference(row: RolloutRow, logprobs: np.ndarray | str) -> RolloutRow:
    if isinstance(logprobs, str):
        return row.with_score(failure=row.score.failure or logprobs)
    return replace(row, ref_logprobs=logprobs)


def has_spread(group: Group, settings: AlgorithmSection, truncated: str) -> bool:
    """Return whether the scores of a group, or its process rewards, differ, so that the group contributes a gradient.

    Args:
        settings: with `mask_unfinished`, responses that did not end do not count.
        truncated: `environment.truncated`, see `make_batch`.

    Source: Yu et al. 2025 (arXiv 2503.14476), section 3.2.
    """
    limited = [apply_truncation(conversation, truncated) for conversation in group.conversations]
    ends = [conversation[-1] for conversation in limited]
    counted = [
        not failure_of(conversation) and (end.ended or not settings.mask_unfinished)
        for conversation, end in zip(limited, ends, strict=True)
    ]
    parts = [_compared_rewards(end) for end in ends]
    totals = [(sum(rewards), is_counted) for rewards, is_counted in zip(parts, counted, strict=True)]
    steps = [(reward, is_counted) for rewards, is_counted in zip(parts, counted, strict=True) for reward in rewards]
    return _differ(totals) or _differ(steps)


def _compared_rewards(end: RolloutRow) -> list[float]:
    """Return a response's reward; with process rewards, each step's, the last one with the rest of the reward.

    Algorithms with groups compare conversations with environments by their total rewards alone.
    """
    score = end.score
    if score.steps is None or score.ends is None or end.turns is not None or not score.ends.any():
        return [score.reward]
    rewards: list[float] = score.steps[score.ends].tolist()
    rewards[-1] += score.outcome
    return rewards


def _differ(rewards: Sequence[tuple[float, bool]]) -> bool:
    """Return whether the rewards that count differ by more than rounding; each comes with whether it counts."""
    values, counted = map(torch.tensor, zip(*rewards, strict=True))
    return bool((subtract_mean(values, torch.zeros(len(values), dtype=torch.int64), counted) != 0).any())


def num_sampled_tokens(groups: Sequence[Group]) -> int:
    """Return the number of tokens in the groups that the policy sampled."""
    return sum(int(row.sampled.sum()) for row in rows_of(conversations_of(groups)))
