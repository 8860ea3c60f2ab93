"""The event loop is never blocked for long: what is long runs in threads, whatever the size of a step.

The measure is the CPU time of the loop's thread between two waits for events, which a busy machine does not change. The
servers and the policy answer at once, so a step is nothing but the actor's own work.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import selectors
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_recorder import TinyPolicy
from tiny_tokenizers import make_text_tokenizer

import actor.algorithms.rollout_metrics
import actor.loop
from actor.data.rollout import Prompt, Rollout
from actor.loop import PPORun
from python_backend.checkpoints.tokenization import fingerprint
from python_backend.client.client import TrainAnswer
from python_backend.client.retry import RequestCounters
from python_backend.client.served import ServedModel
from python_backend.config import ActorSection, RunConfig
from python_backend.wire.contract import CRITIC, REWARD_VERSION
from tests.support.settings import nested

LIMIT_S = 0.1
NUM_STEPS = 40  # of a response, each with a process reward


class Watch(selectors.DefaultSelector):
    """The selector of an event loop, which measures the loop's work between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s, self._since = 0.0, math.inf  # inf: not before the first wait

    def select(self, timeout: float | None = None) -> Any:
        self.longest_s = max(self.longest_s, time.thread_time() - self._since)
        try:
            return super().select(timeout)
        finally:
            self._since = time.thread_time()


class InstantPolicy(TinyPolicy):
    """Generates prepared responses at once."""

    loop: asyncio.AbstractEventLoop
    sampler, reference = types.SimpleNamespace(device=torch.device("cpu")), None
    vocab_size, halvings = 160, ()
    kept = tokenizer = make_text_tokenizer("qwen2")

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def generate(self, prompts: list[Prompt], *, seed: int, greedy: bool, finished: Any) -> Rollout:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, len(self.tokenizer), (len(prompts), self._width), generator=generator)
        lengths, firsts = torch.full((len(prompts),), self._width), torch.tensor([p.tokens.size for p in prompts])
        whole = Rollout(prompts, tokens, lengths, firsts, torch.ones(len(prompts)).bool())
        for i in range(len(prompts)):
            finished(i, whole.select(torch.tensor([i])))
            if i % 64 == 0:  # as from slots, in which no more responses can end at the same time
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()
        return whole

    def sampled_logprobs(self, rollout: Rollout) -> torch.Tensor:
        return torch.full((len(rollout.prompts), self._width - 1), -1.0)

    def logprobs(self, rollout: Rollout, *, reference: bool) -> torch.Tensor:
        return self.sampled_logprobs(rollout) - 0.01

    def renew_sampler(self) -> None: ...

    def close(self) -> None: ...


class InstantServer:
    """Answers at once, with process rewards of texts; the reward model is swapped when all but one row are scored."""

    def __init__(self, rows: int) -> None:
        self.counters, self.outage = RequestCounters(), ""
        self._rows, self.scored = rows, 0

    async def describe(self, model: str) -> ServedModel:
        if model == CRITIC:
            return ServedModel.of({"tokenizer_fingerprint": fingerprint(InstantPolicy.tokenizer)})
        return ServedModel.of({"tokenizer_fingerprint": "x", "process": "step"}, [REWARD_VERSION])

    async def score(self, rows: list[np.ndarray], outputs: Any, *_: Any) -> dict[str, np.ndarray]:
        await asyncio.sleep(0)
        values = np.ones((len(rows), max(row.size for row in rows)), np.float32)
        return {"values": values, "weights_version": np.ones((len(rows), 1), np.int64)}

    async def score_sentences(self, texts: list[str], outputs: Any, metadata: Any, *, pairs: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.scored += len(texts)
        ends = [[len(text) * (k + 1) // NUM_STEPS for k in range(NUM_STEPS)] for text in texts]
        ones = np.ones((len(texts), NUM_STEPS), np.float32)
        version = 1 + (self.scored >= self._rows)
        return {
            "rewards": ones[:, :1],
            "step_rewards": ones,
            "step_ends": np.asarray(ends),
            "reward_version": np.full((len(texts), 1), version),
        }

    async def train(self, inputs: Any, *, run_id: str, step: int) -> TrainAnswer:
        return TrainAnswer(0.5, step)

    async def save(self, *, run_id: str, step: int, keep_steps: Any) -> int:
        return step

    async def rewind(self, *, run_id: str, step: int) -> int:
        return step


def noted(function: Callable[..., Any], callers: set[int]) -> Callable[..., Any]:
    """Return `function`, which then adds the thread that calls it to `callers`."""

    def noting(*arguments: Any) -> Any:
        callers.add(threading.get_ident())
        return function(*arguments)

    return noting


def test_the_loop_is_never_blocked_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows, width = 512, 256
    callers = set()
    mlflow = types.ModuleType("mlflow")
    for name in ("set_experiment", "start_run", "log_metrics", "log_dict", "end_run"):
        setattr(mlflow, name, lambda *_, **__: callers.add(threading.get_ident()))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for module, name in ((os, "fsync"), (actor.algorithms.rollout_metrics, "distinct_bigrams")):
        monkeypatch.setattr(module, name, noted(getattr(module, name), callers))
    policy = InstantPolicy(width)
    update = types.SimpleNamespace(run=lambda batch, **_: {})
    monkeypatch.setattr(actor.loop, "make_policy", lambda *_: (policy, update))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "text": "Open it."}) + "\n" for i in range(rows)))
    settings = {
        "steps": 1,
        "rollout_size": rows,
        "prompts_path": prompts,
        "minibatch_size": rows,
        "validation_prompts": prompts,
        "validation_size": rows // 8,
        "trackers": ["mlflow"],
        "max_new_tokens": width,
    }
    config = RunConfig.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "reward": {"process": {"separator": "."}},
            "actor": nested(ActorSection, settings),
        }
    )
    gc.collect()
    gc.freeze()  # as `long_lived_imports` does for the actor
    watch = Watch()
    loop = policy.loop = asyncio.SelectorEventLoop(watch)
    try:
        loop.run_until_complete(PPORun(config, InstantServer(rows)).run())
    finally:
        gc.unfreeze()
        loop.close()
    assert watch.longest_s < LIMIT_S
    assert (threading.get_ident() in callers, len(callers) > 1) == (False, True), "called on the loop's thread"
