"""The groups in flight, in simulated time: order, age, and what waits for what."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prompts import inputs_of, write_prompts
from settings import actor_section
from simulated_time import run_simulated

from rlhf_triton.actor.data.prompts import Positions
from rlhf_triton.actor.data.rollout_rows import Group, RolloutRow, Score, conversations_of
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.rollouts import Rollouts
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.sections import RunSection
from rlhf_triton.wire.contract import VersionRange

MEDIAN_S = 10.0
SIGMA = np.log(4) / 1.645  # one response in twenty takes four times the median
# prompts, and responses to each
PER_STEP = 8
SIZE = 4


@dataclass
class GroupOfSimulation:
    """The part of a `GroupInFlight` that `Rollouts` uses."""

    versions: asyncio.Future
    scored: asyncio.Task
    ended: list

    async def cancel(self):
        self.scored.cancel()


@dataclass
class Simulation:
    """A collector whose responses take `seconds(prompt, seed, index)`, at most `slots` of them at a time."""

    seconds: Callable
    reward: Callable = lambda _: range(SIZE)
    slots: int = PER_STEP * SIZE
    policy_step: int = 0
    started: list = field(default_factory=list)  # prompt, seed, index of its first response
    scorer: Any = field(default_factory=lambda: SimpleNamespace(has_critic=True, reward=ServedModel()))

    def __post_init__(self):
        self.sampling = self
        self._free = asyncio.Semaphore(self.slots)

    async def in_thread(self, function, *given):
        return function(*given)

    async def renew(self, policy_step):
        self.policy_step = policy_step

    async def cancel(self):
        pass

    def start(self, prompts, *, seed, group_size):
        groups = []
        items = [*prompts.items()]
        for first in range(0, len(items), group_size):
            index, prompt = items[first]
            self.started.append((prompt.prompt_id, seed, index))
            versions = asyncio.get_running_loop().create_future()
            scored = asyncio.create_task(self._group(prompt, seed, range(index, index + group_size), versions))
            groups.append(GroupOfSimulation(versions, scored, []))
        return groups

    def start_sampled(self, conversations):
        async def score():
            return Group(conversations)

        return GroupOfSimulation(asyncio.get_running_loop().create_future(), asyncio.create_task(score()), [])

    async def complete(self, groups, **_):
        return [await group.scored for group in groups]

    async def _group(self, prompt, seed, indices, versions):
        rows = await asyncio.gather(*(self._row(prompt, seed, index) for index in indices))
        demanded = await versions
        version = 0 if demanded is None else demanded.least
        scores = [Score(reward=float(reward), version=version) for reward in self.reward(prompt)]
        return Group(tuple((RolloutRow(**row, score=score),) for row, score in zip(rows, scores, strict=True)))

    async def _row(self, prompt, seed, index):
        async with self._free:
            first = self.policy_step
            await asyncio.sleep(self.seconds(prompt, seed, index))
        policy_steps = np.array([-1, first, self.policy_step])
        sampled = np.array([False, True, True])
        return {
            "prompt": prompt,
            "tokens": np.array([5, 6, 7]),
            "sampled": sampled,
            "ended": True,
            "policy_steps": policy_steps,
        }


class InstantCritic(RemoteCritic):
    """A critic that serves each update as soon as it is sent; remembers what is waited for."""

    def __init__(self):
        super().__init__(None, RunSection(), is_trained=True, publish_every=1)
        self.awaited = []  # update, and the last one that was sent

    def sent(self, step):
        self._in_flight.clear()
        self.send(step, {})

    async def train(self, step, payload):
        return step

    async def wait_served(self, step):
        self.awaited.append((step, self.last_sent))
        return VersionRange(step) if step > 0 else None


def log_normal(_, seed, index):
    return MEDIAN_S * float(np.exp(SIGMA * np.random.default_rng([seed, index]).standard_normal()))


@dataclass
class Trained:
    """The groups that the steps of a simulated run took, and when."""

    groups: list = field(default_factory=list)
    dropped: list = field(default_factory=list)
    staleness: list = field(default_factory=list)
    at: list = field(default_factory=list)  # seconds after which a step had its groups


def make_rollouts(simulation, inputs, critic, **actor):
    given = {
        "algorithm_name": "grpo",
        "responses_per_prompt": SIZE,
        "rollout_size": PER_STEP * SIZE,
        "old_logprobs": "sampler",
        **actor,
    }
    settings = actor_section(model=Path("policy"), **given)
    return Rollouts(
        settings, inputs, simulation, critic, record_sampled=lambda *_: None, publish_every=1, truncated="score"
    )


async def trained(rollouts, critic, steps):
    """Take the groups of these steps, and train on each step for `MEDIAN_S`."""
    found = Trained()
    critic.last_sent = steps.start - 1
    for step in steps:
        rollout = await rollouts.take(step)
        found.at.append(asyncio.get_running_loop().time())
        found.groups.append(rollout.groups)
        found.dropped.append(len(rollout.dropped))
        found.staleness.append(rollout.metrics.get("train_rollouts/policy_staleness", 0.0))
        critic.sent(step)
        await rollouts.start_ahead(step)
        await asyncio.sleep(MEDIAN_S)
    await rollouts.cancel()
    return found


@pytest.fixture
def inputs(tmp_path):
    return inputs_of(write_prompts(tmp_path / "prompts.jsonl", [f"p{i}" for i in range(1000)]))


def ids(groups):
    return [group.conversations[0][0].prompt.prompt_id for group in groups]


def simulated(
    inputs,
    steps,
    *,
    seconds=log_normal,
    reward=lambda _: range(SIZE),
    slots=PER_STEP * SIZE,
    resumed=False,
    until=None,
    **actor,
):
    """Run steps from the first one on; return what they took, and the collector.

    Args:
        resumed: begin after the step of `inputs`.
        until: last step, where the process ends; default: `steps`.
    """
    if not resumed:
        inputs.positions = {0: Positions()}

    async def main():
        simulation = Simulation(seconds, reward, slots)
        critic = InstantCritic()
        rollouts = make_rollouts(simulation, inputs, critic, steps=steps, **actor)
        taken = range(max(inputs.positions) + 1, (until or steps) + 1)
        return await trained(rollouts, critic, taken), simulation

    return run_simulated(main())


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_steps_ahead_are_faster_and_no_token_is_older_than_allowed(inputs, ahead):
    """The groups of a run are those that were started, in the order of the prompts, none in vain."""
    steps = 60
    synchronous, _ = simulated(inputs, steps)
    found, simulation = simulated(inputs, steps, max_off_policy_steps=ahead)
    assert max(found.staleness) == ahead
    rows = [row for groups in found.groups for (row,) in conversations_of(groups)]
    assert len(rows) == steps * PER_STEP * SIZE
    assert [name for groups in found.groups for name in ids(groups)] == [name for name, *_ in simulation.started]
    assert simulation.started == [*dict.fromkeys(simulation.started)]
    assert ids(found.groups[50]) == ids(synchronous.groups[50])
    assert synchronous.at[-1] / found.at[-1] >= 1.4


def test_slow_group_delays_no_other_group_while_it_is_ahead(inputs):
    """Its own step waits for it; the responses of the steps after it are complete by then."""

    def found(slow):
        def seconds(prompt, seed, index):
            return 100 * MEDIAN_S if prompt.prompt_id == slow else MEDIAN_S

        return simulated(inputs, 12, seconds=seconds, slots=1000, max_off_policy_steps=3)[0]

    even = found("")
    delayed = found(ids(even.groups[5])[2])
    assert delayed.at[:5] == even.at[:5]
    assert delayed.at[5] == even.at[1] + MEDIAN_S + 100 * MEDIAN_S, "the slow group did not start with step 3"
    assert delayed.at[8] - delayed.at[5] == even.at[8] - even.at[5]


def test_warm_up_of_the_critic_does_not_age_responses(inputs):
    """Its steps do not update the policy: the weights that sampled them are the newest until the step after it."""
    aged, _ = simulated(inputs, 8, max_off_policy_steps=2)
    found, _ = simulated(inputs, 8, max_off_policy_steps=2, critic_warmup_steps=3)
    assert max(aged.staleness[:4]) > 0
    assert found.staleness == [max(0, min(age, step - 3)) for step, age in enumerate(aged.staleness)]


def no_spread_in_every_third(prompt):
    return [float(int(prompt.prompt_id[1:]) % 3 > 0 and i) for i in range(SIZE)]


def test_groups_without_spread_are_replaced_by_the_next_ones(inputs):
    """The steps take the same prompts whatever is in flight; as many prompts are started as are dropped."""
    settings = {"reward": no_spread_in_every_third, "max_resampled": 9}
    on_policy, _ = simulated(inputs, 6, **settings)
    found, simulation = simulated(inputs, 6, **settings, max_off_policy_steps=2)
    assert [ids(groups) for groups in found.groups] == [ids(groups) for groups in on_policy.groups]
    assert found.dropped == on_policy.dropped
    assert max(found.staleness) <= 2
    assert len(simulation.started) == sum(found.dropped) + 6 * PER_STEP, "groups are in flight at the end"
    names = [name for name, *_ in simulation.started]
    for groups in found.groups:
        assert [names[group.number] for group in groups] == ids(groups), "a group's number is not its prompt's place"


def test_groups_without_spread_stay_after_max_resampled_attempts(inputs):
    found, simulation = simulated(inputs, 2, reward=lambda _: [0.0] * SIZE, max_resampled=1)
    assert [len(groups) for groups in found.groups] == found.dropped == [PER_STEP] * 2
    assert len(simulation.started) == 2 * 2 * PER_STEP


def test_scoring_waits_for_the_critic_of_the_step_that_takes_the_group(inputs):
    """The critic's update may be sent after the group is generated; with resampling, a step takes groups early."""

    async def main(**actor):
        critic = InstantCritic()
        rollouts = make_rollouts(Simulation(lambda *_: 1.0), inputs, critic, steps=8, max_off_policy_steps=3, **actor)
        found = await trained(rollouts, critic, range(1, 9))
        for step, groups in enumerate(found.groups, 1):
            versions = {row.score.version for (row,) in conversations_of(groups)}
            assert versions == {max(0, step - 1 - actor["max_staleness"])}
        assert {needed for needed, _ in critic.awaited if needed > 0} == set(range(1, 8 - actor["max_staleness"]))
        assert all(sent >= needed for needed, sent in critic.awaited)

    for max_staleness in (0, 2):
        run_simulated(main(max_staleness=max_staleness))


