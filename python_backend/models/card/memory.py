"""The memory of a card: how much is used; work that ran out of it is repeated with half as much at a time.

Only the out-of-memory error is handled here. Halving a micro-batch changes no result beyond rounding.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from python_backend.errors import RlhfError
from python_backend.models.card.errors import is_out_of_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def card_bytes(device: torch.device) -> dict[str, int]:
    """Return this process's memory of a card, and the card's, in bytes; {} on a CPU."""
    if device.type == "cpu":
        return {}
    return {
        "card_bytes": torch.cuda.memory_allocated(device),
        "card_peak_bytes": torch.cuda.max_memory_allocated(device),
        "card_reserved_bytes": torch.cuda.memory_reserved(device),
        "card_size_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


class OutOfMemory(RlhfError):
    """The card's memory is too small even for the smallest part of the work."""


class RankOutOfMemory(RlhfError):
    """A rank has run out of its card's memory while the others wait for it in a collective."""


class Halving:
    """How much one model does at a time on its card, and how often that had to be halved."""

    def __init__(self, setting: str, size: int = 0, *, remedy: str, alone: bool = True) -> None:
        """
        Args:
            setting: the configuration key to lower, for the log and for errors.
            size: how much is done at a time (tokens, rows or slots), for `repeat`.
            remedy: what helps if even one row alone does not fit, e.g. "lower max_length".
            alone: other ranks take no part in the work of `repeat`. If they do, they wait for this one in a collective,
                so its errors are raised as they are; see `on_rank`.
        """
        self.setting, self.size, self._remedy, self._alone = setting, size, remedy, alone
        self.count = self._told = 0

    def new(self) -> int:
        """Return how often the size has been halved since the last call."""
        new, self._told = self.count - self._told, self.count
        return new

    def repeat(self, work: Callable[[int], T], *, least: int, most: int) -> T:
        """Return `work(size)`; whenever memory does not suffice, halve `size`, for good, and call `work` again.

        Args:
            work: does everything anew when it is called again.
            least: the smallest size of use, e.g. the tokens of the longest row.
            most: the size from which on everything is done at once.

        Raises:
            OutOfMemory: `work(least)` does not fit either; `size` is what it was.
        """
        before = self.size
        if not self._alone:
            return work(self.size)
        while True:
            try:
                return work(self.size)
            except RuntimeError as error:
                reason = _reason_of(error)
            now = min(self.size, most)
            self.size = max(least, now // 2) if now > least else before
            self._halve(reason, now, now > least)

    def in_parts(self, work: Callable[[Sequence[R]], T], rows: Sequence[R]) -> list[T]:
        """Return the results of `work` on all rows, or, where memory does not suffice, on each half of them in turn.

        Raises:
            OutOfMemory: one row alone does not fit.
        """
        try:
            return [work(rows)]
        except RuntimeError as error:
            reason = _reason_of(error)
        self._halve(reason, len(rows), len(rows) > 1)
        half = len(rows) // 2
        return self.in_parts(work, rows[:half]) + self.in_parts(work, rows[half:])

    def _halve(self, reason: str, size: int, can_halve: bool) -> None:
        # Not inside `except`: its error holds the frames, and with them the tensors, of the pass that failed.
        torch.cuda.empty_cache()
        if not can_halve:
            raise OutOfMemory(f"not even one row alone fits into the card's memory ({reason}); {self._remedy}")
        self.count += 1
        logger.warning(
            "%s; repeating with half of %d at a time (%s), as %d times so far", reason, size, self.setting, self.count
        )


@contextlib.contextmanager
def on_rank(rank: int | None, device: object, setting: str) -> Iterator[None]:
    """Name the rank, of several, and the setting if the block runs out of memory; log the traceback.

    Raises:
        RankOutOfMemory: the ranks cannot go on, because one cannot repeat its part of a collective alone.
    """
    try:
        yield
    except RuntimeError as error:
        who, reason = "this process" if rank is None else f"rank {rank}", _reason_of(error)
        logger.error("no memory:", exc_info=True)
        raise RankOutOfMemory(f"{who} has run out of the memory of {device} ({reason}); lower {setting}") from error


def _reason_of(error: RuntimeError) -> str:
    """Return the first sentence of an out-of-memory error; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0].split(". ")[0]
