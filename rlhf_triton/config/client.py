"""Settings of the client, in a module of its own because `import rlhf_triton` is to be fast."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from rlhf_triton.config.fields import Address, Section


class ClientSettings(Section):
    """Requests to the servers: addresses, deadlines, and how long to wait while no server is healthy.

    `actor.client` has those of the actor and the gateway; `RewardClient` and `CriticClient` take their own.
    """

    servers: tuple[Address, ...] = ()
    """HTTP addresses of all servers: `host:port`, or `dns:name:port` for all addresses of a DNS name; default: the
    address of `server`."""
    max_outage_s: NonNegativeFloat = 600.0
    """How long to wait for a healthy server, and to retry training requests while there is no sidecar."""
    deadline_s: PositiveFloat = 60.0
    """Timeout of one scoring attempt, and of waiting for a demanded version."""
