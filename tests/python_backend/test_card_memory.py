"""Work that runs out of a card's memory is repeated in halves; other errors are not."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from python_backend.models.card.copies import to_device
from python_backend.models.card.errors import is_device_error, is_out_of_memory
from python_backend.models.card.memory import Halving, OutOfMemory

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."
REMEDY = "lower max_length"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:99, unhandled cuda error\nLast error:\nCuda failure 2 "


def fits(most: int) -> Callable[[Sequence[int]], list[int]]:
    """Return work on rows of which a card holds at most `most`."""

    def work(rows: Sequence[int]) -> list[int]:
        if len(rows) > most:
            raise torch.OutOfMemoryError(FULL)
        return list(rows)

    return work


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_every_row_is_done_once_and_in_order_whatever_fits(most: int):
    halving = Halving("critic.token_budget", remedy=REMEDY)
    parts = halving.in_parts(fits(most), range(20))
    assert [row for part in parts for row in part] == list(range(20))
    assert halving.count == len(parts) - 1
    assert max(map(len, parts)) <= most


def test_the_size_stays_halved(caplog: pytest.LogCaptureFixture):
    halving, calls = Halving("actor.policy.token_budget", 1000, remedy=REMEDY), list[int]()

    def work(size: int) -> int:
        calls.append(size)
        fits(30)(range(min(size, 100)))
        return size

    with caplog.at_level(logging.WARNING):
        assert [halving.repeat(work, least=7, most=100) for _ in range(2)] == [25, 25]
    assert calls == [1000, 50, 25, 25]
    assert halving.count == 2
    assert all("actor.policy.token_budget" in line and "2.00 GiB" not in line for line in caplog.messages)


def test_what_fits_not_even_alone_is_an_error_that_names_a_remedy_and_is_not_remembered():
    halving = Halving("trainer.token_budget", 64, remedy=REMEDY)
    with pytest.raises(OutOfMemory, match=r"one row alone.*CUDA out of memory.*; lower max_length$"):
        halving.in_parts(fits(0), range(4))
    with pytest.raises(OutOfMemory, match=r"one row alone.*; lower max_length$"):
        halving.repeat(lambda size: fits(1)(range(size)), least=10, most=64)
    assert halving.size == 64  # other rows may fit
    assert (halving.new(), halving.new()) == (2 + 3, 0)


def test_a_failed_attempt_holds_no_memory_while_it_is_repeated():
    held: list[weakref.ref[torch.Tensor]] = []

    def work(rows: Sequence[int]) -> int:
        gc.collect()
        assert all(tensor() is None for tensor in held)
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        return len(fits(1)(rows))

    assert Halving("x", remedy=REMEDY).in_parts(work, range(4)) == [1, 1, 1, 1]


def test_other_errors_are_raised_at_once():
    halving = Halving("x", 8, remedy=REMEDY)

    def work(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for attempt in (lambda: halving.in_parts(work, [1, 2]), lambda: halving.repeat(work, least=1, most=8)):
        with pytest.raises(RuntimeError, match="illegal"):
            attempt()
    assert halving.count == 0


@pytest.mark.parametrize(
    ("error", "is_full", "is_broken"),
    [
        (torch.OutOfMemoryError(FULL), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory", 2), True, False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered", 710), False, True),
        (RuntimeError(NCCL + "'out of memory'"), True, False),
        (RuntimeError(NCCL.replace("2", "700") + "'an illegal memory access was encountered'"), False, True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_errors_of_a_card_are_told_apart(error: Exception, is_full: bool, is_broken: bool):
    assert (is_out_of_memory(error), is_device_error(error)) == (is_full, is_broken)


def test_a_cpu_gets_the_arrays_themselves():
    array, tensor = np.arange(6).reshape(2, 3), torch.ones(2, dtype=torch.bool)
    copied, same = to_device(torch.device("cpu"), array, tensor)
    assert copied.data_ptr() == array.ctypes.data
    assert same is tensor
