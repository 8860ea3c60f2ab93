"""The processes (ranks) that train one model: one controller, which announces operations that all ranks execute.

Rank 0 is the controller: it alone talks to the journal, the servers and the user. It announces each operation as JSON
in a store that it hosts, and then executes its own part; the other ranks poll the store and execute theirs. Waiting for
the next operation is no collective, so that an idle job never runs into the timeout of its process group. If rank 0
dies, its store dies with it, and the other ranks leave; if another rank dies, the next collective of rank 0 fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_triton.errors import REPORTED, RankFailed, RlhfError
from rlhf_triton.learning.launch import end_job
from rlhf_triton.python_backend.models.card import RankOutOfMemory

logger = logging.getLogger(__name__)
T = TypeVar("T")
# The longest time that one rank may be behind the others, e.g. because its responses are longer. A rank that died is
# noticed at once on a CPU; on GPUs torchrun, which watches the processes, ends the others.
GROUP_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT = timedelta(minutes=2)
POLL_S = 0.002
LEAVE_S = 2.0  # for which rank 0 waits at the end; a rank that died will never say that it leaves
KEPT = 1000  # newest operations in the store: no rank is ever that far behind
END = "end"
LOST = re.compile("closed by peer|reset by peer|gloo|NCCL", re.IGNORECASE)  # in the messages of failed collectives


class RankLost(Exception):
    """Rank 0 has ended, and with it the job; not an error that a user can fix, torchrun restarts the ranks."""


class OneRank:
    """What `Ranks` offers, for a process that trains alone: there is no other rank to wait for."""

    rank, size = 0, 1

    def announce(self, name: str, **arguments: Any) -> None:
        """Do nothing: no other rank executes operations."""

    def together(self, work: Callable[[], T]) -> T:
        """Execute `work`."""
        return work()

    def broadcast(self, record: T | None) -> T:
        """Return the record."""
        assert record is not None
        return record

    def gather(self, value: Any) -> list[Any]:
        """Return the value of this rank."""
        return [value]

    def summed(self, values: Tensor) -> Tensor:
        """Return the values of this rank."""
        return values

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the loss."""
        loss.backward()


ALONE = OneRank()


