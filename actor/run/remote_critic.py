"""The critic in tritonserver, as the actor trains it: updates that were sent and are not awaited yet."""

import asyncio
import logging
from collections.abc import Mapping

import numpy as np

from rlhf_triton.actor.data.compute import cancel_all
from rlhf_triton.actor.run.metrics import Timers
from rlhf_triton.actor.run.recorder import Recorder
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import ServerFailed
from rlhf_triton.wire.contract import VersionRange

logger = logging.getLogger(__name__)


class RemoteCritic:
    """The critic updates that were sent to the server and are not awaited yet; none in a run without a critic."""

    def __init__(self, client: TritonClient, recorder: Recorder, *, run_id: str) -> None:
        self._client, self._recorder, self._run_id = client, recorder, run_id
        self._in_flight: dict[int, asyncio.Task[int | None]] = {}  # by step
        self._sent: dict[int, asyncio.Future[None]] = {}  # steps that are waited for, before they are sent
        self.last_sent = 0
        """The last step whose update was sent; set by the loop when a run resumes."""

    def send(self, step: int, payload: Mapping[str, np.ndarray]) -> None:
        """Start the critic's update of `step`; `payload`: from `critic_payload`."""
        self._in_flight[step] = asyncio.create_task(self.train(step, payload))
        self.last_sent = step
        for awaited in [awaited for awaited in self._sent if awaited <= step]:
            self._sent.pop(awaited).set_result(None)

    async def wait_served(self, step: int) -> VersionRange | None:
        """Wait until every update up to `step` is served or has failed; return the versions that scoring must demand.

        None, before the first update is served: any version. The demand is needed because a server that is slow to
        swap, and that the sidecar did not wait for, may still serve an older version.
        """
        for sent, update in sorted(self._in_flight.items()):
            if sent <= step:
                version = await asyncio.shield(update)  # cancelling a rollout must not cancel the update
                # Only the first of several waits: meanwhile it may have found newer versions.
                if self._in_flight.pop(sent, None) is not None and version is not None:
                    self._recorder.weights_version = version
        oldest = self._recorder.weights_version
        return VersionRange(oldest) if oldest else None

    async def wait_sent(self, step: int) -> None:
        """Wait until the update of `step` has been sent."""
        if step > self.last_sent:
            await asyncio.shield(self._sent.setdefault(step, asyncio.get_running_loop().create_future()))

    async def train(self, step: int, payload: Mapping[str, np.ndarray]) -> int | None:
        """Send the critic its update; return the weights version with the update, or None if the update failed.

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
        self._recorder.version_steps.record(answer.weights_version, step)
        return answer.weights_version

    async def settle(self, step: int, error: Exception, *, patience_s: float) -> None:
        """Wait at most `patience_s` until updates up to `step` are served and saves are done; log failures.

        `error`: the error that ends the run, which is not logged again.
        """
        waiting = [asyncio.ensure_future(self.wait_served(step)), *self._recorder.saves]
        await asyncio.wait(waiting, timeout=patience_s)  # the server may have caused the end by not answering
        for task in waiting:
            failure = task.exception() if task.done() and not task.cancelled() else None
            if failure is not None and failure is not error:
                logger.warning("the critic has not confirmed step %d: %s", step, failure)
        await cancel_all(waiting)

    async def cancel(self) -> None:
        """Stop waiting for updates; the server still trains the updates that its journal has accepted."""
        await cancel_all(self._in_flight.values())
