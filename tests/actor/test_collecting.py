"""`collect`: what waits for what, and that the rows' order of ending never shows."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_checkpoint, make_tokenizer

from actor.data.rollout import Prompt, Rollout, ScoredRollout, Scores
from actor.policy.policy import Policy
from actor.run.collection import collect
from actor.run.metrics import Timers
from actor.scoring.reference import OwnReference
from python_backend.client.errors import RequestFailed
from python_backend.client.served import ServedModel
from tests.support.settings import actor_section

PROMPTS = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate([[5, 6, 7], [8], [9, 10, 11, 12], [14]])]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)
    made = Policy.of(actor_section(checkpoint=folder, max_new_tokens=12, generation_batch_size=2))
    with torch.no_grad():
        made.model.lm_head.weight[made.eos_ids[0]] += 0.5  # responses end now and then
    return made


class Server:
    """Rewards a row with the sum of its tokens, each of its values with the token; answers when it is let."""

    has_critic = True
    rows_per_request = 1
    reward = ServedModel()

    def __init__(self, answer: Callable[[], Any] = lambda: None) -> None:
        self.asked = 0
        self._answer = answer

    async def score(self, rows: Rollout, group_size: int = 1) -> Scores:
        self.asked += len(rows.prompts)
        answer = self._answer()
        if answer is not None:
            await answer
        tokens = rows.tokens.float()
        count = len(rows.prompts)
        return Scores(tokens.sum(-1), tokens, torch.zeros(count).long(), torch.ones(count).bool(), [])


async def run(policy: Policy, server: Server, ready: asyncio.Future[Any], wrap: Any = None) -> ScoredRollout:
    with ThreadPoolExecutor(1) as executor:

        async def in_thread(function: Any, *args: Any, **kwargs: Any) -> Any:
            call = wrap(function) if wrap else function
            return await asyncio.get_running_loop().run_in_executor(executor, lambda: call(*args, **kwargs))

        return await collect(
            policy,
            server,
            OwnReference(policy),
            PROMPTS,
            seed=2,
            ready=ready,
            in_thread=in_thread,
            timers=Timers(),  # type: ignore[arg-type]
        )


def done() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def when_a_row_ends(policy: Policy, hook: Callable[[Callable[..., None], int, Rollout], object]) -> Callable[..., Any]:
    """Have generation call `hook` with the callback for a row that has ended, instead of calling it."""

    def wrap(function: Any) -> Any:
        if function != policy.generate:
            return function

        def generate(*args: Any, finished: Any, **kwargs: Any) -> Any:
            return function(*args, finished=functools.partial(hook, finished), **kwargs)

        return generate

    return wrap


def test_scores_belong_to_their_rows(policy: Policy) -> None:
    order: list[int] = []

    def note(finished: Callable[..., None], index: int, row: Rollout) -> None:
        order.append(index)
        finished(index, row)

    async def main() -> None:
        scored = await run(policy, Server(), done(), when_a_row_ends(policy, note))
        assert order != sorted(order), "the rows ended in the order of their prompts, which shows nothing"
        rollout = scored.rollout
        assert [prompt.prompt_id for prompt in rollout.prompts] == ["0", "1", "2", "3"]
        assert len(set(rollout.lengths.tolist())) > 1
        for i, row in enumerate(rollout.rows()):
            assert row[: PROMPTS[i].tokens.size].tolist() == PROMPTS[i].tokens.tolist()
            assert scored.scores.rewards[i] == row.sum()
            assert scored.scores.values[i, : len(row)].tolist() == row.tolist()

    asyncio.run(main())


def test_a_row_is_scored_while_others_are_written(policy: Policy) -> None:
    """The first row's end waits for its request: were rows sent when all are written, it would wait in vain."""
    asked = threading.Event()

    def hold(finished: Callable[..., None], index: int, row: Rollout) -> None:
        finished(index, row)
        assert asked.wait(PATIENCE_S), "no row was sent before the last was written"

    async def main() -> None:
        scored = await run(policy, Server(asked.set), done(), when_a_row_ends(policy, hold))
        assert scored.scores.scored.all()

    asyncio.run(main())


def test_only_scoring_waits_for_the_critic(policy: Policy) -> None:
    calls: list[str] = []
    computed = threading.Event()

    def wrap(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            calls.append(function.__name__)
            if calls == ["generate", "sampled_logprobs", "logprobs"]:
                computed.set()
            return result

        return call

    async def main() -> None:
        server, ready = Server(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(run(policy, server, ready, wrap))
        assert await asyncio.to_thread(computed.wait, PATIENCE_S), f"only {calls} came about without the critic"
        assert server.asked == 0
        ready.set_result(None)
        assert (await task).scores.scored.all()
        assert server.asked == len(PROMPTS)

    asyncio.run(main())


def test_a_critic_that_fails_ends_it_and_leaves_nothing_behind(policy: Policy) -> None:
    async def main() -> None:
        ready = asyncio.get_running_loop().create_future()
        ready.set_exception(RequestFailed("the critic's update was refused"))
        with pytest.raises(RequestFailed, match="was refused"):
            await run(policy, Server(), ready)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_cancelled_it_stops_writing_and_asking(policy: Policy) -> None:
    """As at the end of a run whose next rollout is under way."""
    written, go_on = threading.Event(), threading.Event()

    def hold(finished: Callable[..., None], index: int, row: Rollout) -> None:
        written.set()
        assert go_on.wait(PATIENCE_S)
        finished(index, row)

    async def main() -> None:
        server = Server(lambda: asyncio.sleep(PATIENCE_S))
        task = asyncio.create_task(run(policy, server, done(), when_a_row_ends(policy, hold)))
        assert await asyncio.to_thread(written.wait, PATIENCE_S)
        task.cancel()
        threading.Timer(0.1, go_on.set).start()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.asked == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
