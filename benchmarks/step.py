"""Benchmark of a PPO step by phase, overlapped as in a run and serial, with all processes on the same two cores.

It measures blocks of consecutive steps. All blocks have the same prompts and response lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actor.algorithms.batch import critic_payload
from actor.data.prompts import StepInputs
from actor.data.rollout import Prompt, ScoredRollout
from actor.generation.engine import uniform_draws
from actor.generation.slots import Prompts
from actor.loop import PPORun
from actor.run.metrics import Timers
from benchmarks.generation import decoder_of, make_prompts, response_lengths
from benchmarks.measurement import Option, Record, Result, Sample, Target, cpu_seconds, grouped, in_turn, ratio, select
from benchmarks.processes import SERVED, free_ports, running_sidecar, running_triton
from benchmarks.workload import SIZES, make_checkpoint, trace_tokenizer
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, RunConfig
from python_backend.models.modeling import quiet_transformers
from python_backend.store.jsonl import write_jsonl
from python_backend.store.weights import WeightsStore
from tools.report.curves import figure_of
from trainer.publish import initialise_store

OVERLAPPED, SERIAL = "overlapped", "serial"
CORES = 2  # shared by all processes
# Phases that the actor itself computes, so they cannot overlap.
OWN_PHASES = ("generate", "logprobs", "init_logprobs", "train_time")
OPTIONS = {
    "model": Option("7m", f"policy, reward and critic, one of {', '.join(SIZES)}", quick="tiny", known=SIZES),
    "rollout": Option(64, "responses per step", quick=8),
    "longest": Option(128, "tokens of the longest response", quick=12),
    "steps": Option(3, "steps per block", quick=3),
    "rounds": Option(3, "blocks of each mode", quick=2),
}
LANES = {
    "generate": ("generation", "#0072B2"),
    "scoring": ("rewards and values", "#E69F00"),
    "logprobs": ("log-probs", "#56B4E9"),
    "init_logprobs": ("reference log-probs", "#7FC8F0"),
    "critic_update": ("critic's update and reload", "#D55E00"),
    "train_time": ("policy's update", "#009E73"),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Run server and sidecar, and record blocks of steps of both modes."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
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
    scoring = {"model": folder / "scoring", **SERVED}
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
            "policy": {"model": folder / "policy", "token_budget": 2048},
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


@dataclass(frozen=True)
class BlockInputs(StepInputs):
    """Prompts and seeds by a step's position in its block, so that they are the same in all blocks."""

    run: MeasuredRun = field(kw_only=True)

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return the prompts of the current position in the block."""
        return super().prompts_of(self.run.place)

    def seed_of(self, step: int, *repeat: int) -> int:
        """Return the seed of the current position in the block."""
        return super().seed_of(self.run.place, *repeat)


class MeasuredRun(PPORun):
    """A run whose blocks all have the same prompts, random draws and response lengths; its policy hardly changes."""

    def __init__(self, config: RunConfig, client: TritonClient) -> None:
        super().__init__(config, client)
        self.done = 0  # steps so far
        self.place = 0  # of the current step within its block, from 1
        self.spans: list[tuple[str, float, float]] = []  # (phase, begin, end) of the current block
        self.recorder.log_timeline = lambda step, spans: self.spans.extend(spans)  # type: ignore[method-assign]
        generation, longest = self.policy.generation, config.actor.generation.max_new_tokens
        decoder = decoder_of(response_lengths("varied", config.actor.rollout_size, longest))

        def run_given(prompts: Sequence[Any], finished: Any, *, seed: int, greedy: bool = False) -> None:
            """Generate the same numbers of tokens in every block."""
            slots = decoder(generation._model, generation._rules(), slots=generation._settings.batch_size)
            given = {index: prompt.tokens for index, prompt in enumerate(prompts)}
            slots.run(Prompts(given, finished, max_new_tokens=longest), partial(uniform_draws, seed))

        generation.run = run_given  # type: ignore[method-assign]
        # Positions of its own: the recorder drops those of old steps, by the number of the step in the run.
        self.inputs = self.rollouts.inputs = BlockInputs(
            **vars(self.inputs) | {"known": dict(self.inputs.known)}, run=self
        )

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
            rollout = await self.in_thread(
                self.policy.generate, self.inputs.repeated(self.inputs.prompts_of(step)), seed=seed
            )
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


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return the seconds of a step and of its phases, for each mode."""
    return [
        {
            "mode": mode,
            "s_a_step": median_step(own),
            "cpu_s": median_step(own, "cpu_seconds"),
            **{phase: median_phase(own, phase) for phase in LANES},
        }
        for (mode,), own in grouped(result["samples"], "mode").items()
    ]


def targets(result: Result) -> list[Target]:
    """Return the ratio of overlapped to serial step times, and lower bounds of this ratio."""
    samples, serial = result["samples"], select(result["samples"], mode="serial")
    if not serial:
        return []
    seconds = median_step(serial)
    own = sum(median_phase(serial, phase) for phase in OWN_PHASES)
    return [
        Target("overlapped / serial", ratio(samples, "overlapped", "serial", "seconds", by="mode")),
        Target("the actor's own computing / serial", own / seconds),
        Target(f"all processor time on {CORES} cores / serial", median_step(serial, "cpu_seconds") / CORES / seconds),
    ]


def median_step(samples: Sequence[Sample], key: str = "seconds") -> float:
    """Return `key` per step, as the median over the blocks."""
    return statistics.median(sample[key] / sample["steps"] for sample in samples)


def median_phase(samples: Sequence[Sample], phase: str) -> float:
    """Return the seconds of one phase per step, as the median over the blocks."""
    sums = [sum(end - start for name, start, end in s["spans"] if name == phase) / s["steps"] for s in samples]
    return statistics.median(sums)


def draw(result: Result, out: Path) -> None:
    """Draw the block with the median duration of each mode as a timeline, with a lane for each phase."""
    blocks = {}
    for (mode,), own in grouped(result["samples"], "mode").items():
        blocks[mode] = sorted(own, key=lambda block: float(block["seconds"]))[len(own) // 2]
    with figure_of(out / "step.png", (10, 1.75 * len(blocks))) as figure:
        axes = figure.subplots(len(blocks), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (mode, block) in zip(axes, blocks.items(), strict=True):
            for lane, (phase, (_, colour)) in enumerate(LANES.items()):
                spans = [(start, end - start) for name, start, end in block["spans"] if name == phase]
                ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
            ax.axvline(block["seconds"], color="#3C4043", lw=1, ls=(0, (4, 3)))
            title = f"{mode}: {block['seconds'] / block['steps']:.1f} s a step"
            ax.set(title=title, ylim=(len(LANES) - 0.4, -0.6), xlabel="seconds")
            ax.set_yticks(range(len(LANES)), [name for name, _ in LANES.values()], fontsize=7)
            ax.grid(axis="y", visible=False)
