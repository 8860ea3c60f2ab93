"""A fake `vllm serve` in a process of its own, whose responses follow from the seeds of their requests alone."""

import asyncio
import itertools
import math
import signal
import sys

import numpy as np
from aiohttp import web
from fake_vllm import FakeVllm

TOKEN_S = 0.02
MEDIAN_TOKENS = 6
VOCAB_SIZE = 200  # as that of run_checkpoints; the first three tokens are special
EOS = 1


def response(seed, max_tokens):
    """Return the tokens of the response to a request with this seed; some are cut off at `max_tokens`."""
    generator = np.random.default_rng(seed)
    length = int(MEDIAN_TOKENS * generator.lognormal(0.0, 0.8))
    return [*generator.integers(3, VOCAB_SIZE, length).tolist(), EOS][:max_tokens]


class SeededVllm(FakeVllm):
    """Samples token by token, each with the weights that are loaded then; pauses between tokens."""

    def __init__(self, port):
        super().__init__()
        self._port = port
        self._running = asyncio.Event()
        self._running.set()

    async def _handle(self, request):
        if request.path == "/health":
            return web.Response()
        if request.path == "/pause":
            self._running.clear()
        elif request.path == "/resume":
            self._running.set()
        return await super()._handle(request)

    async def _generate(self, request, body):
        tokens = response(body["sampling_params"]["seed"], body["sampling_params"]["max_tokens"])
        versions = []
        for _ in tokens:
            await asyncio.sleep(TOKEN_S)
            await self._running.wait()
            versions.append(self.weights)
        ends = [*itertools.accumulate(len([*same]) for _, same in itertools.groupby(versions))]
        spans = [
            {"version": versions[start], "start": start, "end": end} for start, end in itertools.pairwise([0, *ends])
        ]
        choice = {
            "token_ids": tokens,
            "weight_versions": spans,
            "logprobs": {"content": [{"logprob": -math.log(VOCAB_SIZE)} for _ in tokens]},
            "finish_reason": "stop" if tokens[-1] == EOS else "length",
        }
        return web.json_response({"choices": [choice]})


def main():
    """Serve at the `--port` of the command line until SIGTERM."""
    asyncio.run(_serve(int(sys.argv[sys.argv.index("--port") + 1])))


async def _serve(port):
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with SeededVllm(port):
        await ended.wait()
