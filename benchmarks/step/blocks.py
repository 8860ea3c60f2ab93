"""Blocks of consecutive PPO steps, overlapped as in a run or serial. All blocks have the same prompts and lengths."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actor.algorithms.batch import critic_payload
from actor.data.rollout import PPOBatch, Prompt, Rollout, ScoredRollout, Scores
from actor.data.step_inputs import StepInputs
from actor.generation.engine import Generation, uniform_draws
from actor.loop import PPORun
from actor.run.metrics import Timers
from benchmarks.generation import decoder_of, response_lengths
from benchmarks.support.samples import in_turn
from benchmarks.support.usage import cpu_seconds
from python_backend.client.client import TrainAnswer, TritonClient
from python_backend.config import RunConfig
from python_backend.wire.contract import VALUES, WEIGHTS_VERSION

OVERLAPPED, SERIAL, PADDED = "overlapped", "serial", "padded"


class GivenLengths(Generation):
    """Generates `lengths[i]` tokens for prompt i, so that every block does the same work."""

    lengths: Sequence[int]

    def run(self, prompts: Sequence[Any], finished: Any, *, seed: int, greedy: bool = False) -> None:
        """Generate as the parent class does, except that each response ends at its given length."""
        decoder = decoder_of(self.lengths)(self._model, self._rules(), slots=self._settings.batch_size)
        decoder.run(prompts, lambda index: uniform_draws(seed, index), finished)


class PaddedServices:
    """Reward and critic behind PyTriton, called as PyTriton's users do: every row is padded to one common length."""

    def __init__(self, reward: TritonClient, critic: TritonClient, width: int) -> None:
        self._reward, self._critic, self._width = reward, critic, width

    async def score(self, rollout: Rollout) -> Scores:
        """Return rewards and values of every row."""
        import torch

        async def one(row: Any) -> tuple[Any, Any]:
            return await asyncio.gather(
                self._reward.rewards([row], width=self._width),
                self._critic.score([row], (VALUES, WEIGHTS_VERSION), width=self._width),
            )

        answers = await asyncio.gather(*(one(row) for row in rollout.rows()))
        count, width = rollout.tokens.shape
        values = torch.stack([torch.tensor(critic[VALUES][0, :width]) for _, critic in answers])
        rewards = torch.tensor([float(reward["rewards"][0, 0]) for reward, _ in answers])
        return Scores(rewards, values, torch.zeros(count).long(), torch.ones(count).bool(), [])

    async def train(self, batch: PPOBatch, *, run_id: str, step: int) -> TrainAnswer:
        """Train once on the padded batch, as if every row were as long as the longest; return the server's answer."""
        import torch

        padded = replace(batch, lengths=torch.full_like(batch.lengths, batch.tokens.shape[1]))
        return await self._critic.train(critic_payload(padded), run_id=run_id, step=step)


@dataclass(frozen=True)
class BlockInputs(StepInputs):
    """Prompts and seeds by a step's position in its block, so that they are the same in all blocks."""

    run: MeasuredRun = field(kw_only=True)

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return the prompts of the current position in the block."""
        return super().prompts_of(self.run.place)

    def seed_of(self, step: int) -> int:
        """Return the seed of the current position in the block."""
        return super().seed_of(self.run.place)


class MeasuredRun(PPORun):
    """A run whose blocks all have the same prompts, random draws and response lengths; its policy hardly changes."""

    def __init__(self, config: RunConfig, client: TritonClient) -> None:
        super().__init__(config, client)
        self.padded: PaddedServices | None = None
        self.done = 0  # steps so far
        self.place = 0  # of the current step within its block, from 1
        self.spans: list[tuple[str, float, float]] = []  # (phase, begin, end) of the current block
        self.recorder.log_timeline = lambda step, spans: self.spans.extend(spans)  # type: ignore[method-assign]
        # Replaces the class of the policy's generation and keeps its state.
        given = GivenLengths.__new__(GivenLengths)
        given.__dict__ = self.policy.generation.__dict__
        given.lengths = response_lengths("varied", config.actor.rollout_size, config.actor.generation.max_new_tokens)
        self.policy.generation = given
        self.inputs = self.rollouts.inputs = BlockInputs(**vars(self.inputs), run=self)
        self._run_id = config.run.identity

    async def blocks(
        self, modes: Sequence[str], *, steps: int, rounds: int, note: Callable[[dict[str, Any]], None]
    ) -> None:
        """Measure one block of each mode per round, starting with another mode each time; pass samples to `note`."""
        await self.recorder.resume()
        for mode in modes:  # warm-up: absorbs one-time costs
            await self.block(mode, 1)
        for number, mode in in_turn(modes, rounds):
            note({"mode": mode, "round": number, **await self.block(mode, steps)})

    async def block(self, mode: str, steps: int) -> dict[str, Any]:
        """Run `steps` steps, wait until the critic of the last step is served, and return times and spans."""
        self.spans.clear()
        cpu, start = cpu_seconds([os.getpid()]), time.time()
        for self.place in range(1, steps + 1):
            if mode == PADDED:  # PyTriton's servers do not check step numbers
                await self.serial_step(0, self.padded)
                continue
            self.done += 1
            await (self.one_step(self.done, is_last=False) if mode == OVERLAPPED else self.serial_step(self.done, None))
        await self.critic.served(self.done)
        seconds, cpu = time.time() - start, cpu_seconds([os.getpid()]) - cpu
        spans = [[phase, begin - start, end - start] for phase, begin, end in self.spans]
        return {"steps": steps, "seconds": seconds, "cpu_seconds": cpu, "spans": spans}

    async def serial_step(self, step: int, padded: PaddedServices | None) -> None:
        """Do the work of `one_step` with all phases in sequence; use `padded` for scoring and training unless None."""
        timers = Timers()
        with timers.phase("generate"):
            rollout = await self.in_thread(
                self.policy.generate, self.inputs.prompts_of(step), seed=self.inputs.seed_of(step)
            )
        with timers.phase("scoring"):
            scores = await (padded or self.scorer).score(rollout)
        with timers.phase("logprobs"):
            logprobs = await self.in_thread(self.policy.logprobs, rollout)
        with timers.phase("init_logprobs"):
            ref_logprobs = await self.in_thread(self.policy.logprobs, rollout, reference=True)  # computed in the actor
        batch = await self.in_thread(self.make_batch, ScoredRollout(rollout, scores, logprobs, ref_logprobs))
        if padded is None:
            await self.critic.train(step, critic_payload(batch))
        else:
            with timers.phase("critic_update"):
                await padded.train(batch, run_id=self._run_id, step=step)
        with timers.phase("train_time"):
            await self.in_thread(self.policy_update.run, batch, seed=self.inputs.seed_of(step), kl_coef=self.kl.coef)
        self.recorder.log_timeline(step, timers.spans)