def test_demanded_version_never_decreases_with_many_waiting_requests():
    async def main():
        critic = RemoteCritic(None, RunSection(), is_trained=True, publish_every=1)
        served = [asyncio.get_running_loop().create_future() for _ in range(3)]

        async def train(step, _):
            return int(await served[step - 1])

        critic.train = train
        for step in (1, 2, 3):
            critic.send(step, {})
        waiting = [asyncio.create_task(critic.wait_served(step)) for step in (3, 2)]
        await asyncio.sleep(0)
        for version, future in enumerate(served, 1):
            future.set_result(version)
        await asyncio.gather(*waiting)
        assert await critic.wait_served(3) == VersionRange(3)

    asyncio.run(main())


def test_saves_that_are_done_are_forgotten():
    """A run of months starts thousands."""

    async def main():
        async def save(**_):
            pass

        critic = RemoteCritic(SimpleNamespace(save=save), RunSection(), is_trained=True, publish_every=1)
        for step in range(5):
            critic.start_save(step, [step])
            await asyncio.gather(*critic._saves)
        assert len(critic._saves) == 1
        await critic.finish_saves([4])

    asyncio.run(main())


def restored(inputs, step, folder):
    """Return the inputs of a run that resumes from the checkpoint of `step`."""
    again = inputs_of(folder / "prompts.jsonl")
    again.restore(step, inputs.state(step))
    return again


