"""Where the step measurement happens: checkpoints, servers, sidecars, and the runs between them.
Given: what to measure. Returns: samples, as they are made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actor.client import TritonClient
from python_backend.batching import plan_micro_batches
from python_backend.config import ClientSection, RunConfig, ServerSection, TrainerSection, load_config
from python_backend.contract import CRITIC, CRITIC_INFER, CRITIC_TRAIN, REWARD_MODEL
from python_backend.control_key import control_key
from python_backend.training_payload import TrainPayload
from python_backend.weights import WeightsStore
from tools.bench.children import BenchChild
from tools.bench.generation import LONGEST_PROMPT, make_model, make_prompts
from tools.bench.reload_stage import SERVED
from tools.bench.step import COMPUTED, WAITED
from tools.bench.step_runs import OVERLAPPED, PADDED, SERIAL, MeasuredRun, PaddedServices
from tools.bench.trace import SIZES, VOCAB_SIZE, make_checkpoint
from tools.child import Child
from tools.ports import with_free_ports
from tools.render_configs import render_repository
from tools.triton_home import find_tritonserver, lay_out_backends
from tools.tritonserver import TritonServer

Note = Callable[[dict[str, Any]], None]
STOP_S = 60.0
MEASURED_ROWS = 32
WAITING_KEY = "bench_seconds_per_token"  # as in waiting_models, which only tritonserver's Python can import
LIBRARIES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def contests(arguments: argparse.Namespace, out: Path, note: Note, result: dict[str, Any]) -> None:
    """All of them. `result` also gets how long services wait."""
    size, longest = arguments.rollout, arguments.longest
    checkpoints = make_checkpoints(out / "checkpoints" / arguments.model, arguments.model, arguments.rollout)
    waits = seconds_per_token(checkpoints, longest)
    result["waits_s_per_token"] = waits
    for contest in (COMPUTED, WAITED):
        config = configuration(out / contest, checkpoints, size, longest)
        with services(config, waits if contest == WAITED else None), contextlib.ExitStack() as others:
            modes, urls = [OVERLAPPED, SERIAL], None
            if contest == COMPUTED:
                modes, urls = [*modes, PADDED], others.enter_context(pytriton(config, checkpoints))
            told = functools.partial(_told, note, contest, size, longest)
            measure(config, modes, arguments.steps, arguments.rounds, told, padded_urls=urls)
    grow(arguments, out, note)


def grow(arguments: argparse.Namespace, out: Path, note: Note) -> None:
    """Step time over rollout size and over response length."""
    rollouts = [int(text) for text in arguments.scaling_rollouts.split(",")]
    lengths = [int(text) for text in arguments.scaling_lengths.split(",")]
    middle = rollouts[len(rollouts) // 2], lengths[len(lengths) // 2]
    checkpoints = make_checkpoints(out / "checkpoints" / "scaling", arguments.scaling_model, max(rollouts))
    base = configuration(out / "scaling", checkpoints, *middle)
    with services(base, None):
        for size, longest in dict.fromkeys([*((n, middle[1]) for n in rollouts), *((middle[0], n) for n in lengths)]):
            config = configuration(out / "scaling" / f"{size}x{longest}", checkpoints, size, longest, server=base)
            told = functools.partial(_told, note, "scaling", size, longest)
            measure(config, [OVERLAPPED, SERIAL], 2, max(1, arguments.rounds - 1), told)


def make_checkpoints(folder: Path, model: str, num_prompts: int) -> Path:
    """Policy, reward and critic of one size, one vocabulary, and prompts; returns the folder."""
    tokenizer = word_tokenizer()
    make_checkpoint(SIZES[model], folder / "scoring")
    make_model(model).save_pretrained(folder / "policy")
    for name in ("scoring", "policy"):
        tokenizer.save_pretrained(folder / name)
    words = tokenizer.convert_ids_to_tokens
    lines = [json.dumps({"text": " ".join(words(prompt.tolist()))}) for prompt in make_prompts(num_prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are words between spaces: `w3` is token 3, and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB_SIZE))]
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="</s>")


def configuration(
    folder: Path, checkpoints: Path, size: int, longest: int, *, server: RunConfig | None = None
) -> RunConfig:
    """The run's YAML, written to `folder`; `server`: of the run whose services it uses."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = (
        with_free_ports(ServerSection(http_port=0, grpc_port=0, metrics_port=0)) if server is None else server.server
    )
    sections = {
        "run": {"dir": str(folder / "run"), "run_id": "bench"},
        "server": {name: getattr(ports, name) for name in ("http_port", "grpc_port", "metrics_port")},
        "reward": {"checkpoint": str(checkpoints / "scoring"), **SERVED},
        "critic": {"checkpoint": str(checkpoints / "scoring"), **SERVED},
        "trainer": {"token_budget": 2048, "reload_on_save": "none", "checkpoint_every": 100_000, "nice": 0},
        "actor": {
            "checkpoint": str(checkpoints / "policy"), "prompts": str(checkpoints / "prompts.jsonl"),
            "validation_size": 0, "rollout_size": size, "minibatch_size": min(size, 32), "max_new_tokens": longest,
            "token_budget": 2048, "lr": 1e-12, "weight_decay": 0.0, "checkpoint_every": 100_000, "steps": 100_000,
        },
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(sections, indent=1))  # JSON is YAML
    return load_config(folder / "run.yaml", [])


