"""The training loop: prompts -> generate -> score -> advantages -> critic training and policy update.

Scoring overlaps with generation; the critic trains and reloads while the policy is updated. Algorithms differ only in
their `Method`, an advantage function and a loss, and in whether there is a critic.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actor.algorithms.experience import check_failures, critic_payload, make_batch, sequence_kl
from actor.algorithms.kl_control import KLControl
from actor.algorithms.methods import Method
from actor.algorithms.shaping import RewardShaper
from actor.data.compute import in_a_thread_of
from actor.data.prompts import read_prompts, take
from actor.data.rollout import PPOBatch, Prompt, ScoredRollout
from actor.policy.checkpoint import RunState
from actor.policy.policy import Policy
from actor.policy.update import PolicyUpdate
from actor.run.collection import collect
from actor.run.metrics import Timers
from actor.run.recorder import Bookkeeper
from actor.run.staleness import needed_update
from actor.run.stopping import RESUMES, Stop, Stopped, end_forwards
from actor.run.validation import validate
from actor.scoring.client import TritonClient
from actor.scoring.reference import make_reference
from actor.scoring.retry import ServerFailed
from actor.scoring.scorer import Scorer
from python_backend.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """The scored rollout of one step."""

    scored: ScoredRollout
    timers: Timers
    updated: int  # last step whose update the sampling policy contains


class PPORun:
    """One run of the actor."""

    def __init__(self, config: RunConfig, client: TritonClient) -> None:
        self.settings, self.run_id, self.seed = config.actor, config.run.identity, config.run.seed
        self.client = client
        self.method = Method.of(self.settings.algorithm, self.settings.kl)
        self.has_critic = self.settings.algorithm.uses_critic
        torch.manual_seed(self.seed)  # LoRA adapters are initialised randomly
        self.policy = Policy.of(self.settings)
        self.policy_update = PolicyUpdate.of(self.settings, self.policy, self.method)
        self.shaper = RewardShaper(self.settings.rewards, max_new_tokens=self.settings.generation.max_new_tokens)
        self.kl = KLControl(self.settings.kl.coef, target=self.settings.kl.target, horizon=self.settings.kl.horizon)
        self.scorer = Scorer(
            client, self.policy.tokenizer, rows_per_request=self.settings.client.rows_per_request,
            with_critic=self.has_critic,
        )  # fmt: skip
        self.reference = make_reference(config, client, self.policy)
        limits: dict[str, Any] = {
            "max_tokens": self.settings.prompts.max_tokens, "too_long": self.settings.prompts.too_long,
            "vocab_size": self.policy.vocab_size,
        }  # fmt: skip
        self.prompts = read_prompts(self.settings.prompts.path, self.policy.tokenizer, **limits)
        state = RunState(self.policy, self.shaper, self.kl)
        self.books = Bookkeeper(config, state, client, num_prompts=len(self.prompts), has_critic=self.has_critic)
        held_out, size = self.settings.validation.prompts, self.settings.validation.size
        self.held_out = read_prompts(held_out, self.policy.tokenizer, limit=size, **limits) if held_out and size else []
        self.updates: dict[int, asyncio.Task[int | None]] = {}  # critic updates in flight, by step
        self.wait_for = functools.partial(
            needed_update, max_staleness=self.settings.max_staleness, every=config.trainer.publish.every
        )
        self.in_thread = in_a_thread_of(self.settings.threads)
        self.in_update_thread = (  # a second thread, so that the update can run beside a rollout
            in_a_thread_of(self.settings.threads) if self.settings.one_step_off_policy else self.in_thread
        )
        self.ahead: asyncio.Task[Collected] | None = None  # prefetched rollout, once started
        self.done = 0  # steps whose updates are complete
        self.stop = Stop()

    async def run(self) -> dict[str, Any]:
        """Run all steps, resuming from the newest checkpoint; return the summary.

        Raises:
            Stopped: `stop` was requested; the checkpoint of the last complete step is written.
            RequestFailed, TooManyFailed, NotFinite: the run failed.
        """
        try:
            return await self.all_steps()
        except Stopped:
            await self.leave()
            steps = (
                f"after step {self.done}, whose checkpoint is written" if self.done else "before the first step ended"
            )
            raise Stopped(f"stopped {steps}; {RESUMES}") from None
        finally:  # after an error: tasks still in flight would otherwise print tracebacks after the reported error
            await cancelled([*self.rollouts_ahead(), *self.updates.values(), *self.books.saves])

    async def all_steps(self) -> dict[str, Any]:
        """Check the servers, resume, then train, validate and checkpoint step by step; return the summary."""
        started = time.monotonic()
        await self.scorer.compare_tokenizers()
        await self.reference.compare()
        self.scorer.mixture.check_prompts([*self.prompts, *self.held_out])
        done = self.done = await self.stop.or_done(self.books.resume())
        if done == 0:
            await self.validate("before", step=0)
        while done < self.settings.steps:
            done += 1
            await self.one_step(done, is_last=done == self.settings.steps)
            self.done = done
            is_last = done == self.settings.steps or self.is_out_of_time(started, done)
            if is_last or done % self.settings.checkpoint_every == 0:
                await self.books.checkpoint(done)
            if is_last:
                break
            if self.settings.validation.every and done % self.settings.validation.every == 0:
                await self.validate("between", step=done)
        await cancelled(self.rollouts_ahead())
        version = await self.await_updates(done)
        await self.validate("after", step=done)
        return await self.books.finish(self.scorer, version, time.monotonic() - started, steps=done)

    async def one_step(self, step: int, *, is_last: bool) -> None:
        """Run one step: a rollout, then both updates. The critic's is awaited only when its weights are needed."""
        timers = Timers()
        with timers.phase("rollout_wait"):
            if self.ahead is None:
                await self.in_thread(self.policy.renew_sampler)
                self.ahead = self.begin_rollout(step, updated=step - 1)
            rollout = await self.stop.or_done(self.ahead)  # past this point the step runs to its end
        self.ahead = None
        timers.include(rollout.timers)
        scored = rollout.scored
        check_failures(scored.scores, self.settings.rewards.max_failed_fraction)
        batch = await self.in_thread(self.make_batch, scored)
        if self.has_critic:
            self.updates[step] = asyncio.create_task(self.train_critic(step, batch))
        if self.settings.one_step_off_policy and not is_last:
            # Before this step's update: the next rollout samples from a copy of the policy as of `step - 1`.
            await self.in_thread(self.policy.renew_sampler)
            self.ahead = self.begin_rollout(step + 1, updated=step - 1)
        update: dict[str, float] = {}
        if step > self.settings.algorithm.critic_warmup_steps:
            with timers.phase("train_time"):
                update = await self.in_update_thread(
                    self.policy_update.run, batch, seed=self.seed_of(step), kl_coef=self.kl.coef
                )
        if self.settings.one_step_off_policy:
            update["train_rollouts/policy_staleness"] = float(step - 1 - rollout.updated)
        self.books.log_step(step, scored, batch, {**update, **timers.metrics()})
        self.books.log_timeline(step, timers.spans)
        if (distance := sequence_kl(scored, batch.mask)) is not None:
            self.kl.update(distance, len(batch.lengths))

    def is_out_of_time(self, started: float, step: int) -> bool:
        """Return whether `actor.max_minutes` have passed."""
        limit = self.settings.max_minutes
        if limit is None or time.monotonic() - started < 60 * limit:
            return False
        logger.warning(
            "actor.max_minutes (%g) are over at step %d of %d; the next start goes on from here",
            limit, step, self.settings.steps,
        )  # fmt: skip
        return True

    def begin_rollout(self, step: int, *, updated: int) -> asyncio.Task[Collected]:
        """Start generating and scoring the responses of `step`, with the policy as of step `updated`.

        Generation starts at once; scoring waits until the critic's weights satisfy `actor.max_staleness`.
        """

        async def collected() -> Collected:
            timers = Timers()
            ready = asyncio.create_task(self.await_updates(self.wait_for(step)))
            try:
                with timers.phase("rollout_time"):
                    scored = await collect(
                        self.policy, self.scorer, self.reference, self.prompts_of(step), seed=self.seed_of(step),
                        ready=ready, in_thread=self.in_thread, timers=timers,
                        with_kl=self.settings.kl.measures(step), with_logprobs=not self.settings.is_one_update,
                    )  # fmt: skip
            finally:
                await cancelled([ready])
            return Collected(scored, timers, updated)

        return asyncio.create_task(collected())

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`, one entry per response."""
        s = self.settings
        count = s.rollout_size // s.algorithm.responses_per_prompt
        taken = take(self.prompts, start=self.books.prompts_taken(step - 1), count=count, seed=self.seed)
        return [prompt for prompt in taken for _ in range(s.algorithm.responses_per_prompt)]

    def rollouts_ahead(self) -> list[asyncio.Task[Any]]:
        """Prefetched rollouts to cancel on exit."""
        return [self.ahead] if self.ahead else []

    def make_batch(self, scored: ScoredRollout) -> PPOBatch:
        """Shape the rewards of a rollout and compute its advantages and returns."""
        rewards = self.shaper.shape(scored.scores.rewards, scored.scores.scored, scored.rollout)
        return make_batch(
            scored, self.method, rewards=rewards, kl_coef=self.kl.coef,
            responses_per_prompt=self.settings.algorithm.responses_per_prompt,
        )  # fmt: skip

    async def train_critic(self, step: int, batch: PPOBatch) -> int | None:
        """Send the critic its update; return the weights version that serves it, or None if the update failed.

        The sidecar counts a failed update as done: it keeps serving the previous weights and accepts the next step.
        """
        timers = Timers()
        with timers.phase("critic_update"):
            try:
                answer = await self.client.train(critic_payload(batch), run_id=self.run_id, step=step)
            except ServerFailed as error:  # task edge: the run survives one lost critic update
                self.books.failed_critic_updates += 1
                logger.warning("step %d: the critic's update failed, the run goes on without it: %s", step, error)
                return None
        self.books.log_timeline(step, timers.spans)
        self.books.version_steps.learn(answer.weights_version, step)
        return answer.weights_version

    async def await_updates(self, step: int) -> int:
        """Wait until the critic's updates up to `step` are served; return the last weights version, or -1 if none."""
        version = -1
        for sent in [sent for sent in sorted(self.updates) if sent <= step]:
            served = await asyncio.shield(self.updates[sent])  # cancelling a rollout must not cancel the update
            self.updates.pop(sent, None)
            if served is not None:
                version = self.books.weights_version = served
        return version

    async def validate(self, when: str, *, step: int) -> None:
        """Generate and score responses to the held-out prompts, if there are any."""
        if self.held_out:
            s, start = self.settings, time.monotonic()
            if self.ahead:
                await self.stop.or_done(asyncio.wait([self.ahead]))  # the sampler is in use until then
            await self.in_thread(self.policy.renew_sampler)
            validation = validate(
                self.policy, self.scorer, self.reference, self.held_out, seed=self.seed, greedy=s.validation.greedy,
                in_thread=self.in_thread, with_kl=s.kl.uses_reference,
            )  # fmt: skip
            result = await self.stop.or_done(validation)
            await self.books.log_validation(when, step, result, seconds=time.monotonic() - start)

    async def leave(self) -> None:
        """Cancel the work in flight and write the checkpoint of the last complete step, including the critic's."""
        models = (self.policy.model, self.policy.sampler, self.policy.reference)
        end_forwards(*(model for model in models if model is not None))
        await cancelled(self.rollouts_ahead())
        await self.in_thread(lambda: None)  # wait for the thread: it may have adapters disabled
        if self.done and not self.books.has_checkpoint(self.done):
            await self.books.checkpoint(self.done)
        await self.await_updates(self.done)
        await asyncio.gather(*self.books.saves)

    def seed_of(self, step: int) -> int:
        """Return the seed for sampling and shuffling in `step`."""
        return step_seed(self.seed, step)


def step_seed(run_seed: int, step: int) -> int:
    """Return a seed per run and step, hashed: torch's CPU generator uses only the lowest 32 bits of a seed."""
    return int(np.random.SeedSequence([run_seed, step]).generate_state(1)[0])


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait for them; updates that the server accepted are in its journal and not lost."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
