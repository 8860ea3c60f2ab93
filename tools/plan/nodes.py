"""Places the roles of a run on the machines (nodes) that run them, and on their GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from python_backend.config import RunConfig
from tools.plan.role import Role, Sizes

SERVER, NODES = "server", {"actor": "actor", "trainer": "trainer"}  # the others are models that the server serves


def placed_on_nodes(config: RunConfig, roles: Mapping[str, Role], num_devices: int | None) -> dict[str, Role]:
    """Return the roles with their nodes and the devices of one node, and tritonserver if it is on a node with GPUs.

    Server, trainer and actor have nodes of their own if `actor.client.servers` names the servers, or if a role has more
    ranks than a node has GPUs; else all are on one node.

    Args:
        roles: each on as many GPUs as it has processes, or for a model served on every GPU on the first.
        num_devices: GPUs of each node; None: as many as the roles use.
    """
    num = num_devices or max((_end(role) for role in roles.values()), default=0)
    apart = bool(config.actor.client.servers) or any(
        _end(role) > num and len(role.devices) > 1 for role in roles.values()
    )
    served = config.served_sections
    placed = {}
    for key, role in roles.items():
        node = NODES.get(key, SERVER) if apart else ""
        devices, nodes = role.devices, 1
        if key in served and served[key].device == "cuda" and served[key].tensor_parallel == 1:
            devices = tuple(f"cuda:{i}" for i in range(max(1, num)))  # Triton makes instances on every GPU
            role = replace(role, processes=role.processes * len(devices))
        elif _end(role) > num and len(devices) > 1:
            devices = devices[: num - int(devices[0].partition(":")[2])] or devices[:1]
            nodes = -(-role.processes // len(devices))
        placed[key] = replace(role, node=node, devices=devices, nodes=nodes)
    if num:  # tritonserver opens a context on every GPU that it sees
        every = tuple(f"cuda:{i}" for i in range(num))
        placed["tritonserver"] = Role("tritonserver", Sizes(), devices=every, processes=0, node=SERVER if apart else "")
    return placed


def _end(role: Role) -> int:
    """Return the number of GPUs that a node needs for the highest index of the role's devices."""
    return max((int(device.partition(":")[2]) + 1 for device in role.devices if device != "cpu"), default=0)