class Ranks:
    """The process group of one training job, seen from one rank."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        self.rank, self.size, self.device, self._store = rank, size, device, store
        self.operations = Operations(rank, dist.PrefixStore("operations", store))

    @classmethod
    def join(cls, device: str, *, timeout: timedelta = GROUP_TIMEOUT) -> Ranks:
        """Join the process group that the launcher's environment variables describe.

        Args:
            device: of this process, `cpu` or `cuda:N`; it becomes the current one of this thread.
            timeout: of one collective.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = torch.device(device)
        if own.type == "cuda":
            torch.cuda.init()  # a mesh of GPUs that are not initialised chooses this process's GPU anew
            torch.cuda.set_device(own)
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun without our launcher
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            None if agent_hosts else size,
            is_master=rank == 0 and not agent_hosts,
            timeout=STORE_TIMEOUT,
        )
        # The store of torchrun's agent outlives a restart. The count may differ between hosts: only look at it there.
        attempt = (
            dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store) if agent_hosts else store
        )
        backend = "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", attempt),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=own if own.type == "cuda" else None,  # otherwise NCCL guesses it from the rank
        )
        return cls(rank, size, attempt, own)

    def announce(self, name: str, **arguments: Any) -> None:
        """On rank 0, let the other ranks execute operation `name`; on the others, which execute it, do nothing."""
        if self.rank == 0:
            self.operations.announce(name, **arguments)

    def connection(self, name: str) -> Any:
        """Return a further connection to the store, with separate keys, for another thread to wait on."""
        return dist.PrefixStore(name, self._store.clone())

    def together(self, work: Callable[[], T]) -> T:
        """Execute local `work` on every rank; if it fails on one of them, raise on all.

        Call it on every rank, around work without collectives whose failure must stop all ranks together, such as
        writing a file.

        Raises:
            OSError: of this rank or of another.
            RlhfError: of this rank; or RankFailed, of another.
        """
        error: RlhfError | OSError | None = None
        failure = None
        try:
            result = work()
        except (RlhfError, OSError) as caught:
            error = caught
            failure = isinstance(error, OSError), getattr(error, "errno", None), f"rank {self.rank}: {error}"
        failures = [other for other in self.gather(failure) if other is not None]
        if error is not None:
            raise error
        for is_disk_error, number, text in failures:
            if is_disk_error:
                raise OSError(text) if number is None else OSError(number, text)
            raise RankFailed(text)
        return result

    def broadcast(self, record: T | None) -> T:
        """Return the record of rank 0 on all ranks; the other ranks pass None. Collective."""
        box = [record]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        received = box[0]
        assert received is not None
        return received

    def gather(self, value: Any) -> list[Any]:
        """Return the values that the ranks pass, by rank; collective."""
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def summed(self, values: Tensor) -> Tensor:
        """Replace CPU values by their sums over all ranks, and return them; collective."""
        dist.all_reduce(values)
        return values

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss; FSDP averages gradients over the ranks."""
        (loss * self.size).backward()

    @classmethod
    @contextlib.contextmanager
    def joined(cls, device: str) -> Iterator[Ranks]:
        """Join the process group as in `join` for a `with` block, at whose end rank 0 ends the job.

        If another rank dies, this process exits with code 1, and the launcher restarts all ranks. If memory is short on
        this one, it exits with code 2 and our agent restarts none: each would meet the same error.
        """
        ranks = cls.join(device)
        try:
            yield ranks
        except RankOutOfMemory as error:
            logger.error("%s", error)
            os._exit(end_job(2))  # at once: leaving the process group would wait for the other ranks
        except REPORTED:
            ranks.announce(END)
            raise
        except (RankLost, RuntimeError) as error:
            if not (isinstance(error, RankLost | dist.DistError) or LOST.search(str(error))):
                raise
            logger.error("another rank has died: %s", str(error).splitlines()[0])
            logging.shutdown()
            os._exit(1)  # at once, as above
        ranks.close()

    def close(self) -> None:
        """End the job: on rank 0 let the other ranks leave; on all ranks leave the process group.

        Rank 0 waits until the others have read that the job has ended, because its store ends with its process.
        """
        self.announce(END)
        left, deadline = self._store.add("left", 1), time.monotonic() + LEAVE_S
        while self.rank == 0 and left < self.size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            left = self._store.add("left", 0)
        dist.destroy_process_group()


AnyRanks = OneRank | Ranks


def dealt(lengths: Tensor, size: int) -> list[Tensor]:
    """Deal rows to `size` ranks, so that each gets rows of similar lengths; return their indices, by rank."""
    order = lengths.argsort(stable=True)
    return [order[rank::size] for rank in range(size)]


class Operations:
    """A numbered list of operations that rank 0 announces and every other rank executes in order."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank, self._store, self._number = rank, store, 0

    def announce(self, name: str, **arguments: Any) -> None:
        """Let the other ranks execute operation `name`; the arguments must be JSON. Rank 0 only."""
        self._store.set(str(self._number), json.dumps([name, arguments]))
        self._store.delete_key(str(self._number - KEPT))
        self._number += 1

    def follow(self, handlers: Mapping[str, Callable[..., object]]) -> None:
        """Execute the operations that rank 0 announces until it ends the job. All ranks but rank 0.

        An RlhfError or OSError of a handler is logged only: rank 0 meets the same error, see `Ranks.together`, and
        decides how the job continues.

        Raises:
            RankLost: rank 0 has died.
        """
        while True:
            name, arguments = self._next_operation()
            if name == END:
                return
            try:
                handlers[name](**arguments)
            except (RlhfError, OSError) as error:
                logger.warning("rank %d: %s: %s", self._rank, name, error)

    def _next_operation(self) -> tuple[str, dict[str, Any]]:
        key = str(self._number)
        try:
            while not self._store.check([key]):
                time.sleep(POLL_S)
            name, arguments = json.loads(self._store.get(key))
        except dist.DistError as error:  # the connection to the store is closed
            raise RankLost("rank 0 has ended") from error
        self._number += 1
        return name, arguments
