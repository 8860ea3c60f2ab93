"""Which GPUs the processes of each role use: the one rule that ranks, dry run, doctor and the checks share.

A role's first GPU is the index of its `device`, 0 for plain `cuda`, and its process number r on a machine takes the
r-th GPU after it: `device: cuda:4` with 4 ranks is cuda:4 to cuda:7. On several nodes each has `LOCAL_WORLD_SIZE` of
the ranks, which torchrun sets. A served model with plain `cuda` and without `tensor_parallel` is on every GPU.

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
    """Name of the role's machine; empty: that of all other roles."""
    every: bool = False
    """A served model with a copy on every GPU of the machine, however many there are."""

    @property
    def cards(self) -> tuple[str, ...]:
        """The devices that are GPUs."""
        return tuple(device for device in self.devices if device != "cpu")


def device_of(device: str, local_rank: int) -> str:
    """Return the device of the process with this number on its machine, given the device of the role."""
    return device if device == "cpu" else f"cuda:{int(device.partition(':')[2] or 0) + local_rank}"


def devices_of(device: str, count: int = 1) -> tuple[str, ...]:
    """Return the device of each of `count` processes on one machine, given the device of the role."""
    return tuple(device_of(device, local_rank) for local_rank in range(count))


def own_device(device: str) -> str:
    """Return the device of this process, which a launcher has given its number on the machine (`LOCAL_RANK`)."""
    return device_of(device, int(os.environ["LOCAL_RANK"]))


def ranks_here(ranks: int) -> int:
    """Return how many of a role's ranks a machine has: all, unless a launcher says less (`LOCAL_WORLD_SIZE`)."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def check_cards(places: Iterable[Place]) -> None:
    """Raise ValueError if a role of several GPUs shares one of them with another role on its machine.

    Roles of one GPU each may share it, as all do on a machine with one GPU.
    """
    for one, other in itertools.combinations(places, 2):
        shared = one.cards if other.every else other.cards if one.every else sorted({*one.cards} & {*other.cards})
        several = len(one.cards) > 1 or len(other.cards) > 1
        if several and shared and one.cards and other.cards and one.machine == other.machine:
            raise ValueError(
                f"{_shown(one)} and {_shown(other)} share {', '.join(shared)}; let one of them begin at another card"
            )


def _shown(place: Place) -> str:
    first, last = place.cards[0], place.cards[-1]
    return f"{place.key} ({'every card' if place.every else first if first == last else f'{first} to {last}'})"
