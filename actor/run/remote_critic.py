"""The critic in tritonserver, as the actor trains it: updates and saves in flight, versions, rewind."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_triton.actor.data.compute import cancel_all
from rlhf_triton.actor.run.staleness import Metric, VersionSteps
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import RequestFailed, ServerFailed
from rlhf_triton.config.sections import RunSection
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.store.weights import WeightsError, WeightsStore
from rlhf_triton.wire.contract import VersionRange

logger = logging.getLogger(__name__)


class RemoteCritic:
    """The critic that a run trains; if it trains none, there is nothing in flight, to rewind or to save."""

    def __init__(self, client: TritonClient, run: RunSection, *, is_trained: bool, publish_every: int) -> None:
        self.is_trained = is_trained
        self.weights_version = 0
        """Newest version that the server has reported."""
        self.num_failed_updates = 0
        """Updates that failed in this process; the sidecar counts them as done."""
        self.last_sent = 0
        """The last step whose update was sent, or to which the critic was rewound."""
        self._client = client
        self._run_id = run.identity
        self._run_dir = run.dir
        self._weights = WeightsStore(run.weights_dir)
        self._version_steps = VersionSteps(0, 0, every=publish_every, manifest_step=self._manifest_step)
        self._in_flight: dict[int, asyncio.Task[int | None]] = {}  # updates, by step
        self._sent: dict[int, asyncio.Future[None]] = {}  # steps that are waited for, before they are sent
        self._saves: list[asyncio.Task[None]] = []
        self._unsaved: int | None = None  # newest step whose save failed

    async def rewind(self, step: int) -> None:
        """Rewind the critic to `step`. Raises RequestFailed, with the code STEP_AHEAD if it never received the step."""
        self.last_sent = step
        if self.is_trained:
            self.weights_version = await self._client.rewind(run_id=self._run_id, step=step)
            self._version_steps.restart(self.weights_version, step)
            set_log_position(version=self.weights_version)
            logger.info("the critic is at step %d and serves version %d", step, self.weights_version)

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
                    self.weights_version = version
        return VersionRange(self.weights_version) if self.weights_version else None

    async def wait_sent(self, step: int) -> None:
        """Wait until the update of `step` has been sent."""
        if step > self.last_sent:
            await asyncio.shield(self._sent.setdefault(step, asyncio.get_running_loop().create_future()))

    async def train(self, step: int, payload: Mapping[str, np.ndarray]) -> int | None:
        """Send the critic its update; return the weights version with the update, or None if the update failed.

        The sidecar counts a failed update as done: it keeps serving the previous weights and accepts the next step.
        """
        timers = Timers(step)
        version = None
        with timers.phase("critic_update"):
            try:
                answer = await self._client.train(payload, run_id=self._run_id, step=step)
            except ServerFailed as error:  # task edge: the run survives one lost critic update
                self.num_failed_updates += 1
                text = "step %d: the critic's update failed, the run continues without it: %s"
                logger.warning(text, step, error, extra={"step": step})
            else:
                version = answer.weights_version
                self._version_steps.record(version, step)
        timers.append_spans(self._run_dir)
        return version

    def staleness(self, versions: Sequence[int], step: int) -> dict[str, Metric]:
        """Return `VersionSteps.metrics` of the versions that scored the rows of `step`."""
        return self._version_steps.metrics(versions, sent=step - 1)

    def _manifest_step(self, version: int) -> int | None:
        """Return the critic step of a weights version; None if the store is inaccessible or has pruned the version."""
        try:
            return self._weights.manifest(version).step
        except WeightsError:
            return None

    def start_save(self, step: int, keep_steps: list[int]) -> None:
        """Start saving the critic's checkpoint of `step`; the server keeps older ones only of `keep_steps`."""
        if self.is_trained:
            # One that failed stays, so that `finish_saves` raises its error.
            self._saves = [save for save in self._saves if not save.done() or save.exception() is not None]
            self._saves.append(asyncio.create_task(self._save(step, keep_steps)))

    async def _save(self, step: int, keep_steps: list[int]) -> None:
        try:
            await self._client.save(run_id=self._run_id, step=step, keep_steps=keep_steps)
        except RequestFailed as error:  # task edge: the critic can still replay its journal to this step
            self._unsaved = max(step, self._unsaved or 0)
            logger.warning("saving the critic's checkpoint of step %d failed: %s", step, error)
        else:
            self._unsaved = None if step >= (self._unsaved or 0) else self._unsaved

    async def finish_saves(self, keep_steps: list[int]) -> None:
        """Wait for the saves in flight, and repeat one that failed. Raises RequestFailed if it fails again."""
        await asyncio.gather(*self._saves)
        if self._unsaved is not None:
            await self._client.save(run_id=self._run_id, step=self._unsaved, keep_steps=keep_steps)

    async def settle(self, step: int, error: Exception, *, patience_s: float) -> None:
        """Wait at most `patience_s` until updates up to `step` are served and saves are done; log failures.

        `error`: the error that ends the run, which is not logged again.
        """
        waiting = [asyncio.ensure_future(self.wait_served(step)), *self._saves]
        await asyncio.wait(waiting, timeout=patience_s)  # the server may have caused the end by not answering
        for task in waiting:
            failure = task.exception() if task.done() and not task.cancelled() else None
            if failure is not None and failure is not error:
                logger.warning("the critic has not confirmed step %d: %s", step, failure)
        await cancel_all(waiting)

    async def cancel(self) -> None:
        """Stop waiting for updates and saves; the server still trains the updates that its journal has accepted."""
        await cancel_all([*self._in_flight.values(), *self._saves])
