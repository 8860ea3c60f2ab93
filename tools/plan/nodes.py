"""Places the roles of a run on the machines (nodes) that run them, and on their GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from python_backend.config import RunConfig
from python_backend.models.card.placement import Place
from tools.plan.role import Role, Sizes

VLLM = "actor.generation.vllm.cuda_devices"


def placed_on_nodes(config: RunConfig, roles: Mapping[str, Role], num_devices: int | None) -> dict[str, Role]:
    """Return the roles with their nodes and the devices of one node, and tritonserver if it is on a node with GPUs.

    Ranks beyond the GPUs of a node are on further nodes.

    Args:
        roles: each on as many GPUs as it has processes, or for a model served on every GPU on the first.
        num_devices: GPUs of each node; None: as many as the roles use.
    """
    places = {place.key: place for place in config.places}
    num = num_devices or max(_end(device) for role in roles.values() for device in role.devices)
    placed = {}
    for key, role in roles.items():
        place = places.get("actor.policy.device" if key == "actor" else f"{key}.device", Place(key, role.devices))
        devices, processes = role.devices, role.processes
        if place.every:
            devices = tuple(f"cuda:{i}" for i in range(num))
            processes *= num
        elif role.has_group:
            devices = tuple(device for device in devices if _end(device) <= num) or devices[:1]
        nodes = -(-len(role.devices) // len(devices)) if role.has_group else 1
        placed[key] = replace(role, node=place.machine, devices=devices, processes=processes, nodes=nodes)
    if num:  # tritonserver opens a context on every GPU that it sees
        every = tuple(f"cuda:{i}" for i in range(num))
        node = "server" if any(place.machine for place in places.values()) else ""
        placed["tritonserver"] = Role("tritonserver", Sizes(), devices=every, processes=0, node=node)
    return placed


def vllm_devices(config: RunConfig) -> list[str]:
    """Return the devices, in the whole plan, of the vLLM server that `tools run` starts."""
    return [f"{place.machine} {card}".strip() for place in config.places if place.key == VLLM for card in place.cards]


def _end(device: str) -> int:
    """Return the number of GPUs that a node needs to have `device`."""
    return 0 if device == "cpu" else int(device.partition(":")[2]) + 1
