"""Chooses a free port for each server port of 0, and checks and claims the three ports before tritonserver starts."""

import atexit
import errno
import os
import re
import socket
from pathlib import Path

from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.server.triton_home import ServerStartError

PORT_KEYS = ("http_port", "grpc_port", "metrics_port")
_claims: dict[tuple[str, int], socket.socket] = {}
CLAIM = "rlhf-on-triton-port-"  # names of abstract sockets, as /proc/net/unix lists them
EVERY = "0.0.0.0"


def with_free_ports(section: ServerSection) -> ServerSection:
    """Return the section with a free port for each port of 0. Raises ServerStartError if the host is not local."""
    keys = [key for key in PORT_KEYS if getattr(section, key) == 0]
    return section.model_copy(update={key: free_port(section.host) for key in keys})


def free_port(host: str = "127.0.0.1") -> int:
    """Reserve a free port for the lifetime of this process. Raises ServerStartError.

    The process keeps a socket bound to it, which does not listen. The kernel then gives the port to no connection and
    to no other process that asks for a free one; a server that sets SO_REUSEADDR, as all do here, can still use it.
    """
    address = bind_address(host)
    held = socket.socket()
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise ServerStartError(cannot_bind("server", "http_port", host, 0, error)) from error
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # set before, it would allow ports that others hold
    atexit.register(held.close)  # which also keeps it
    return int(held.getsockname()[1])


def check_ports(section: ServerSection) -> None:
    """Raise ServerStartError unless the three ports differ and all can be bound.

    This process then keeps them from other servers of this project until `release_ports`: tritonserver opens its ports
    only when its models are loaded, and until then a second server would take the first one's for its own.
    """
    address = bind_address(section.host)
    keys: dict[int, str] = {}
    for key in PORT_KEYS:
        port = getattr(section, key)
        if port in keys:
            raise ServerStartError(f"server.{keys[port]} and server.{key} are both {port}; set one to another port")
        keys[port] = key
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as tritonserver does
            try:
                probe.bind((address, port))
                _claim(address, port)
            except OSError as error:
                raise ServerStartError(cannot_bind("server", key, section.host, port, error)) from error


def _claim(address: str, port: int) -> None:
    """Raise OSError if another process has claimed the port at this address, or at every one.

    The kernel ends a claim with its process.
    """
    if (address, port) in _claims:
        return
    claim = _claims[address, port] = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0{CLAIM}{port}-{address}")
        claims = re.findall(rf"@{CLAIM}{port}-(\S+)", Path("/proc/net/unix").read_text())
        others = {*claims} - {other for other, claimed in _claims if claimed == port}
        if others and EVERY in (address, *others):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError:
        _claims.pop((address, port)).close()
        raise


def release_ports() -> None:
    """Give up the ports that this process keeps from other servers."""
    while _claims:
        _claims.popitem()[1].close()


def bind_address(host: str) -> str:
    """Resolve `server.host` to an IPv4 address; given a name, tritonserver would bind 255.255.255.255.

    Raises ServerStartError if there is none.
    """
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerStartError(
            f"server.host: {host!r} has no IPv4 address, which tritonserver needs ({reason}); set it to 127.0.0.1, or "
            "to 0.0.0.0 for every address of this machine"
        ) from error


def cannot_bind(section: str, key: str, host: str, port: int, error: OSError) -> str:
    """Return the message for an address that `<section>.host` and `<section>.<key>` name and that cannot be bound."""
    number = error.errno or 0
    reason = str(error.strerror).partition(" (while ")[0]  # what `create_server` appends
    if number < 0 or number == errno.EADDRNOTAVAIL:  # below 0: those of names
        return f"{section}.host: {host!r} is not an address of this machine ({reason}); 127.0.0.1 always works"
    remedy = "stop the process that uses it, or " if number == errno.EADDRINUSE else ""
    return (
        f"port {port} ({section}.{key}) on {host} cannot be used: {reason}; {remedy}set {section}.{key} to "
        "another port (0 picks a free one)"
    )


def is_open(url: str) -> bool:
    """Return whether a process accepts connections at `host:port`."""
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
