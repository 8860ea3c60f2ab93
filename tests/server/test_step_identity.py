"""Steps that do not fit, over HTTP against the real server: each is refused by name, and what follows goes on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from bare_client import Refused, ask, ask_all
from live_system import KEY, TRAINING_KEY, System, identity, stop_process, training_inputs

from python_backend.client.client import TritonClient
from python_backend.config import ClientSection
from python_backend.wire.contract import CRITIC_SAVE, CRITIC_TRAIN
from trainer.checkpoint import CheckpointFolder


def send(system: System, step: int, seed: int, run_id: str = "test") -> dict[str, np.ndarray]:
    return ask(system.run.url, CRITIC_TRAIN, {**training_inputs(seed=seed), **identity(run_id, step)}, headers=KEY)


def refused(system: System, step: int, seed: int, run_id: str = "test") -> str:
    """The message of a request that breaks the contract."""
    with pytest.raises(Refused) as caught:
        send(system, step, seed, run_id)
    assert caught.value.code == "400"
    return caught.value.message


def test_steps_that_do_not_fit_are_refused_by_name(live: System) -> None:
    first = live.run.next_step()
    answer = send(live, first, seed=60)
    last = f"the last step of run 'test' is {first}"
    assert f"step: {first + 2}, but {last}; send step {first + 1} first" in refused(live, first + 2, seed=62)
    other = refused(live, first, seed=99)
    assert f"step: {first} of run 'test' was already sent with other content; the last step is {first}" in other
    assert "run_id: 'stranger', but this critic belongs to run 'test'" in refused(live, first + 1, 61, "stranger")
    again = send(live, first, seed=60)
    assert {name: array.tolist() for name, array in again.items()} == {n: a.tolist() for n, a in answer.items()}
    second = ask(live.run.url, CRITIC_TRAIN, training_inputs(seed=61), headers=KEY)  # without a step: the next one
    assert live.run.store.manifest(int(second["weights_version"][0])).step == first + 1
    send(live, first + 2, seed=62)
    trained = [line["step"] for line in live.run.critic_updates(up_to=first + 2)]
    assert trained[-3:] == [first, first + 1, first + 2]


def test_clients_without_steps_never_share_one(live: System) -> None:
    first = live.run.next_step()
    requests = [(CRITIC_TRAIN, training_inputs(seed=70 + i)) for i in range(3)]
    answers = ask_all(live.run.url, requests, headers=KEY)
    steps = [live.run.store.manifest(int(answer["weights_version"][0])).step for answer in answers]
    assert sorted(steps) == [first, first + 1, first + 2]


def test_the_critic_keeps_what_the_client_says_it_needs(live: System) -> None:
    folder = CheckpointFolder(live.run.config.run.dir / "checkpoints" / "critic")
    steps: list[int] = []

    async def save_and_say() -> None:
        settings = ClientSection(retries=0)
        async with TritonClient(live.run.url, settings, training_key=TRAINING_KEY) as client:
            for seed in (80, 81, 82):
                steps.append(live.run.next_step())
                await client.train(training_inputs(seed=seed), run_id="test", step=steps[-1])
                await client.save(run_id="test", step=steps[-1], keep_steps=[steps[0], steps[-1]])

    asyncio.run(save_and_say())
    assert folder.steps() == [steps[0], steps[2]]
    with pytest.raises(Refused) as caught:
        ask(live.run.url, CRITIC_SAVE, {"keep_steps": np.asarray([4, -1])}, headers=KEY)
    assert "keep_steps[1]: -1, must be at least 0" in caught.value.message


def test_a_rewind_that_arrives_once_more_does_not_rewind_the_live_run(live: System) -> None:
    """As where a server hangs with the first attempt, and another one has done the second."""
    first = live.run.next_step()
    send(live, first, seed=90)

    async def rewind_and_train() -> str:
        settings = ClientSection(retries=0)
        async with TritonClient(live.run.url, settings, training_key=TRAINING_KEY) as client:
            await client.rewind(run_id="test", step=first)
            await client.train(training_inputs(seed=91), run_id="test", step=first + 1)
            return str(client._sender)

    sender = asyncio.run(rewind_and_train())
    late = {"rewind_to": np.asarray([first])}
    ask(live.run.url, CRITIC_SAVE, late, headers={**KEY, "X-Triton-Sender": sender})
    assert live.run.journal.last_step() == first + 1


@pytest.mark.slow
def test_a_second_sidecar_ends_with_one_sentence(live: System) -> None:
    second = live.run.start("second-sidecar", module="trainer")
    try:
        assert second.process.wait(120) == 2
    finally:
        stop_process(second)
    lines = second.log_path.read_text().splitlines()
    root = live.run.journal.root
    assert lines == [
        f"error: another sidecar follows the journal in {root}; a critic can have only one: stop the other one first"
    ]
