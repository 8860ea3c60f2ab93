"""Clients that keep a model of a live server busy, and record its answers."""

import asyncio
import threading

from aiohttp import ClientError
from bare_client import BareClient, Refused
from model_inputs import scoring_inputs
from waiting import wait_for

from rlhf_triton.wire.contract import CRITIC, WEIGHTS_VERSION


class CriticLoad:
    """Clients that send `rows` until the block ends, each `pause_s` after its last answer."""

    def __init__(self, url, rows, *, model=CRITIC, clients=8, pause_s=0.0):
        self._url = url
        self._rows = rows
        self._model = model
        self._clients = clients
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send_all()))
        self.answers = []
        self.outcomes = []  # HTTP statuses, and names of errors

    def versions(self, start=0, *, name=WEIGHTS_VERSION):
        """The versions of the answers from `start` on."""
        return {int(answer[name][0, 0]) for answer in self.answers[start:]}

    def __enter__(self):
        self._thread.start()
        try:
            wait_for(lambda: len(self.answers) > self._clients)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    async def _send_all(self):
        async with BareClient(self._url) as client:
            await asyncio.gather(*(self._send(client) for _ in range(self._clients)))

    async def _send(self, client):
        while not self._stop.is_set():
            outcome = "200"
            try:
                answer = await asyncio.wait_for(client.infer(self._model, scoring_inputs(self._rows)), 60)
                self.answers.append(answer)
            except Refused as error:
                outcome = error.code
            except (ClientError, TimeoutError, asyncio.TimeoutError) as error:
                outcome = type(error).__name__
            self.outcomes.append(outcome)
            await asyncio.sleep(self._pause_s if outcome == "200" else 0.05)
