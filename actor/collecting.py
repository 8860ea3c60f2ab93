"""A scored rollout: written, scored, and its log-probs taken, all at the same time where it can be.
Given: prompts, and when the critic may be asked. Returns: a `ScoredRollout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from actor.metrics import Timers
from actor.policy import Policy
from actor.rollout import Prompt, ScoredRollout
from actor.scoring import Scorer
from actor.streaming import ScoringStream

InThread = Callable[..., Awaitable[Any]]


async def collect(
    policy: Policy, scorer: Scorer, prompts: list[Prompt], *, seed: int, ready: asyncio.Future[Any],
    in_thread: InThread, timers: Timers, greedy: bool = False,
) -> ScoredRollout:  # fmt: skip
    """Write responses; each is scored as soon as it ends and `ready` is done, and the log-probs are taken meanwhile.

    Raises:
        RequestFailed, or what `ready` raises.
    """
    stream = ScoringStream(scorer, ready=ready, rows_per_request=policy.settings.client.rows_per_request)
    try:
        with timers.phase("generate"):
            rollout = await in_thread(policy.generate, prompts, seed=seed, greedy=greedy, finished=stream.take)
        with timers.phase("logprobs"):
            logprobs = await in_thread(policy.logprobs, rollout)
        with timers.phase("init_logprobs"):
            ref_logprobs = await in_thread(policy.logprobs, rollout, reference=True)
        with timers.phase("critic_wait"):
            await ready
        with timers.phase("score_wait"):
            scores = await stream.scores(rollout.tokens.shape[1])
        timers.note("scoring", *stream.span)
    finally:
        await stream.close()
    return ScoredRollout(rollout, scores, logprobs, ref_logprobs)
