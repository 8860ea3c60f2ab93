"""GPU memory: how much is used, and retries of work that ran out of it, with half as much at a time.

Only out-of-memory errors are handled here. Halving a micro-batch changes no result beyond rounding.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import torch

from rlhf_triton.errors import RlhfError
from rlhf_triton.models.device_errors import is_out_of_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")


def gpu_bytes(device: torch.device) -> dict[str, int]:
    """Return this process's memory use on a GPU, and the GPU's total memory, in bytes; {} on a CPU."""
    if device.type == "cpu":
        return {}
    return {
        "gpu_bytes": torch.cuda.memory_allocated(device),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(device),
        "gpu_reserved_bytes": torch.cuda.memory_reserved(device),
        "gpu_size_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


class OutOfMemory(RlhfError):
    """The GPU's memory is too small for even the smallest part of the work."""


class RankOutOfMemory(RlhfError):
    """A rank ran out of GPU memory while other ranks wait for it in a collective."""


@dataclass(eq=False)
class MemoryBudget:
    """How much work a model does at a time on its GPU; halved whenever the GPU runs out of memory."""

    setting: str
    """The configuration key to lower, for log and errors."""
    size: int = 0
    """Amount of work at a time (tokens, rows or slots), for `run`."""
    _: KW_ONLY
    remedy: str
    """What to do if even a single row does not fit, e.g. "lower max_length"."""
    alone: bool = True
    """Whether `run` can retry. False if other ranks take part in the work: they wait for this one in a collective, so
    its errors propagate; see `on_rank`."""
    num_halvings: int = 0
    _num_reported: int = 0

    def new_halvings(self) -> int:
        """Return the number of halvings since the last call."""
        new = self.num_halvings - self._num_reported
        self._num_reported = self.num_halvings
        return new

    def run(self, work: Callable[[int], T], *, least: int, most: int | Callable[[], int]) -> T:
        """Return `work(size)`; on out-of-memory, halve `size` permanently and call `work` again.

        Args:
            work: does all work, with at most `size` at a time; called again, it starts over.
            least: the smallest possible size, e.g. the tokens of the longest row.
            most: the size at which all work is done at once; a function if work is added meanwhile.

        Raises:
            OutOfMemory: even `work(least)` does not fit; `size` is restored.
        """
        before = self.size
        if not self.alone:
            return work(self.size)
        while True:
            try:
                return work(self.size)
            except RuntimeError as error:
                reason = _reason_of(error)
            now = min(self.size, most() if callable(most) else most)
            self.size = max(least, now // 2) if now > least else before
            self._halve(reason, now, now > least)

    def run_in_parts(self, work: Callable[[Sequence[R]], T], rows: Sequence[R]) -> list[T]:
        """Return the results of `work` on all rows or, on out-of-memory, on each half in turn.

        Raises:
            OutOfMemory: a single row does not fit.
        """
        try:
            return [work(rows)]
        except RuntimeError as error:
            reason = _reason_of(error)
        self._halve(reason, len(rows), len(rows) > 1)
        half = len(rows) // 2
        return self.run_in_parts(work, rows[:half]) + self.run_in_parts(work, rows[half:])

    def _halve(self, reason: str, size: int, can_halve: bool) -> None:
        # Called outside `except`: the error references the frames, and thus the tensors, of the failed pass.
        torch.cuda.empty_cache()
        if not can_halve:
            raise OutOfMemory(f"not even a single row fits into the GPU's memory ({reason}); {self.remedy}")
        self.num_halvings += 1
        logger.warning(
            "%s; retrying with half of %d at a time (%s), halved %d times so far",
            reason,
            size,
            self.setting,
            self.num_halvings,
        )


@contextlib.contextmanager
def on_rank(rank: int | None, device: object, setting: str) -> Iterator[None]:
    """If the block runs out of GPU memory, log the traceback and raise an error that names the rank and the setting.

    Raises:
        RankOutOfMemory: this rank ran out of memory; it cannot retry alone, because others wait in a collective.
    """
    try:
        yield
    except RuntimeError as error:
        who = "this process" if rank is None else f"rank {rank}"
        reason = _reason_of(error)
        logger.error("out of GPU memory:", exc_info=True)
        raise RankOutOfMemory(f"{who} ran out of memory on {device} ({reason}); lower {setting}") from error


def _reason_of(error: RuntimeError) -> str:
    """Return the first sentence of an out-of-memory error; re-raise any other error."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0].split(". ")[0]
