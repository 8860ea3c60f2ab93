"""The rollouts of a run: one at a time, collected before the policy's update or one step ahead of it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlhf_triton.actor.data.compute import cancel_all
from rlhf_triton.actor.data.prompt_reader import Prompt, check_columns
from rlhf_triton.actor.data.prompts import StepInputs
from rlhf_triton.actor.data.rollout_rows import Group
from rlhf_triton.actor.run.collection import Collector, has_spread, num_sampled_tokens
from rlhf_triton.actor.run.metrics import Timers
from rlhf_triton.actor.run.recorder import Recorder
from rlhf_triton.actor.run.staleness import needed_update
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import ServerFailed
from rlhf_triton.config import ActorSection
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.wire.contract import VersionRange

logger = logging.getLogger(__name__)
Ready = asyncio.Task[VersionRange | None]  # done when scoring may start; result: critic versions to demand


class RemoteCritic:
    """The critic updates that were sent to the server and are not awaited yet; none in a run without a critic."""

    def __init__(self, client: TritonClient, recorder: Recorder, *, run_id: str) -> None:
        self._client, self._recorder, self._run_id = client, recorder, run_id
        self._in_flight: dict[int, asyncio.Task[int | None]] = {}  # by step

    def send(self, step: int, payload: Mapping[str, np.ndarray]) -> None:
        """Start the critic's update of `step`; `payload`: from `critic_payload`."""
        self._in_flight[step] = asyncio.create_task(self.train(step, payload))

    async def wait_served(self, step: int) -> VersionRange | None:
        """Wait until every update up to `step` is served or has failed; return the versions that scoring must demand.

        None, before the first update is served: any version. The demand is needed because a server that is slow to
        swap, and that the sidecar did not wait for, may still serve an older version.
        """
        for sent, update in sorted(self._in_flight.items()):
            if sent <= step:
                version = await asyncio.shield(update)  # cancelling a rollout must not cancel the update
                self._in_flight.pop(sent, None)
                if version is not None:
                    self._recorder.weights_version = version
        oldest = self._recorder.weights_version
        return VersionRange(oldest) if oldest else None

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


@dataclass(frozen=True)
class Rollout:
    """The scored groups of one step."""

    groups: list[Group]
    dropped: list[Group]  # groups that dynamic sampling replaced; the critic still learns from them
    timers: Timers
    updated: int  # last step whose update the sampling policy contains
    metrics: dict[str, float]  # metrics of dynamic sampling


class Rollouts:
    """Collects the rollout of each step; at most one is in progress."""

    def __init__(
        self,
        settings: ActorSection,
        inputs: StepInputs,
        collector: Collector,
        critic: RemoteCritic,
        *,
        publish_every: int,
        truncated: str,
    ) -> None:
        """`truncated`: `environment.truncated`; ignored without environments."""
        self._settings, self.inputs, self._publish_every = settings, inputs, publish_every
        self._collector = collector
        self._critic = critic
        self._truncated = truncated
        self._task: asyncio.Task[Rollout] | None = None

    async def start(self, step: int, *, updated: int) -> asyncio.Task[Rollout]:
        """Start and return the rollout of `step`; the current policy contains the updates up to step `updated`."""
        await self._collector.in_thread(self._collector.policy.renew_sampler)
        self._task = asyncio.create_task(self.collect(step, updated=updated))
        return self._task

    async def get(self, step: int) -> Rollout:
        """Wait for the rollout of `step` and return it; start it first if it was not started in advance."""
        set_log_position(step=step)
        rollout = await (self._task or await self.start(step, updated=step - 1))
        self._task = None
        return rollout

    async def collect(self, step: int, *, updated: int) -> Rollout:
        """Generate and score the responses of `step` with the policy after step `updated`.

        Generation starts at once. Scoring waits until the critic's weights satisfy `actor.max_staleness`, and demands
        their version or a newer one.
        """
        settings, timers = self._settings, Timers(step)
        needed = needed_update(step, max_staleness=settings.max_staleness, every=self._publish_every)
        ready = asyncio.create_task(self._critic.wait_served(needed))
        algorithm = settings.algorithm
        metrics = dict[str, float]()
        dropped = list[Group]()
        try:
            with timers.phase("rollout_time"):
                groups = await self._collect(partial(self.inputs.prompts_of, step), step, ready, timers)
                if algorithm.max_resampled:
                    groups, dropped, metrics = await self._resample(groups, step, ready, timers)
                if algorithm.responses_per_prompt > 1:
                    useful = [has_spread(group, algorithm, self._truncated) for group in [*groups, *dropped]]
                    metrics["train_rollouts/useful_prompts"] = sum(useful) / len(useful)
        finally:
            await cancel_all([ready])
        return Rollout(groups, dropped, timers, updated, metrics)

    async def _collect(
        self, read: Callable[[], list[Prompt]], step: int, ready: Ready, timers: Timers, *repeat: int
    ) -> list[Group]:
        """Return the scored groups for the prompts that `read` returns."""
        prompts = await self._collector.in_thread(read)
        check_columns(self._collector.scorer.reward, prompts)
        return await self._collector.collect(
            self.inputs.repeated(prompts),
            seed=self.inputs.seed_of(step, *repeat),
            timers=timers,
            ready=ready,
            group_size=self._settings.algorithm.responses_per_prompt,
            with_logprobs=not self._settings.is_one_update,
        )

    async def _resample(
        self, groups: list[Group], step: int, ready: Ready, timers: Timers
    ) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Replace groups without spread by responses to further prompts; return (groups, replaced groups, metrics).

        A group that `max_resampled` attempts could not replace stays, so that the step is full.
        """
        algorithm = self._settings.algorithm
        dropped = list[Group]()
        useful = list[Group]()
        useless = list[Group]()
        for repeat in range(algorithm.max_resampled + 1):
            if repeat:
                dropped += useless
                read = partial(self.inputs.more_prompts_of, step, len(useless))
                groups = await self._collect(read, step, ready, timers, repeat)
            useless = []
            for group in groups:
                (useful if has_spread(group, algorithm, self._truncated) else useless).append(group)
            if not useless:
                break
        metrics = {
            "train_rollouts/resampled_prompts": float(len(dropped)),
            "train_rollouts/dropped_tokens": float(num_sampled_tokens(dropped)),
        }
        return [*useful, *useless], dropped, metrics

    async def settle(self) -> None:
        """Wait until the rollout in progress is done with the sampler; `get` raises its error if it failed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def cancel(self) -> None:
        """Cancel the rollout in progress, if any."""
        await cancel_all([self._task] if self._task else [])
