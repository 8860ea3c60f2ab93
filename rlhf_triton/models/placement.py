"""Assigns GPUs to the processes of each role; the ranks, the dry run, the doctor and the checks share this rule.

A role's first GPU is the index of its `device` (0 for plain `cuda`), and its local rank r on a machine takes the r-th
GPU after it: `device: cuda:4` with 4 ranks is cuda:4 to cuda:7. With several nodes, each has `LOCAL_WORLD_SIZE` of the
ranks, which torchrun sets. A served model with plain `cuda` and without `tensor_parallel` is on every GPU.

Imports no torch.
"""

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The devices of one role on one machine."""

    key: str
    """Configuration key of the role's device."""
    devices: tuple[str, ...]
    """Device of each process; `cpu` may occur several times."""
    machine: str = ""
    """The machine that the role runs on; roles with an empty name share one."""
    every: bool = False
    """Whether this is a served model with a copy on every GPU of the machine."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs among `devices`."""
        return tuple(device for device in self.devices if device != "cpu")


def device_of(device: str, local_rank: int) -> str:
    """Return the device of a local rank, given the role's `device`."""
    return device if device == "cpu" else f"cuda:{int(device.partition(':')[2] or 0) + local_rank}"


def devices_of(device: str, count: int = 1) -> tuple[str, ...]:
    """Return the devices of `count` processes on one machine, given the role's `device`."""
    return tuple(device_of(device, local_rank) for local_rank in range(count))


def own_device(device: str) -> str:
    """Return the device of this process, whose local rank the launcher has set (`LOCAL_RANK`)."""
    return device_of(device, int(os.environ["LOCAL_RANK"]))


def ranks_here(ranks: int) -> int:
    """Return how many of a role's ranks run on this machine: at most `LOCAL_WORLD_SIZE`, if a launcher has set it."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def check_gpus(places: Iterable[Place]) -> None:
    """Raise ValueError if a role with several GPUs shares a GPU with another role on its machine.

    Roles with a single GPU may share it.
    """
    for one, other in itertools.combinations(places, 2):
        shared = one.gpus if other.every else other.gpus if one.every else sorted({*one.gpus} & {*other.gpus})
        several = len(one.gpus) > 1 or len(other.gpus) > 1
        if several and shared and one.gpus and other.gpus and one.machine == other.machine:
            raise ValueError(
                f"{_shown(one)} and {_shown(other)} share {', '.join(shared)}; start one of them at another GPU"
            )


def _shown(place: Place) -> str:
    first = place.gpus[0]
    last = place.gpus[-1]
    return f"{place.key} ({'every GPU' if place.every else first if first == last else f'{first} to {last}'})"
