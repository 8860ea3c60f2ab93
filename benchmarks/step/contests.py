"""Contests of the step benchmark, with their checkpoints, servers, sidecars and runs.

In `computed` the services compute; in `waited` they sleep for as long as computing would take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation import LONGEST_PROMPT, make_prompts
from benchmarks.step.blocks import OVERLAPPED, PADDED, SERIAL, MeasuredRun, PaddedServices
from benchmarks.support.benchmark import Record
from benchmarks.support.children import child_command, free_ports, running_child
from benchmarks.support.servers import SERVED, replace_model, running_sidecar, start_triton
from benchmarks.support.workload import SIZES, VOCAB_SIZE, make_checkpoint, make_policy, noise_payload, trace_tokenizer
from python_backend.client.client import TritonClient
from python_backend.config import ClientSection, RunConfig, TrainerSection, load_config
from python_backend.models.batching import plan_micro_batches
from python_backend.store.jsonl import write_jsonl
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC, CRITIC_TRAIN, REWARD_MODEL

MEASURED_ROWS = 32


def measure_contests(settings: argparse.Namespace, record: Record) -> None:
    """Measure all contests; store in `waited` how many seconds per token the services sleep."""
    size, longest, out = settings.rollout, settings.longest, record.out
    checkpoints = make_checkpoints(out / "checkpoints" / settings.model, settings.model, settings.rollout)
    waits = seconds_per_token(checkpoints, longest)
    record.result["waits_s_per_token"] = waits
    for contest in ("computed", "waited"):
        config = configuration(out / contest, checkpoints, size, longest, free_ports())
        with services(config, waits if contest == "waited" else {}), contextlib.ExitStack() as others:
            modes, urls = [OVERLAPPED, SERIAL], None
            if contest == "computed":
                modes, urls = [*modes, PADDED], others.enter_context(pytriton(config, checkpoints))
            asyncio.run(measure_run(record, contest, config, modes, settings.steps, settings.rounds, padded_urls=urls))


def make_checkpoints(folder: Path, model: str, num_prompts: int) -> Path:
    """Write a policy, one model for both reward and critic, and prompts; return the folder."""
    tokenizer = trace_tokenizer()
    make_checkpoint(SIZES[model], folder / "scoring")
    make_policy(model).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    words = tokenizer.convert_ids_to_tokens
    prompts = ({"text": " ".join(words(prompt.tolist()))} for prompt in make_prompts(num_prompts))
    write_jsonl(folder / "prompts.jsonl", prompts)
    return folder


def configuration(folder: Path, checkpoints: Path, size: int, longest: int, ports: dict[str, int]) -> RunConfig:
    """Write the run's YAML to `folder`, load it and return the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    scoring = {"checkpoint": str(checkpoints / "scoring"), **SERVED}
    sections = {
        "run": {"dir": str(folder / "run"), "run_id": "bench"},
        "server": ports,
        "reward": scoring,
        "critic": scoring,
        "trainer": {"token_budget": 2048, "reload_on_save": "none", "checkpoint_every": 100_000, "nice": 0},
        "actor": {
            "steps": 100_000,
            "rollout_size": size,
            "checkpoint_every": 100_000,
            "policy": {"checkpoint": str(checkpoints / "policy"), "token_budget": 2048},
            "prompts": {"path": str(checkpoints / "prompts.jsonl")},
            "generation": {"max_new_tokens": longest},
            "optimizer": {"lr": 1e-12, "weight_decay": 0.0},
            "validation": {"size": 0},
        },
    }
    (folder / "run.yaml").write_text(json.dumps(sections, indent=1))  # JSON is YAML
    return load_config(folder / "run.yaml", [])


@contextlib.contextmanager
def services(config: RunConfig, waits: Mapping[str, float]) -> Iterator[None]:
    """Run server and sidecar, which sleep for `waits`, seconds per token, or compute if it is empty."""
    from python_backend.models.modeling import quiet_transformers
    from trainer.publish import initialise_store

    def change(repository: Path) -> None:
        for model, kind, key in ((REWARD_MODEL, "WaitingReward", "reward"), (CRITIC, "WaitingCritic", "critic")):
            if waits:
                replace_model(repository, model, kind, bench_seconds_per_token=f"{waits[key]:.12f}")

    def waiting_sidecar(path: str) -> list[str]:
        return child_command("step.waiting_sidecar:run", config=path, seconds_per_token=waits["train"])

    quiet_transformers()
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    with contextlib.ExitStack() as running:
        running.callback(start_triton(config, change).stop)
        running.enter_context(running_sidecar(config, waiting_sidecar if waits else None))
        yield


