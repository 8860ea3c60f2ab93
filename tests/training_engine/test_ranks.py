"""The ranks of a training job: operations, failures that reach all ranks, broadcasts, and an idle group."""

import os
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from rlhf_triton.errors import RankFailed
from rlhf_triton.training_engine.ranks import OPERATIONS_KEPT, Operations


@dataclass(frozen=True)
class Record:
    """The values that rank 0 broadcasts."""

    tokens: torch.Tensor
    mask: torch.Tensor | None
    values: np.ndarray


def operations(ranks, idle_s):
    """Run two operations with a pause between them that exceeds the group's timeout."""
    done = []

    def add(number):
        total = torch.tensor([number])
        dist.all_reduce(total)
        done.append(int(total))

    if ranks.rank:
        ranks.operations.follow({"add": add})
        return done
    for number in (1, 2):
        ranks.operations.announce("add", number=number)
        add(number)
        time.sleep(idle_s * (number == 1))
    return done


def failures(ranks):
    """Return what each rank receives after a disk error on rank 1, an error on rank 0, and work that succeeds."""
    seen = []
    for failing, error in ((1, OSError("disk full")), (0, RankFailed("no such model")), (None, None)):

        def work(failing=failing, error=error):
            if ranks.rank == failing:
                raise error
            return ranks.rank

        try:
            seen.append(ranks.run_on_all_ranks(work))
        except (OSError, RankFailed) as caught:
            seen.append((type(caught).__name__, str(caught)))
    return seen


def broadcasts(ranks):
    """Records that rank 0 sends twice."""
    sent = Record(torch.arange(3), torch.tensor([[True, False]]), np.random.default_rng(ranks.rank).random(2))
    first = ranks.broadcast(sent if ranks.rank == 0 else None)
    assert type(first.values) is np.ndarray
    second = ranks.broadcast(Record(torch.zeros(0), None, sent.values) if ranks.rank == 0 else None)
    return [None if value is None else value.tolist() for each in (first, second) for value in vars(each).values()]


@pytest.mark.slow
def test_idle_group_runs_operations_after_its_timeout():
    assert on_ranks(2, operations, 6.0, group_timeout_s=5) == [[2, 4], [2, 4]]


def test_operation_log_is_bounded():
    store = dist.HashStore()
    operations = Operations(0, store)
    for _ in range(OPERATIONS_KEPT + 100):
        operations.announce("add", number=1)
    assert store.num_keys() <= OPERATIONS_KEPT + 1


def errors_and_broadcasts(ranks):
    """Run both in one start of the processes."""
    return failures(ranks), broadcasts(ranks)


def test_one_ranks_error_and_broadcast_reach_every_rank():
    (first, sent), (second, received) = on_ranks(2, errors_and_broadcasts)
    assert first == [("OSError", "rank 1: disk full"), ("RankFailed", "no such model"), 0]
    assert second == [("OSError", "disk full"), ("RankFailed", "rank 0: no such model"), 1]
    assert sent == received
    assert (sent[:2], sent[3:5]) == ([[0, 1, 2], [[True, False]]], [[], None])


@pytest.mark.parametrize(
    ("lost", "errors"),
    [(0, "rank 0: died .*; rank 1: RankLost: rank 0 has ended"), (1, "rank 0: .*; rank 1: died with exit code 1")],
)
def test_a_dead_rank_ends_the_job(lost, errors):
    with pytest.raises(RuntimeError, match=errors):
        on_ranks(2, dying, lost)


def dying(ranks, lost):
    """Let rank `lost` die once both have joined, while the other one waits for it."""
    dist.barrier()
    if ranks.rank == lost:
        os._exit(1)
    if ranks.rank:
        ranks.operations.follow({})
    else:
        ranks.run_on_all_ranks(lambda: None)