def test_resume_skips_no_group_that_was_sampled_before_the_checkpoint(inputs, tmp_path):
    """OpenRLHF#1322: there, a run resumes after the last prompt that was started. The groups keep their seeds."""
    whole, undisturbed = simulated(inputs, 9, max_off_policy_steps=2)
    first, before = simulated(inputs, 9, max_off_policy_steps=2, until=4)
    again = restored(inputs, 4, tmp_path)
    second, after = simulated(again, 9, max_off_policy_steps=2, resumed=True)
    assert [ids(groups) for groups in first.groups + second.groups] == [ids(groups) for groups in whole.groups]
    assert before.started == undisturbed.started[: 6 * PER_STEP], "the groups of steps 5 and 6 are not in flight"
    assert after.started == undisturbed.started[4 * PER_STEP :]


def test_resume_repeats_no_group_after_a_dropped_one(inputs, tmp_path):
    """trl#7274: there, a run resumes from the first group that did not train, although it was dropped."""

    settings = {"reward": no_spread_in_every_third, "max_resampled": 9, "max_off_policy_steps": 2}
    whole, undisturbed = simulated(inputs, 9, **settings)
    first, _ = simulated(inputs, 9, **settings, until=4)
    second, after = simulated(restored(inputs, 4, tmp_path), 9, **settings, resumed=True)
    assert [ids(groups) for groups in first.groups + second.groups] == [ids(groups) for groups in whole.groups]
    num_done = 4 * PER_STEP + sum(first.dropped)
    assert sum(first.dropped) > 0
    assert [name for name, *_ in after.started] == [name for name, *_ in undisturbed.started[num_done:]]


