"""Runs of the training loop, in this process, with a server that answers at once."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from live_system import make_run

from rlhf_triton.actor.loop import TrainingRun
from rlhf_triton.actor.run.stopping import Stopped
from rlhf_triton.checkpoints.tokenization import fingerprint
from rlhf_triton.client.client import TrainAnswer
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.client.served import ServedModel
from rlhf_triton.wire.contract import REWARDS, VALUES, WEIGHTS_VERSION

PATIENCE_S = 120.0


def by_text(text):
    return float((3 * sum(text.encode()) + len(text)) % 7)


class Server:
    """Rewards that depend on the texts alone, and a critic that is trained at once."""

    def __init__(self, reward=by_text):
        self.counters = RequestCounters()
        self.tokenizer = None
        self.reward = reward

    async def describe(self, model):
        return ServedModel.of({"tokenizer_fingerprint": fingerprint(self.tokenizer)})

    async def score_sentences(self, texts, *_, **__):
        return {REWARDS: np.asarray([[self.reward(text)] for text in texts], np.float32)}

    async def score(self, rows, *_, **__):
        values = np.zeros((len(rows), max(map(len, rows))), np.float32)
        return {VALUES: values, WEIGHTS_VERSION: np.zeros((len(rows), 1), np.int64)}

    async def train(self, payload, *, run_id, step):
        return TrainAnswer(0.0, step)

    async def save(self, **_):
        return 0

    rewind = save


def make_ppo(folder, checkpoints, server=None, **actor):
    config = make_run(folder, checkpoints, actor=actor).config
    server = server or Server()
    run = TrainingRun(config, server)
    server.tokenizer = run.policy.tokenizer
    return run


def go(run):
    return asyncio.run(asyncio.wait_for(run.run(), PATIENCE_S))


class Crash(BaseException):
    """Ends a run where it is, without `leave`."""


def go_until(run, owner, name, call, *, crash=False):
    """Run until `owner.name` is called for the `call`-th time, or entered, and ask to stop then; what the run says."""
    original = getattr(owner, name)
    calls = []
    asked = threading.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def hold():
            calls.append(None)
            if len(calls) == call:
                if crash:
                    raise Crash("crashed")
                loop.call_soon_threadsafe(lambda: (run.stop.request(), asked.set()))
                assert asked.wait(PATIENCE_S)

        def watched(*args, **kwargs):
            hold()
            return original(*args, **kwargs)

        @contextlib.contextmanager
        def watched_context():
            with original():
                hold()
                time.sleep(0.3)  # long enough for a checkpoint that does not wait
                yield

        setattr(owner, name, watched_context if name == "disable_adapter" else watched)
        await asyncio.wait_for(run.run(), PATIENCE_S)

    with pytest.raises(Crash if crash else Stopped) as ended:
        asyncio.run(main())
    return str(ended.value)


PPO = {"algorithm_name": "ppo", "responses_per_prompt": 1}
