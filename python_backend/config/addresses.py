"""Server addresses in the YAML: `host:port`, or `dns:name:port` for every address that the name resolves to."""

from __future__ import annotations

import socket
from typing import Annotated

from pydantic import Field

DNS_PREFIX = "dns:"
Address = Annotated[str, Field(pattern=r"^(dns:)?[^\s/]+:\d+$")]


def resolve(address: str) -> list[str]:
    """Return the `host:port` of each server, sorted. A plain `host:port` is returned unchanged.

    Raises:
        OSError: the name cannot be resolved.
        ValueError: the name is malformed.
    """
    if not address.startswith(DNS_PREFIX):
        return [address]
    name, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    hosts = sorted({str(item[4][0]) for item in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
