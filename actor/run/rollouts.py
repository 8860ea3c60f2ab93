"""The rollouts of a run: groups in flight, up to `actor.max_off_policy_steps` steps ahead of the policy's update.

Groups train in the order of their prompts, not of completion, so no response length is favoured, and nothing is dropped
for its age: when a step begins, the groups of the step that is `max_off_policy_steps` later are started, with the
policy of that moment. A run thus waits for a slow group while the groups of the following steps are generated.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhf_triton.actor.algorithms.batch import check_failures
from rlhf_triton.actor.data.compute import cancel_all, set_error
from rlhf_triton.actor.data.prompt_reader import Prompt, check_columns
from rlhf_triton.actor.data.prompts import Positions, StepInputs
from rlhf_triton.actor.data.rollout_rows import Conversation, Group, conversations_of, policy_staleness, rows_of
from rlhf_triton.actor.run.collection import Collector, GroupInFlight, has_spread, num_sampled_tokens
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.staleness import needed_update
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.wire.contract import VersionRange

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedGroup:
    """A group that is to be started."""

    number: int  # its place in the order of prompts
    prompt: Prompt
    seed: int  # of its responses
    index: int  # its place among the groups with this seed
    after: Positions  # after its prompt


@dataclass(frozen=True)
class Rollout:
    """The scored groups of one step."""

    groups: list[Group]
    dropped: list[Group]  # groups that dynamic sampling replaced; the critic still learns from them
    timers: Timers
    metrics: dict[str, float]


class Rollouts:
    """The groups in flight, in the order of their prompts; each step takes the first ones."""

    def __init__(
        self,
        settings: ActorSection,
        inputs: StepInputs,
        collector: Collector,
        critic: RemoteCritic,
        *,
        record_sampled: Callable[[int, int, Group], None],
        publish_every: int,
        truncated: str,
    ) -> None:
        """
        Args:
            record_sampled: records a group ahead of its step, `SampleJournal.add_sampled`.
            truncated: `environment.truncated`; ignored without environments.
        """
        self._record_sampled = record_sampled
        self._resumed = dict[int, tuple[int, Group]]()  # groups that an earlier process has sampled
        self._settings = settings
        self.inputs = inputs
        self._publish_every = publish_every
        self._collector = collector
        self._critic = critic
        self._truncated = truncated
        # On several ranks other calls wait until the job in decoding is done, so there is one, during the update.
        self._is_interruptible = settings.ranks == 1
        self._most_ahead = min(settings.max_off_policy_steps, settings.steps)
        self._in_flight = deque[tuple[GroupInFlight, PlannedGroup]]()
        self._completing = list[GroupInFlight]()
        self._demands = dict[int, asyncio.Task[VersionRange | None]]()  # by the critic update that is waited for

    def resume(self, sampled: dict[int, tuple[int, Group]]) -> None:
        """Use the groups that an earlier process has sampled, from `SampleJournal.sampled`."""
        self._resumed = sampled

    async def take(self, step: int) -> Rollout:
        """Start the groups that this step allows, wait for the groups of `step`, and return them.

        The current policy contains the updates up to `step - 1`; conversations in flight continue with it. Generation
        starts at once. Scoring waits until the critic's weights satisfy `actor.max_staleness` for the step that takes
        the group, and demands their version or a newer one.

        Raises RlhfError if too many rewards are unavailable; resampling would only repeat the failure.
        """
        set_log_position(step=step)
        settings = self._settings
        timers = Timers(step)
        algorithm = settings.algorithm
        useful = list[Group]()
        useless = list[Group]()
        dropped = list[Group]()
        with timers.phase("rollout_time"):
            await self._collector.sampling.renew(step - 1)
            await self._start_steps(step, ahead=self._most_ahead if self._is_interruptible else 0)
            for repeat in range(algorithm.max_resampled + 1):
                if repeat:
                    dropped += useless
                    await self._start(len(useless), step, repeat)
                useless = []
                for group in await self._complete(settings.prompts_per_step - len(useful), step, timers):
                    is_kept = not algorithm.max_resampled or has_spread(group, algorithm, self._truncated)
                    (useful if is_kept else useless).append(group)
                most = settings.rewards.max_failed_fraction
                check_failures(conversations_of([*useful, *useless]), most, dropped=conversations_of(dropped))
                if not useless:
                    break
        # A group that `max_resampled` attempts could not replace stays, so that the step is full.
        return Rollout([*useful, *useless], dropped, timers, self._metrics([*useful, *useless], dropped, step))

    async def start_ahead(self, step: int) -> None:
        """Start the groups that may be in flight during the update of `step`, except those that `take` has started."""
        await self._start_steps(step + 1, ahead=self._most_ahead - 1)

    async def _start_steps(self, step: int, *, ahead: int) -> None:
        last = min(step + ahead, self._settings.steps)
        await self._start((last - step + 1) * self._settings.prompts_per_step - len(self._in_flight), step)

    async def _start(self, count: int, step: int, repeat: int = 0) -> None:
        """Start groups for the next `count` prompts; `repeat`: number of the resampling within the step."""
        if count <= 0:
            return
        size = self._settings.algorithm.responses_per_prompt
        start = self._in_flight[-1][1].after if self._in_flight else self.inputs.positions[step - 1 + bool(repeat)]
        prompts = await self._collector.in_thread(self.inputs.read, count, start)
        check_columns(self._collector.scorer.reward, [prompt for prompt, _ in prompts])
        planned = [self._plan(prompt, after, i, step, repeat) for i, (prompt, after) in enumerate(prompts)]
        started = dict[int, GroupInFlight]()  # by number
        for place, group in enumerate(planned, len(self._in_flight)):
            sampled = self._resumed_group(group, taken_by=step + place // self._settings.prompts_per_step)
            if sampled is not None:
                started[group.number] = self._collector.start_sampled(sampled.conversations)
        unsampled = [group for group in planned if group.number not in started]
        for seed, groups in itertools.groupby(unsampled, lambda group: group.seed):
            new = [*groups]
            job_prompts = {group.index * size + k: group.prompt for group in new for k in range(size)}
            in_flight_groups = self._collector.start(job_prompts, seed=seed, group_size=size)
            for group, in_flight in zip(new, in_flight_groups, strict=True):
                started[group.number] = in_flight
                if self._settings.max_off_policy_steps:
                    self._record_when_sampled(group, in_flight)
        self._in_flight += ((started[group.number], group) for group in planned)

    def _plan(self, prompt: Prompt, after: Positions, position: int, step: int, repeat: int) -> PlannedGroup:
        """Return the `position`-th group that `_start` starts.

        With steps ahead, a step may take a group early, so the seed follows from the number alone, also after a resume.
        """
        number = after.prompts - 1
        if not self._settings.max_off_policy_steps:
            seed = self.inputs.seed_of(step, *([repeat] if repeat else []))
            return PlannedGroup(number, prompt, seed, position, after)
        home, index = divmod(number, self._settings.prompts_per_step)
        return PlannedGroup(number, prompt, self.inputs.seed_of(home + 1), index, after)

    def _resumed_group(self, planned: PlannedGroup, *, taken_by: int) -> Group | None:
        """Return the group that an earlier process has sampled, if it is not too old for the step that takes it."""
        sampling_seed, group = self._resumed.pop(planned.number, (None, Group(())))
        if sampling_seed != planned.seed or group.conversations[0][0].prompt.prompt_id != planned.prompt.prompt_id:
            return None
        age = policy_staleness(rows_of(group.conversations), taken_by)
        return group if age <= self._settings.max_off_policy_steps else None

    def _record_when_sampled(self, planned: PlannedGroup, group: GroupInFlight) -> None:
        """Record a group once it is sampled, unless a conversation has failed: a resumed run tries again."""

        def record(sampled: asyncio.Future[list[Conversation]]) -> None:
            if sampled.cancelled() or sampled.exception() is not None:
                return
            if not any(row.error for row in rows_of(sampled.result())):
                self._record_sampled(planned.number, planned.seed, Group(tuple(sampled.result())))

        asyncio.gather(*group.ended).add_done_callback(record)

    async def _complete(self, count: int, step: int, timers: Timers) -> list[Group]:
        """Return the first `count` groups in flight once they are scored."""
        for position, (group, _) in enumerate(self._in_flight):
            self._demand(group, step + position // self._settings.prompts_per_step)
        pairs = [self._in_flight.popleft() for _ in range(count)]
        self._completing = [group for group, _ in pairs]
        with_logprobs = not self._settings.is_one_update
        groups = await self._collector.complete(self._completing, timers=timers, with_logprobs=with_logprobs)
        self.inputs.record(step, pairs[-1][1].after)
        return [replace(group, number=planned.number) for group, (_, planned) in zip(groups, pairs, strict=True)]

    def _demand(self, group: GroupInFlight, step: int) -> None:
        """Let a group be scored as soon as the critic's weights are new enough for `step`."""
        needed = needed_update(step, max_staleness=self._settings.max_staleness, every=self._publish_every)

        async def wait() -> VersionRange | None:
            if self._collector.scorer.has_critic:
                await self._critic.wait_sent(needed)
            return await self._critic.wait_served(needed)

        if needed not in self._demands:
            self._demands = {earlier: task for earlier, task in self._demands.items() if not task.done()}
            self._demands[needed] = asyncio.create_task(wait())

        def pass_on_versions(task: asyncio.Task[VersionRange | None]) -> None:
            if group.versions.done() or task.cancelled():
                return
            if (error := task.exception()) is None:
                group.versions.set_result(task.result())
            else:
                set_error(group.versions, error)

        self._demands[needed].add_done_callback(pass_on_versions)

    def _metrics(self, groups: Sequence[Group], dropped: Sequence[Group], step: int) -> dict[str, float]:
        algorithm = self._settings.algorithm
        everything = [*groups, *dropped]
        metrics = dict[str, float]()
        if algorithm.max_resampled:
            metrics["train_rollouts/resampled_prompts"] = float(len(dropped))
            metrics["train_rollouts/dropped_tokens"] = float(num_sampled_tokens(dropped))
        if algorithm.responses_per_prompt > 1:
            useful = [has_spread(group, algorithm, self._truncated) for group in everything]
            metrics["train_rollouts/useful_prompts"] = sum(useful) / len(useful)
        if self._settings.max_off_policy_steps:
            rows = rows_of(conversations_of(groups))
            staleness = policy_staleness(rows, step, warmup_steps=algorithm.critic_warmup_steps)
            metrics["train_rollouts/policy_staleness"] = float(staleness)
            metrics["train_rollouts/groups_in_flight"] = float(len(self._in_flight))
        return metrics

    async def settle(self) -> None:
        """Wait until no response is being sampled."""
        await self._collector.sampling.settle()

    async def cancel(self) -> None:
        """Drop all groups in flight."""
        await cancel_all(self._demands.values())
        for group in [*self._completing, *(group for group, _ in self._in_flight)]:
            await group.cancel()
        self._in_flight.clear()
        self._demands.clear()
        await self._collector.sampling.cancel()
