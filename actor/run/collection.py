"""Collects scored groups: scores each response as soon as it ends, while others are still being generated.

Each group is a coroutine. Its responses wait for each other only if a reward function is groupwise.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from rlhf_triton.actor.algorithms.advantages import subtract_mean
from rlhf_triton.actor.algorithms.batch import apply_truncation
from rlhf_triton.actor.data.compute import MAX_CONCURRENT, InThread, cancel_all
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Conversation, Group, RolloutRow, conversations_of, failure_of, rows_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.metrics import Timers
from rlhf_triton.actor.scoring.reference import OwnReference, Reference, ServedReference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.config import ActorSection, AlgorithmSection
from rlhf_triton.wire.contract import VersionRange

T = TypeVar("T")
MAX_RESCORES = 3  # of a group; each one follows a swap during the scoring before, so more than one is rare


class Collector:
    """Generates responses to prompts, and scores each one as soon as it ends."""

    def __init__(
        self, settings: ActorSection, policy: Policy, scorer: Scorer, reference: Reference, in_thread: InThread
    ) -> None:
        self.policy = policy
        self.scorer = scorer
        self.in_thread = in_thread
        self._reference = reference if settings.kl.uses_reference else None
        self._old_logprobs = settings.algorithm.old_logprobs

    async def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        timers: Timers,
        ready: asyncio.Future[VersionRange | None] | None = None,
        group_size: int = 1,
        with_logprobs: bool = False,
        greedy: bool = False,
    ) -> list[Group]:
        """Generate responses, score each one once it has ended and `ready` is done, and return the scored groups.

        A served reference also receives each row as soon as it ends; the policy's own log-probs are computed while
        requests are in flight. A row without reference log-probs counts as unscored.

        Args:
            ready: a future that completes when the critic's weights are new enough for scoring; its result is the
                range of critic versions that scoring requests demand, None for any. Default: ready, any version.
            group_size: number of consecutive equal prompts that form an advantage group; groupwise reward functions
                receive the responses of a group together.
            with_logprobs: compute the policy's log-probs even without a KL, unless the sampler's log-probs replace them
                in probability ratios.

        Raises:
            NotFinite from generation, or the error of `ready`.
        """
        loop, is_over = asyncio.get_running_loop(), False
        if ready is None:
            ready = loop.create_future()
            ready.set_result(None)
        ended: list[asyncio.Future[Conversation]] = [loop.create_future() for _ in prompts]
        served = self._reference if isinstance(self._reference, ServedReference) else None
        scoring = GroupScoring(self.scorer, served, ready, group_size=group_size)
        groups = [
            asyncio.create_task(scoring.score_group(ended[first : first + group_size]))
            for first in range(0, len(prompts), group_size)
        ]

        def finished(index: int, conversation: Conversation) -> None:
            if is_over:
                raise asyncio.CancelledError  # so that generation stops
            loop.call_soon_threadsafe(_resolve, ended[index], conversation)

        try:
            with timers.phase("generate"):
                generated = self.in_thread(self.policy.generate, prompts, seed=seed, greedy=greedy, finished=finished)
                rows = rows_of(await generated)
            has_old = self._old_logprobs == "sampler" and all(row.logprobs is not None for row in rows)
            if self._reference is not None or (with_logprobs and not has_old):
                with timers.phase("logprobs"):
                    logprobs = await self.in_thread(self.policy.sampled_logprobs, rows)
                rows = [
                    replace(row, policy_logprobs=row_logprobs) for row, row_logprobs in zip(rows, logprobs, strict=True)
                ]
            if isinstance(self._reference, OwnReference):
                with timers.phase("init_logprobs"):
                    rows = await self.in_thread(self._reference.add_logprobs, rows)
            if self.scorer.has_critic:
                with timers.phase("critic_wait"):
                    await ready
            with timers.phase("score_wait"):
                scored_groups = await asyncio.gather(*groups)
            for name, span in scoring.spans.items():
                timers.add_span(name, *span)
        finally:
            is_over = True
            await cancel_all([*groups, *scoring.requests])
        next_rows = iter(rows)
        return [
            Group(tuple(tuple(map(_with_logprobs, conversation, next_rows)) for conversation in group))
            for group in scored_groups
        ]


def _with_logprobs(scored: RolloutRow, row: RolloutRow) -> RolloutRow:
    ref = row.ref_logprobs if scored.ref_logprobs is None else scored.ref_logprobs
    return replace(scored, policy_logprobs=row.policy_logprobs, ref_logprobs=ref)


def _resolve(future: asyncio.Future[Conversation], conversation: Conversation) -> None:
    if not future.done():
        future.set_result(conversation)


class GroupScoring:
    """Scores groups while other responses are generated. Create it on the event loop."""

    def __init__(
        self,
        scorer: Scorer,
        reference: ServedReference | None,
        ready: asyncio.Future[VersionRange | None],
        *,
        group_size: int,
    ) -> None:
        """`ready`, `group_size`: as in `Collector.collect`."""
        self._scorer = scorer
        self._reference = reference
        self._ready = ready
        self._unit_size = group_size if scorer.reward.groupwise else 1
        self._starting = asyncio.Semaphore(MAX_CONCURRENT)  # thousands of rows may be ready at once
        self.requests = set[asyncio.Task[Any]]()
        self.spans: dict[str, tuple[float, float]] = {}
        """By phase, `scoring` or `init_logprobs`: `time.monotonic` of its first request and its last response."""

    async def score_group(self, ended: Sequence[asyncio.Future[Conversation]]) -> list[Conversation]:
        """Wait for the conversations of a group to end; return them scored by one version of the reward model."""
        units = [ended[i : i + self._unit_size] for i in range(0, len(ended), self._unit_size)]
        scored = await asyncio.gather(*map(self._score_unit, units))
        return await self._with_one_version([*itertools.chain(*scored)])

    async def _score_unit(self, ended: Sequence[asyncio.Future[Conversation]]) -> list[Conversation]:
        """Wait until the conversations of one scoring request have ended, and return them scored."""
        conversations = await asyncio.gather(*ended)
        scores = self._start_request(self._score(conversations))
        if self._reference is None:
            return await scores
        logprobs = self._start_request(self._reference_logprobs(self._reference, rows_of(conversations)))
        scored, ref_logprobs = await asyncio.gather(scores, logprobs)
        remaining = iter(ref_logprobs)
        return [tuple(_with_reference(row, next(remaining)) for row in conversation) for conversation in scored]

    def _start_request(self, request: Coroutine[Any, Any, list[T]]) -> asyncio.Task[list[T]]:
        task = asyncio.create_task(request)
        self.requests.add(task)
        return task

    async def _score(self, conversations: list[Conversation]) -> list[Conversation]:
        versions = await asyncio.shield(self._ready)  # cancelling one request must not cancel `ready`
        async with self._request("scoring"):
            return await self._scorer.score(conversations, self._unit_size, versions=versions)

    async def _reference_logprobs(
        self, reference: ServedReference, rows: Sequence[RolloutRow]
    ) -> list[np.ndarray | str]:
        async with self._request("init_logprobs"):
            return await reference.request_logprobs(rows)

    @contextlib.asynccontextmanager
    async def _request(self, name: str) -> AsyncIterator[None]:
        """Let the event loop handle responses and signals, then record the span of the request in the block."""
        async with self._starting:
            await asyncio.sleep(0)
        start = time.monotonic()
        yield
        self.spans[name] = min(self.spans.get(name, (start, 0.0))[0], start), time.monotonic()

    async def _with_one_version(self, conversations: list[Conversation]) -> list[Conversation]:
        """Score the conversations again until one version of a live reward model has scored all; return them.

        If the versions still differ after `MAX_RESCORES`, because the server keeps swapping or the servers disagree,
        conversations scored by an older version count as unscored.
        """
        for _ in range(MAX_RESCORES):
            if len(_versions(conversations)) < 2:
                return conversations
            again = await self._scorer.score(conversations, self._unit_size, versions=self._ready.result())
            conversations = [tuple(map(_with_new_reward, *pair)) for pair in zip(conversations, again, strict=True)]
        failure = (
            f"the reward model's version changed more than {MAX_RESCORES} times while the rows of a group were scored"
        )
        newest = max(_versions(conversations), default=-1)
        return [
            tuple(row.with_score(failure=row.score.failure or failure) for row in conversation)
            if conversation[-1].score.reward_version != newest
            else conversation
            for conversation in conversations
        ]


def _versions(conversations: Sequence[Conversation]) -> set[int]:
    """Return the versions of a live reward model that scored the conversations; empty for any other reward."""
    versions = (conversation[-1].score.reward_version for conversation in conversations if not failure_of(conversation))
    return {version for version in versions if version is not None}


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
    """Return whether the scores of a group differ, so that the group contributes a gradient.

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
    rewards = torch.tensor([end.score.reward for end in ends])
    groups = torch.zeros(len(limited), dtype=torch.int64)
    return bool((subtract_mean(rewards, groups, torch.tensor(counted)) != 0).any())


def num_sampled_tokens(groups: Sequence[Group]) -> int:
    """Return the number of tokens in the groups that the policy sampled."""
    return sum(int(row.sampled.sum()) for row in rows_of(conversations_of(groups)))
