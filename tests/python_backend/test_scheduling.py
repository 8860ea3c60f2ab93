"""The order of rows: oldest first, mates of its length, no starvation, long requests let others pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from python_backend.serving.scheduling import LONG_REQUEST_SHARE, PRESSING_FORWARDS, RowPool


def pool(*, budget: int = 100, rows: int = 8, overhead: int = 10) -> RowPool[str]:
    return RowPool(token_budget=budget, max_rows=rows, overhead_tokens=overhead)


def drain(waiting: RowPool[str]) -> list[list[tuple[str, int]]]:
    batches = []
    while batch := waiting.take():
        batches.append(batch)
    return batches


def test_single_rows_leave_in_order_of_arrival() -> None:
    waiting = pool(overhead=0)
    for name, length in (("a", 50), ("b", 3), ("c", 90), ("d", 20)):
        waiting.add(name, [length])
    assert drain(waiting) == [[("a", 0)], [("b", 0)], [("c", 0)], [("d", 0)]]


def test_rows_of_nearly_the_oldest_rows_length_join_it() -> None:
    waiting = pool()
    for name, length in (("a", 20), ("b", 60), ("c", 25), ("d", 15), ("e", 21)):
        waiting.add(name, [length])
    assert waiting.take() == [("d", 0), ("a", 0), ("e", 0), ("c", 0)]  # 4 x 25 tokens; "b" would pad 3 x 35 more
    assert waiting.take() == [("b", 0)]


def test_a_row_joins_only_while_padding_costs_less_than_a_forward() -> None:
    waiting = pool(overhead=10)
    waiting.add("a", [30])
    waiting.add("b", [19])  # 11 of padding
    assert drain(waiting) == [[("a", 0)], [("b", 0)]]
    waiting.add("a", [30])
    waiting.add("b", [20])
    assert drain(waiting) == [[("b", 0), ("a", 0)]]


def test_a_longer_row_pads_every_row_that_is_already_there() -> None:
    waiting = pool(overhead=10)
    for name in "abc":
        waiting.add(name, [20])
    waiting.add("d", [24])  # 3 rows x 4 tokens
    assert drain(waiting) == [[("a", 0), ("b", 0), ("c", 0)], [("d", 0)]]


def test_budget_and_row_limit() -> None:
    waiting = pool(budget=40, rows=3)
    waiting.add("many", [10] * 7)
    assert [len(batch) for batch in drain(waiting)] == [3, 3, 1]
    waiting.add("wide", [20] * 3)
    assert [len(batch) for batch in drain(waiting)] == [2, 1]
    waiting.add("longer than the budget", [500, 500])
    assert [len(batch) for batch in drain(waiting)] == [1, 1]


def test_short_requests_pass_between_the_forwards_of_a_long_one() -> None:
    waiting = pool(budget=10, overhead=0)
    waiting.add("long", [10] * 100)
    served = [waiting.take()[0][0] for _ in range(5)]
    assert served == ["long"] * 5
    waiting.add("short", [9])
    assert [waiting.take()[0][0] for _ in range(3)] == ["short", "long", "long"]


def test_a_long_request_is_served_under_a_flood_of_short_ones() -> None:
    waiting = pool(budget=10, overhead=0)
    waiting.add("long", [10] * 20)
    served = []
    for number in range(200):
        waiting.add(f"short {number}", [9])
        served.append(waiting.take()[0][0])
    share = served.count("long") / len(served)
    assert served.count("long") == 20 or 0.8 / LONG_REQUEST_SHARE < share < 1.5 / LONG_REQUEST_SHARE


def test_discard_forgets_a_request() -> None:
    waiting = pool(overhead=100)
    waiting.add("a", [5, 6])
    waiting.add("b", [7])
    waiting.discard("a")
    assert (len(waiting), waiting.tokens, waiting.oldest()) == (1, 7, "b")
    assert drain(waiting) == [[("b", 0)]]
    assert waiting.take() == []


def test_rows_that_may_not_join_wait_for_their_turn() -> None:
    waiting = pool()
    for name in ("old a", "new b", "old c"):
        waiting.add(name, [10])
    assert waiting.take(lambda name: name.startswith("old")) == [("old a", 0), ("old c", 0)]
    assert waiting.take() == [("new b", 0)]


@given(
    requests=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), max_size=12),
    budget=st.integers(1, 400),
    rows=st.integers(1, 9),
    overhead=st.integers(0, 200),
    discarded=st.sets(st.integers(0, 11)),
)
def test_each_row_leaves_once_within_the_limits(
    requests: list[list[int]], budget: int, rows: int, overhead: int, discarded: set[int]
) -> None:
    waiting: RowPool[int] = RowPool(token_budget=budget, max_rows=rows, overhead_tokens=overhead)
    for owner, lengths in enumerate(requests):
        waiting.add(owner, lengths)
    for owner in discarded:
        waiting.discard(owner)
    kept = {owner: lengths for owner, lengths in enumerate(requests) if owner not in discarded}
    assert waiting.tokens == sum(map(sum, kept.values()))
    left = []
    while waiting.oldest() is not None:
        oldest = waiting.oldest()
        batch = waiting.take()
        assert any(owner == oldest for owner, _ in batch)
        width = max(requests[owner][index] for owner, index in batch)
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * width <= budget
        left += batch
    assert sorted(left) == [(owner, index) for owner, lengths in kept.items() for index in range(len(lengths))]
    assert (len(waiting), waiting.tokens, waiting.pressing_tokens) == (0, 0, 0)


def test_a_long_request_presses_no_more_than_a_few_forwards() -> None:
    waiting = pool(budget=10, overhead=0)
    waiting.add("long", [10] * 100)
    waiting.add("short", [7])
    assert (waiting.tokens, waiting.pressing_tokens) == (1007, PRESSING_FORWARDS * 10 + 7)
    for _ in range(98):
        waiting.take()
    assert (waiting.tokens, waiting.pressing_tokens) == (30, 30)
