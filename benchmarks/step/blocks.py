"""Blocks of consecutive PPO steps, overlapped as in a run or serial. All blocks have the same prompts and lengths."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actor.algorithms.batch import critic_payload
from actor.data.rollout import Prompt, ScoredRollout
from actor.data.step_inputs import StepInputs
from actor.generation.engine import Generation, uniform_draws
from actor.loop import PPORun
from actor.run.metrics import Timers
from benchmarks.generation import decoder_of, make_prompts, response_lengths
from benchmarks.support.benchmark import Record
from benchmarks.support.children import SERVED, free_ports, running_sidecar, running_triton
from benchmarks.support.samples import in_turn
from benchmarks.support.usage import cpu_seconds
from benchmarks.support.workload import SIZES, make_checkpoint, trace_tokenizer
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, RunConfig
from python_backend.store.jsonl import write_jsonl
from python_backend.store.weights import WeightsStore

OVERLAPPED, SERIAL = "overlapped", "serial"


def measure_blocks(settings: argparse.Namespace, record: Record) -> None:
    """Run server and sidecar, and record blocks of steps of both modes."""
    import torch

    from python_backend.models.modeling import quiet_transformers
    from trainer.publish import initialise_store

    quiet_transformers()
    torch.set_num_threads(1)
    config = configuration(record.out, settings)
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    with running_triton(config), running_sidecar(config):
        asyncio.run(_measure(config, settings, record))


def configuration(out: Path, settings: argparse.Namespace) -> RunConfig:
    """Write a policy, one model for both reward and critic, and prompts; return the run's configuration."""
    folder = out / "checkpoints"
    make_checkpoint(SIZES[settings.model], folder / "scoring")
    make_checkpoint(SIZES[settings.model], folder / "policy", "policy")
    words = trace_tokenizer().convert_ids_to_tokens
    prompts = ({"text": " ".join(words(prompt.tolist()))} for prompt in make_prompts(settings.rollout))
    write_jsonl(folder / "prompts.jsonl", prompts)
    scoring = {"checkpoint": folder / "scoring", **SERVED}
    sections = {
        "run": {"dir": out / "run", "run_id": "bench"},
        "server": free_ports(),
        "reward": scoring,
        "critic": scoring,
        "trainer": {"token_budget": 2048, "reload_on_save": "none", "checkpoint_every": 100_000, "nice": 0},
        "actor": {
            "steps": 100_000,
            "rollout_size": settings.rollout,
            "checkpoint_every": 100_000,
            "policy": {"checkpoint": folder / "policy", "token_budget": 2048},
            "prompts": {"path": folder / "prompts.jsonl"},
            "generation": {"max_new_tokens": settings.longest},
            "optimizer": {"lr": 1e-12, "weight_decay": 0.0},
            "validation": {"size": 0},
        },
    }
    return RunConfig.model_validate(sections)


async def _measure(config: RunConfig, settings: argparse.Namespace, record: Record) -> None:
    """Measure one block of each mode per round, starting with another mode each time."""
    client = ClientSection(train_deadline_s=3600, deadline_s=3600)
    async with TritonClient(config.server.http_url, client) as ours:
        run = MeasuredRun(config, ours)
        await run.scorer.compare_tokenizers()
        await run.recorder.resume()
        for mode in (OVERLAPPED, SERIAL):  # warm-up: absorbs one-time costs
            await run.block(mode, 1)
        for number, mode in in_turn((OVERLAPPED, SERIAL), settings.rounds):
            sample = await run.block(mode, settings.steps)
            record.add({"mode": mode, "round": number, **sample})
            record.say(f"{mode:<11} {sample['seconds'] / sample['steps']:7.2f} s a step")


class GivenLengths(Generation):
    """Generates `lengths[i]` tokens for prompt i, so that every block does the same work."""

    lengths: Sequence[int]

    def run(self, prompts: Sequence[Any], finished: Any, *, seed: int, greedy: bool = False) -> None:
        """Generate as the parent class does, except that each response ends at its given length."""
        decoder = decoder_of(self.lengths)(self._model, self._rules(), slots=self._settings.batch_size)
        decoder.run(prompts, lambda index: uniform_draws(seed, index), finished)


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

    async def block(self, mode: str, steps: int) -> dict[str, Any]:
        """Run `steps` steps, wait until the critic of the last step is served, and return times and spans."""
        self.spans.clear()
        cpu, start = cpu_seconds([os.getpid()]), time.time()
        for self.place in range(1, steps + 1):
            self.done += 1
            await (self.one_step(self.done, is_last=False) if mode == OVERLAPPED else self.serial_step(self.done))
        await self.critic.served(self.done)
        seconds, cpu = time.time() - start, cpu_seconds([os.getpid()]) - cpu
        spans = [[phase, begin - start, end - start] for phase, begin, end in self.spans]
        return {"steps": steps, "seconds": seconds, "cpu_seconds": cpu, "spans": spans}

    async def serial_step(self, step: int) -> None:
        """Do the work of `one_step` with all phases in sequence."""
        timers, seed = Timers(), self.inputs.seed_of(step)
        with timers.phase("generate"):
            rollout = await self.in_thread(self.policy.generate, self.inputs.prompts_of(step), seed=seed)
        with timers.phase("scoring"):
            scores = await self.scorer.score(rollout)
        with timers.phase("logprobs"):
            logprobs = await self.in_thread(self.policy.logprobs, rollout)
        with timers.phase("init_logprobs"):
            ref_logprobs = await self.in_thread(self.policy.logprobs, rollout, reference=True)  # computed in the actor
        batch = await self.in_thread(self.make_batch, ScoredRollout(rollout, scores, logprobs, ref_logprobs))
        await self.critic.train(step, critic_payload(batch))
        with timers.phase("train_time"):
            await self.in_thread(self.policy_update.run, batch, seed=seed, kl_coef=self.kl.coef)
        self.recorder.log_timeline(step, timers.spans)
