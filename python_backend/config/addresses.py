"""Server addresses in the YAML: `host:port`, or `dns:name:port` for every address of the name."""

from __future__ import annotations

import socket
from typing import Annotated

from pydantic import Field

DNS_PREFIX = "dns:"
Address = Annotated[str, Field(pattern=r"^(dns:)?[^\s/]+:\d+$")]


def resolve(address: str) -> list[str]:
    """`host:port` of each server, sorted; a `host:port` is returned as it is, a name is looked up.

    Raises:
        OSError: the name cannot be resolved.
        ValueError: it cannot be a name.
    """
    if not address.startswith(DNS_PREFIX):
        return [address]
    name, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(item[4][0]) for item in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