@contextlib.contextmanager
def pytriton(config: RunConfig, checkpoints: Path) -> Iterator[list[str]]:
    """Run a PyTriton server for the reward and another for the critic; yield their addresses."""
    folder = config.run.dir.parent / "pytriton"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    reward = {
        "checkpoint": checkpoints / "scoring",
        "counters": folder / "counters",
        "instances": 1,
        "threads": 1,
        "strip_multiple": 0,
    }
    weights = WeightsStore(config.run.weights_dir).folder(0)
    critic = {"critic": weights, "trainer": config.trainer.model_dump(mode="json")}
    with contextlib.ExitStack() as stack:
        urls = []
        for target, last, arguments in (  # `last`: the model that PyTriton binds last
            ("serve_reward", REWARD_MODEL, reward),
            ("serve_critic", CRITIC_TRAIN, critic),
        ):
            running = running_child(
                f"PyTriton {target}",
                f"support.pytriton:{target}",
                arguments,
                folder / f"{target}.log",
                ready=f"/v2/models/{last}/ready",
            )
            urls.append(stack.enter_context(running).url)
        yield urls


async def measure_run(
    record: Record,
    contest: str,
    config: RunConfig,
    modes: Sequence[str],
    steps: int,
    rounds: int,
    padded_urls: Sequence[str] | None = None,
) -> None:
    """Run blocks of steps in each of `modes`, and record their samples."""
    import torch

    torch.set_num_threads(1)
    client = ClientSection(train_deadline_s=3600, deadline_s=3600)

    def note(sample: dict[str, Any]) -> None:
        record.add({"contest": contest, **sample})
        record.say(f"{contest:<9} {sample['mode']:<11} {sample['seconds'] / sample['steps']:7.2f} s a step")

    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(TritonClient(config.server.http_url, client))
        run = MeasuredRun(config, ours)
        await run.scorer.compare_tokenizers()
        if padded_urls is not None:
            reward, critic = [await stack.enter_async_context(TritonClient(url, client)) for url in padded_urls]
            run.padded = PaddedServices(reward, critic, LONGEST_PROMPT + config.actor.generation.max_new_tokens)
        await run.blocks(modes, steps=steps, rounds=rounds, note=note)


def seconds_per_token(checkpoints: Path, longest: int) -> dict[str, float]:
    """Measure the seconds per token of reward, critic and the critic's update, each alone on one thread."""
    import torch

    from python_backend.models.modeling import load_critic, load_reward
    from python_backend.serving.allocator import keep_freed_memory
    from trainer.critic_update import CriticUpdate

    torch.set_num_threads(1)
    keep_freed_memory()
    folder = checkpoints / "scoring"
    generator = np.random.default_rng(0)
    lengths = generator.integers(16, LONGEST_PROMPT + longest, MEASURED_ROWS)
    rows = [generator.integers(3, VOCAB_SIZE, n) for n in lengths]
    plan = plan_micro_batches(lengths.tolist(), token_budget=SERVED["token_budget"], max_rows=MEASURED_ROWS)
    computed = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)
    reward, critic = load_reward(folder), load_critic(folder)
    payload = noise_payload(rows)
    update = CriticUpdate(critic, TrainerSection(token_budget=2048))

    def forwards(score: Callable[[list[np.ndarray], int], Any]) -> None:
        for batch in plan:
            score([rows[i] for i in batch], max(int(lengths[i]) for i in batch))

    def seconds_of(action: Callable[[], Any]) -> float:
        return min(timeit.repeat(action, number=1, repeat=3))

    return {
        "reward": seconds_of(lambda: forwards(reward.score)) / computed,
        "critic": seconds_of(lambda: forwards(critic.values)) / computed,
        "train": seconds_of(lambda: update.train(payload, lambda done: None)) / float(lengths.sum()),
    }
