"""`client.retry` and `client.ordering`: who may ask again, at whose cost, and in which order."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from python_backend.backoff import LONGEST_PAUSE_S
from python_backend.client.errors import Kind, RequestFailed, Trouble
from python_backend.client.ordering import Turns
from python_backend.client.retry import Attempts, RetryBudget
from python_backend.config import ClientSection

BUSY = Trouble(Kind.BUSY, "refused", "no room")
LOST = Trouble(Kind.LOST, "cannot be reached", "Connection reset by peer", hint="; is it there?")
WRONG = Trouble(Kind.WRONG, "refused", "step: 9")
GONE = Trouble(Kind.UNREACHABLE, "cannot be reached", "Connection refused")


def attempts(retries: int, *, budget: RetryBudget | None = None, **settings: float) -> Attempts:
    return Attempts("critic", ClientSection(**settings), budget or RetryBudget(1.0, 100), retries=retries)  # type: ignore[arg-type]


# ---- the budget ----


def test_the_budget_saves_up_no_more_than_the_reserve():
    budget = RetryBudget(0.5, 2)
    for _ in range(1000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_where_everything_fails_retries_are_a_fraction_of_the_requests():
    budget, retries = RetryBudget(0.25, 10), 0
    for _ in range(1000):
        budget.earn()
        while budget.spend():
            retries += 1
    assert retries == 10 + (1000 - 1) // 4  # the first was earned into a full bucket


# ---- one request ----


@pytest.mark.parametrize(
    ("failures", "retries", "reserve", "error"),
    [
        ([BUSY] * 2, 2, 2, None),
        ([BUSY] * 3, 2, 2, r"^critic at here:1 refused after 3 attempts: no room$"),
        ([BUSY] * 2, 5, 1, r"refused after 2 attempts: no room; not retried: .*retry_budget is exhausted"),
        ([LOST], 1, 0, None),
        ([LOST] * 2, 1, 0, r"^critic at here:1 cannot be reached after 2 attempts: Connection reset by peer; is it"),
        ([GONE] * 100, 0, 0, None),
        ([WRONG], 5, 9, r"^critic at here:1 refused: step: 9$"),
    ],
)
def test_what_each_failure_costs(failures: list[Trouble], retries: int, reserve: int, error: str | None):
    one = attempts(retries, budget=RetryBudget(0.0, reserve))
    record = {BUSY: one.pause_s, WRONG: one.pause_s, LOST: one.moves_on, GONE: one.moves_on}
    for trouble in failures[:-1]:
        record[trouble](trouble, "here:1")
    with pytest.raises(RequestFailed, match=error) if error else contextlib.nullcontext():
        record[failures[-1]](failures[-1], "here:1")
    assert one.budget.spend() == (failures == [WRONG]), "only what pauses takes from it"


def test_pauses_double_up_to_a_limit_with_jitter():
    one, longest = attempts(20, backoff_s=1.0), [1.0, 2.0, 4.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    pauses = [one.pause_s(BUSY, "here:1") for _ in longest]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    firsts = {attempts(1, backoff_s=1.0).pause_s(BUSY, "here:1") for _ in range(20)}
    assert len(firsts) > 10, "those that failed together come back one by one"


def test_servers_that_are_ready_and_gone_when_asked_end_in_an_error(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("python_backend.client.retry.time.monotonic", lambda: now)
    one = attempts(5, max_outage_s=60)
    one.moves_on(GONE, "here:1")
    now += 50
    one.moves_on(LOST, "here:1")  # it was reached: the clock begins anew
    one.moves_on(GONE, "here:1")
    now += 50
    one.moves_on(GONE, "here:1")
    now += 11
    with pytest.raises(RequestFailed, match=r"cannot be reached after 5 attempts: Connection refused"):
        one.moves_on(GONE, "here:1")


# ---- training requests keep their order ----


class Line:
    """Training requests a, b, …, and when each came to be sent."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.writer: str | None = "one"
        self.sent: list[str] = []
        self.orders: dict[str, asyncio.Queue[str]] = {}

    def add(self, name: str) -> asyncio.Task[None]:
        self.orders[name] = asyncio.Queue()
        return asyncio.create_task(self._request(name))

    async def tell(self, name: str, order: str) -> None:
        """`lost`: its attempt failed; `done`: it is answered."""
        self.orders[name].put_nowait(order)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def _request(self, name: str) -> None:
        with self.turns.join() as turn:
            while True:
                await self.turns.come(turn, lambda: self.writer)
                with self.turns.under_way(turn, self.writer or "?"):
                    self.sent.append(name)
                    if await self.orders[name].get() == "done":
                        return


async def line_of(*names: str) -> tuple[Line, list[asyncio.Task[None]]]:
    line = Line()
    tasks = []
    for name in names:
        tasks.append(line.add(name))
        await line.settle()
    return line, tasks


async def test_a_step_is_sent_while_the_one_before_is_under_way():
    line, tasks = await line_of("a", "b")
    assert line.sent == ["a", "b"]
    await line.tell("b", "done")
    await line.tell("a", "done")
    await asyncio.gather(*tasks)


async def test_what_is_repeated_waits_for_the_answer_of_those_before():
    line, tasks = await line_of("a", "b")
    await line.tell("b", "lost")
    assert line.sent == ["a", "b"]
    await line.tell("a", "lost")
    assert line.sent == ["a", "b", "a"]
    late = line.add("c")
    await line.settle()
    assert line.sent == ["a", "b", "a"], "nothing overtakes a step that may not have arrived"
    await line.tell("a", "done")
    await line.tell("b", "done")
    await line.tell("c", "done")
    await asyncio.gather(*tasks, late)
    assert line.sent == ["a", "b", "a", "b", "c"]


async def test_the_next_step_goes_to_another_server_only_after_the_answer():
    line, tasks = await line_of("a")
    line.writer = "two"  # the first is lost, which the request to it has not noticed
    tasks.append(line.add("b"))
    await line.settle()
    assert line.sent == ["a"]
    await line.tell("a", "lost")
    assert line.sent == ["a", "a"]
    await line.tell("a", "done")
    await line.tell("b", "done")
    await asyncio.gather(*tasks)
    assert line.sent == ["a", "a", "b"]


async def test_those_that_were_held_up_go_one_by_one():
    """Sent in the same moment, the last might arrive first."""

    line, tasks = await line_of("a")
    await line.tell("a", "lost")
    tasks += [line.add("b"), line.add("c")]
    await line.settle()
    await line.tell("a", "done")
    assert line.sent == ["a", "a", "b"]
    await line.tell("b", "done")
    assert line.sent == ["a", "a", "b", "c"]
    await line.tell("c", "done")
    await asyncio.gather(*tasks)


async def test_a_request_that_is_given_up_leaves_the_line():
    line, (first, second) = await line_of("a", "b")
    await line.tell("b", "lost")
    first.cancel()
    await line.settle()
    assert line.sent == ["a", "b", "b"]
    await line.tell("b", "done")
    await second
