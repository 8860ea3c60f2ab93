"""The processes (ranks) that train one model: rank 0 announces operations, which all ranks execute.

Only rank 0, the controller, communicates with the journal, the servers and the user. It announces each operation as
JSON in a store that it hosts and then executes its own part; the other ranks poll the store and execute theirs. Waiting
for the next operation is not a collective, so an idle job never runs into its process group's timeout. If rank 0 dies,
its store dies with it, and the other ranks leave; if another rank dies, rank 0's next collective fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_triton.errors import REPORTED, RankFailed, RlhfError
from rlhf_triton.models.device_errors import is_lost_rank
from rlhf_triton.models.out_of_memory import RankOutOfMemory
from rlhf_triton.training_engine.launch import end_job

logger = logging.getLogger(__name__)
T = TypeVar("T")
# The longest time that a rank may lag behind the others, e.g. because its responses are longer. On a CPU, a dead rank
# is noticed at once; on GPUs, torchrun watches the processes and ends the others.
GROUP_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT = timedelta(minutes=2)
POLL_S = 0.002
LEAVE_S = 2.0  # how long rank 0 waits for the others at the end; a dead rank never confirms that it leaves
OPERATIONS_KEPT = 1000  # number of newest operations kept in the store; no rank is ever that far behind
END = "end"


class RankLost(Exception):
    """Rank 0 has ended, and the job with it. Not an error for the user: torchrun restarts the ranks."""


class OneRank:
    """The interface of `Ranks` for a process that trains alone."""

    rank = 0
    size = 1
    shards: Literal[False] = False
    """Whether each rank holds only a slice of the weights in training."""

    def device_of(self, setting: str) -> torch.device:
        """Return the device for a role whose `device` setting this is."""
        return torch.device(setting)

    def announce(self, name: str, **arguments: Any) -> None:
        """Do nothing: no other rank executes operations."""

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Execute `work`."""
        return work()

    def broadcast(self, record: T | None) -> T:
        """Return the record."""
        assert record is not None
        return record

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which is only this one's."""
        return [value]

    def summed(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the loss."""
        loss.backward()


ALONE = OneRank()


class Ranks:
    """The process group of one training job, seen from one rank."""

    shards: Literal[True] = True

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store
        self.operations = Operations(rank, dist.PrefixStore("operations", store))

    @classmethod
    def join(cls, device: str, *, timeout: timedelta = GROUP_TIMEOUT) -> Ranks:
        """Join the process group that the launcher's environment variables describe.

        Args:
            device: this process's device, `cpu` or `cuda:N`; becomes the current device of this thread.
            timeout: timeout of one collective.
        """
        rank = int(os.environ["RANK"])
        size = int(os.environ["WORLD_SIZE"])
        own = torch.device(device)
        if own.type == "cuda":
            torch.cuda.init()  # otherwise creating a device mesh would select another GPU
            torch.cuda.set_device(own)
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun without our launcher
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            None if agent_hosts else size,
            is_master=rank == 0 and not agent_hosts,
            timeout=STORE_TIMEOUT,
        )
        # The store of torchrun's agent outlives a restart, so each attempt needs its own keys. Not with our store: the
        # count may differ between hosts.
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

    def device_of(self, setting: str) -> torch.device:
        """Return the rank's device, whatever the setting."""
        return self.device

    def announce(self, name: str, **arguments: Any) -> None:
        """Make the other ranks execute operation `name`; does nothing on ranks other than 0."""
        if self.rank == 0:
            self.operations.announce(name, **arguments)

    def connection(self, name: str) -> Any:
        """Return another connection to the store, with separate keys, for use in another thread."""
        return dist.PrefixStore(name, self._store.clone())

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Execute local `work`; if it fails on any rank, raise on all. Every rank must call this.

        For work without collectives whose failure must stop all ranks, such as writing a file.

        Raises:
            OSError: `work` raised it on this rank or on another.
            RlhfError: `work` raised it on this rank; RankFailed if on another.
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
        """Return rank 0's record on all ranks; the other ranks pass None. Collective."""
        box = [record]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        received = box[0]
        assert received is not None
        return received

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; collective."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def summed(self, values: Tensor) -> Tensor:
        """Sum CPU values over all ranks, in place, and return them; collective."""
        dist.all_reduce(values)
        return values

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this rank's part of the loss, scaled because FSDP averages over the ranks."""
        (loss * self.size).backward()

    @classmethod
    @contextlib.contextmanager
    def joined(cls, device: str) -> Iterator[Ranks]:
        """Join the process group, as `join` does, for a `with` block; at its end, rank 0 ends the job.

        If another rank dies, this process exits with code 1, and the launcher restarts all ranks. If this rank runs out
        of GPU memory, it exits with code 2, and our agent restarts none, because the error would recur.
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
            if not (isinstance(error, RankLost) or is_lost_rank(error)):
                raise
            logger.error("another rank has died: %s", str(error).splitlines()[0])
            logging.shutdown()
            os._exit(1)  # at once, as above
        ranks.close()

    def close(self) -> None:
        """Leave the process group; rank 0 first ends the job for the other ranks.

        Rank 0 waits until the others have read that the job has ended, because its store ends with its process.
        """
        self.announce(END)
        num_left = self._store.add("left", 1)
        deadline = time.monotonic() + LEAVE_S
        while self.rank == 0 and num_left < self.size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            num_left = self._store.add("left", 0)
        dist.destroy_process_group()


AnyRanks = OneRank | Ranks


def dealt(lengths: Tensor, size: int) -> list[Tensor]:
    """Distribute rows over `size` ranks with similar length distributions; return the row indices of each rank."""
    order = lengths.argsort(stable=True)
    return [order[rank::size] for rank in range(size)]


class Operations:
    """A numbered list of operations that rank 0 announces and every other rank executes in order."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank = rank
        self._store = store
        self._number = 0

    def announce(self, name: str, **arguments: Any) -> None:
        """Make the other ranks execute operation `name`; the arguments must be JSON. Rank 0 only."""
        self._store.set(str(self._number), json.dumps([name, arguments]))
        self._store.delete_key(str(self._number - OPERATIONS_KEPT))
        self._number += 1

    def follow(self, handlers: Mapping[str, Callable[..., object]]) -> None:
        """Execute the operations that rank 0 announces until it ends the job. For all ranks except rank 0.

        An RlhfError or OSError of a handler is only logged: rank 0 gets it as well, through `Ranks.run_on_all_ranks`,
        and decides how to continue.

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

    def has_next(self) -> bool:
        """Return whether rank 0 has announced an operation after the one in progress."""
        return bool(self._store.check([str(self._number)]))

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
