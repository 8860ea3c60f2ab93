"""`python_backend.models.batching`: the plan holds every row once, within its budget, and wastes no forward."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend.models.batching import plan_micro_batches

lengths_of_rows = st.lists(st.integers(1, 40), max_size=60)


def test_golden():
    # Sorted: 1 2 2 3 9. Three rows of 2 cost 6; four of 3 would cost 12; the row of 9 is over the budget: alone.
    assert plan_micro_batches([9, 2, 1, 3, 2], token_budget=6, max_rows=64) == [[2, 1, 4], [3], [0]]
    assert plan_micro_batches([9, 2, 1, 3, 2], token_budget=12, max_rows=64) == [[2, 1, 4, 3], [0]]
    assert plan_micro_batches([5, 5, 5], token_budget=100, max_rows=2) == [[0, 1], [2]]
    assert plan_micro_batches([], token_budget=1, max_rows=1) == []


@given(lengths=lengths_of_rows, token_budget=st.integers(1, 100), max_rows=st.integers(1, 9))
def test_every_row_once_and_within_the_budget(lengths: list[int], token_budget: int, max_rows: int):
    plan = plan_micro_batches(lengths, token_budget=token_budget, max_rows=max_rows)
    order = [row for batch in plan for row in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert order == sorted(order, key=lambda row: (lengths[row], row))  # ascending, equal lengths keep their order
    for batch in plan:
        cost = len(batch) * max(lengths[row] for row in batch)
        assert len(batch) == 1 or cost <= token_budget
        assert 1 <= len(batch) <= max_rows


@given(lengths=lengths_of_rows, token_budget=st.integers(1, 100), max_rows=st.integers(1, 9))
def test_no_batch_could_have_taken_the_next_row(lengths: list[int], token_budget: int, max_rows: int):
    plan = plan_micro_batches(lengths, token_budget=token_budget, max_rows=max_rows)
    for batch, following in itertools.pairwise(plan):
        assert len(batch) == max_rows or (len(batch) + 1) * lengths[following[0]] > token_budget


@pytest.mark.parametrize(("token_budget", "max_rows"), [(0, 1), (1, 0), (-5, 1)])
def test_limits_are_checked(token_budget: int, max_rows: int):
    with pytest.raises(ValueError, match=rf"token_budget \({token_budget}\) and max_rows \({max_rows}\)"):
        plan_micro_batches([1], token_budget=token_budget, max_rows=max_rows)