@contextlib.contextmanager
def services(config: RunConfig, waits: dict[str, float] | None) -> Iterator[None]:
    """Server and sidecar, which wait instead of computing where `waits` says how long."""
    from python_backend.modeling import quiet_transformers
    from trainer.publish import initialise_store

    quiet_transformers()
    folder = config.run.dir.parent
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    render_repository(config, config.run.repository_dir)
    sidecar = ["trainer", "--config", str(folder / "run.yaml")]
    if waits is not None:
        put_in_place(config.run.repository_dir, REWARD_MODEL, "WaitingReward", waits["reward"])
        put_in_place(config.run.repository_dir, CRITIC, "WaitingCritic", waits["critic"])
        sidecar = ["tools.bench.waiting_sidecar", *sidecar[1:], "--seconds-per-token", str(waits["train"])]
    home = find_tritonserver()
    with TritonServer(
        home, config.run.repository_dir, config.server, folder / "tritonserver.log",
        backends=lay_out_backends(home, folder / "backends"), control_key=control_key(config.run.weights_dir),
        log=lambda line: None,
    ) as server:  # fmt: skip
        server.wait_ready()
        child = Child("sidecar", sidecar, folder / "sidecar.log", LIBRARIES)
        try:
            yield
        finally:
            child.stop(signal.SIGTERM, STOP_S)


def put_in_place(repository: Path, model: str, kind: str, seconds_per_token: float) -> None:
    """Have `model` of a rendered repository be the class `kind` of `waiting_models`."""
    config = repository / model / "config.pbtxt"
    parameter = f'parameters {{ key: "{WAITING_KEY}" value {{ string_value: "{seconds_per_token:.12f}" }} }}\n'
    config.write_text(config.read_text() + parameter)
    (repository / model / "1" / "model.py").write_text(
        f"from tools.bench.waiting_models import {kind} as TritonPythonModel  # noqa: F401\n"
    )


@contextlib.contextmanager
def pytriton(config: RunConfig, checkpoints: Path) -> Iterator[list[str]]:
    """A reward server and a critic server of PyTriton; gives their addresses."""
    folder = config.run.dir.parent / "pytriton"
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    store, trainer = WeightsStore(config.run.weights_dir), config.trainer.model_dump_json()
    reward = [
        "--checkpoint", str(checkpoints / "scoring"), "--counters", str(folder / "counters"), "--instances", "1",
        "--threads", "1", "--tuned", "1", "--strip-multiple", "0",
    ]  # fmt: skip
    critic = ["--critic", str(store.folder(0)), "--trainer", trainer]
    started: list[BenchChild] = []
    try:
        for module, models, arguments in (
            ("tools.bench.pytriton", (REWARD_MODEL,), reward),
            ("tools.bench.reload_locked", (CRITIC_INFER, CRITIC_TRAIN), critic),
        ):
            name = f"PyTriton {models[0]}"
            started.append(BenchChild(name, module, arguments, folder / f"{models[0]}.log", num_ports=3))
            for model in models:
                started[-1].wait_ready(f"/v2/models/{model}/ready")
        yield [child.url for child in started]
    finally:
        for child in started:
            child.stop()


def measure(
    config: RunConfig, modes: Sequence[str], steps: int, rounds: int, note: Note, *,
    padded_urls: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """One run of blocks; `note` gets a sample of each."""
    import torch

    torch.set_num_threads(1)
    client = ClientSection(train_deadline_s=3600, deadline_s=3600)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            ours = await stack.enter_async_context(TritonClient(config.server.http_url, client))
            run = MeasuredRun(config, ours)
            await run.scorer.compare_tokenizers()
            if padded_urls is not None:
                reward, critic = [await stack.enter_async_context(TritonClient(url, client)) for url in padded_urls]
                run.padded = PaddedServices(reward, critic, LONGEST_PROMPT + config.actor.max_new_tokens)
            await run.blocks(modes, steps=steps, rounds=rounds, note=note)

    asyncio.run(main())


def _told(note: Note, contest: str, size: int, longest: int, sample: dict[str, Any]) -> None:
    note({"contest": contest, "rollout": size, "longest": longest, **sample})


def seconds_per_token(checkpoints: Path, longest: int) -> dict[str, float]:
    """What reward, critic and the critic's update take for a token, each alone on one thread: how long to wait."""
    import torch

    from python_backend.allocator import use_allocator
    from python_backend.modeling import load_critic, load_reward
    from trainer.critic_update import CriticUpdate

    torch.set_num_threads(1)
    use_allocator("retain")
    folder = checkpoints / "scoring"
    generator = np.random.default_rng(0)
    lengths = generator.integers(16, LONGEST_PROMPT + longest, MEASURED_ROWS)
    rows = [generator.integers(3, VOCAB_SIZE, n) for n in lengths]
    plan = plan_micro_batches(lengths.tolist(), token_budget=SERVED["token_budget"], max_rows=MEASURED_ROWS)
    computed = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)
    reward, critic = load_reward(folder), load_critic(folder)
    noise = generator.normal(size=int(lengths.sum()) - len(rows)).astype(np.float32)
    payload = TrainPayload(np.concatenate(rows), lengths.astype(np.int64), noise, noise, np.ones_like(noise))
    update = CriticUpdate(critic, TrainerSection(token_budget=2048))

    def forwards(score: Callable[[list[np.ndarray], int], Any]) -> Callable[[], None]:
        def run() -> None:
            for batch in plan:
                score([rows[i] for i in batch], max(int(lengths[i]) for i in batch))

        return run

    return {
        "reward": best_of(forwards(reward.score)) / computed,
        "critic": best_of(forwards(critic.values)) / computed,
        "train": best_of(lambda: update.train(payload, lambda done: None)) / float(lengths.sum()),
    }


def best_of(action: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds, the least of several."""
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        action()
        times.append(time.monotonic() - start)
    return min(times)
