"""Clients that keep the critic of a live server busy, and record its answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
from aiohttp import ClientError
from bare_client import BareClient, Refused
from live_system import scoring_inputs, wait_for

from rlhf_triton.wire.contract import CRITIC

NUM_CLIENTS = 8


class CriticLoad:
    """Clients that send `rows` without a pause until the block ends."""

    def __init__(self, url: str, rows: Sequence[np.ndarray]) -> None:
        self._url, self._rows = url, rows
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send_all()))
        self.answers: list[tuple[int, np.ndarray]] = []  # version, values
        self.outcomes: list[tuple[float, float, str]] = []  # sent, answered, HTTP status

    def __enter__(self) -> CriticLoad:
        self._thread.start()
        try:
            wait_for(lambda: len(self.answers) > NUM_CLIENTS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _send_all(self) -> None:
        async with BareClient(self._url) as client:
            await asyncio.gather(*(self._send(client) for _ in range(NUM_CLIENTS)))

    async def _send(self, client: BareClient) -> None:
        while not self._stop.is_set():
            sent, outcome = time.monotonic(), "200"
            try:
                answer = await asyncio.wait_for(client.infer(CRITIC, scoring_inputs(self._rows)), 20)
                self.answers.append((int(answer["weights_version"][0, 0]), answer["values"]))
            except Refused as error:
                outcome = error.code
            except (ClientError, TimeoutError, asyncio.TimeoutError) as error:
                outcome = type(error).__name__
            self.outcomes.append((sent, time.monotonic(), outcome))
            await asyncio.sleep(0 if outcome == "200" else 0.05)
