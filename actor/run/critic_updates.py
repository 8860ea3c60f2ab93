"""Critic updates in flight: sent before the policy's update, awaited when scoring needs their weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import numpy as np

from actor.data.compute import cancelled
from actor.run.metrics import Timers
from actor.run.recorder import Recorder
from python_backend.client.client import TritonClient
from python_backend.client.errors import ServerFailed

logger = logging.getLogger(__name__)


class CriticUpdates:
    """Critic updates that were sent but whose weights have not been awaited yet; empty in a run without a critic."""

    def __init__(self, client: TritonClient, recorder: Recorder, *, run_id: str) -> None:
        self._client, self._recorder, self._run_id = client, recorder, run_id
        self._in_flight: dict[int, asyncio.Task[int | None]] = {}  # by step

    def send(self, step: int, payload: Mapping[str, np.ndarray]) -> None:
        """Start the critic's update of `step`; `payload` as of `critic_payload`."""
        self._in_flight[step] = asyncio.create_task(self.train(step, payload))

    async def served(self, step: int) -> None:
        """Wait until every update in flight up to `step` is served or has failed."""
        for sent, update in sorted(self._in_flight.items()):
            if sent <= step:
                version = await asyncio.shield(update)  # cancelling a rollout must not cancel the update
                self._in_flight.pop(sent, None)
                if version is not None:
                    self._recorder.weights_version = version

    async def train(self, step: int, payload: Mapping[str, np.ndarray]) -> int | None:
        """Send the critic its update; return the weights version that serves it, or None if the update failed.

        The sidecar counts a failed update as done: it keeps serving the previous weights and accepts the next step.
        """
        timers = Timers(step)
        with timers.phase("critic_update"):
            try:
                answer = await self._client.train(payload, run_id=self._run_id, step=step)
            except ServerFailed as error:  # task edge: the run survives one lost critic update
                self._recorder.failed_critic_updates += 1
                text = "step %d: the critic's update failed, the run continues without it: %s"
                logger.warning(text, step, error, extra={"step": step})
                return None
        self._recorder.log_timeline(step, timers.spans)
        self._recorder.version_steps.learn(answer.weights_version, step)
        return answer.weights_version

    async def cancel(self) -> None:
        """Stop waiting for updates; those that the server has accepted are in its journal and will be trained."""
        await cancelled(self._in_flight.values())