def test_resumed_run_resamples_with_the_same_seeds(inputs, tmp_path):
    settings = {"reward": no_spread_in_every_third, "max_resampled": 9}
    whole, undisturbed = simulated(inputs, 9, **settings)
    resumed, after = simulated(restored(inputs, 7, tmp_path), 9, **settings, resumed=True)
    assert [ids(groups) for groups in resumed.groups] == [ids(groups) for groups in whole.groups[7:]]
    assert len(after.started) > 2 * PER_STEP
    assert after.started == undisturbed.started[-len(after.started) :]


def test_resumed_run_resamples_groups_that_are_too_old_for_their_step(inputs):
    """An earlier process may have been allowed more steps ahead."""
    first, _ = simulated(inputs, 1)
    kept = {}
    for number, (prompt, _) in enumerate(inputs.read(4 * PER_STEP, Positions())):
        rows = (replace(row, prompt=prompt) for (row,) in first.groups[0][0].conversations)
        kept[number] = inputs.seed_of(number // PER_STEP + 1), Group(tuple((row,) for row in rows))
    inputs.positions = {0: Positions()}

    async def main():
        simulation = Simulation(log_normal)
        critic = InstantCritic()
        rollouts = make_rollouts(simulation, inputs, critic, steps=4, max_off_policy_steps=1)
        rollouts.resume(kept)
        found = await trained(rollouts, critic, range(1, 5))
        assert found.staleness == [0, 1, 1, 1]
        assert [name for name, *_ in simulation.started] == ids([*found.groups[2], *found.groups[3]])

    run_simulated(main())


def test_several_ranks_sample_ahead_only_after_the_rest_of_the_step(inputs):
    """Their decoding gives way to no other call."""

    async def main():
        simulation = Simulation(log_normal)
        critic = InstantCritic()
        rollouts = make_rollouts(simulation, inputs, critic, steps=3, max_off_policy_steps=1, ranks=2)
        for step in (1, 2, 3):
            await rollouts.take(step)
            assert len(simulation.started) == step * PER_STEP
            critic.sent(step)
            await rollouts.start_ahead(step)
            assert len(simulation.started) == min(step + 1, 3) * PER_STEP
        await rollouts.cancel()

    run_simulated(main())
