"""The rollouts of a run: generated and scored one at a time, or one step ahead of the policy's update."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from actor.data.compute import InThread, cancelled
from actor.data.rollout import ScoredRollout
from actor.data.step_inputs import StepInputs
from actor.policy.policy import Policy
from actor.run.collection import collect
from actor.run.critic_updates import CriticUpdates
from actor.run.metrics import Timers
from actor.run.staleness import needed_update
from actor.scoring.reference import Reference
from actor.scoring.scorer import Scorer
from python_backend.config import ActorSection
from python_backend.monitoring.log_lines import set_log_position


@dataclass(frozen=True)
class Collected:
    """The scored rollout of one step."""

    scored: ScoredRollout
    timers: Timers
    updated: int  # last step whose update the sampling policy contains


class Rollouts:
    """Collects the rollout of each step; at most one is in progress."""

    def __init__(
        self,
        settings: ActorSection,
        inputs: StepInputs,
        policy: Policy,
        scorer: Scorer,
        reference: Reference,
        critic: CriticUpdates,
        *,
        publish_every: int,
        in_thread: InThread,
    ) -> None:
        self._settings, self.inputs, self._publish_every = settings, inputs, publish_every
        self._policy, self._scorer, self._reference, self._critic = policy, scorer, reference, critic
        self._in_thread = in_thread
        self._begun: asyncio.Task[Collected] | None = None

    async def begin(self, step: int, *, updated: int) -> asyncio.Task[Collected]:
        """Start the rollout of `step` with the current policy, which contains the updates up to step `updated`."""
        await self._in_thread(self._policy.renew_sampler)
        self._begun = asyncio.create_task(self.collect(step, updated=updated))
        return self._begun

    async def take(self, step: int) -> Collected:
        """Return the rollout of `step`, starting it now if it was not started in advance."""
        set_log_position(step=step)
        rollout = await (self._begun or await self.begin(step, updated=step - 1))
        self._begun = None
        return rollout

    async def collect(self, step: int, *, updated: int) -> Collected:
        """Generate and score the responses of `step`, with the policy as of step `updated`.

        Generation starts at once; scoring waits until the critic's weights satisfy `actor.max_staleness`.
        """
        settings, timers = self._settings, Timers(step)
        needed = needed_update(step, max_staleness=settings.max_staleness, every=self._publish_every)
        prompts = await self._in_thread(self.inputs.prompts_of, step)
        self._scorer.check_prompts(prompts)
        ready = asyncio.create_task(self._critic.served(needed))
        try:
            with timers.phase("rollout_time"):
                scored = await collect(
                    self._policy,
                    self._scorer,
                    self._reference,
                    prompts,
                    seed=self.inputs.seed_of(step),
                    ready=ready,
                    in_thread=self._in_thread,
                    timers=timers,
                    with_kl=settings.kl.measures(step),
                    with_logprobs=not settings.is_one_update,
                    group_size=settings.algorithm.responses_per_prompt,
                    importance_cap=settings.generation.vllm.importance_cap,
                )
        finally:
            await cancelled([ready])
        return Collected(scored, timers, updated)

    async def settle(self) -> None:
        """Wait until no rollout uses the sampler; if the rollout failed, `take` raises its error."""
        if self._begun is not None:
            await asyncio.wait([self._begun])

    async def cancel(self) -> None:
        """Cancel the rollout in progress, if any."""
        await cancelled([self._begun] if self._begun else [])
