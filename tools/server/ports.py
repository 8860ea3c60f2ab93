"""Chooses a free port for each server port of 0, and checks the three ports before tritonserver starts."""

import atexit
import socket

from python_backend.config import RunConfig, ServerSection
from python_backend.store.durable import read_json
from tools.server.triton_home import ServerStartError

PORT_KEYS = ("http_port", "grpc_port", "metrics_port")


def server_urls(config: RunConfig) -> dict[str, str]:
    """Return the URLs `http`, `grpc` and `metrics` of the run's server: those that it wrote, else those configured."""
    section, written = config.server, read_json(config.server_dir / "server.json") or {}
    return {"http": section.http_url, "grpc": section.grpc_url, "metrics": section.metrics_url, **written}


def with_free_ports(section: ServerSection) -> ServerSection:
    """Return the section with a free port for each port of 0. Raises ServerStartError if the host is not local."""
    keys = [key for key in PORT_KEYS if getattr(section, key) == 0]
    return section.model_copy(update={key: free_port(section.host) for key in keys})


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free, and stays so as long as this process lives. Raises ServerStartError.

    The process keeps a socket bound to it, which does not listen. The kernel then gives the port to no connection and
    to no other process that asks for a free one; a server that sets SO_REUSEADDR, as all do here, can still use it.
    """
    family, address = _address(host)
    held = socket.socket(family)
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise ServerStartError(_cannot_bind(host, error)) from error
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # set before, it would allow ports that others hold
    atexit.register(held.close)  # which also keeps it
    return int(held.getsockname()[1])


def check_ports(section: ServerSection) -> None:
    """Raise ServerStartError unless the three ports differ and all can be bound."""
    family, address = _address(section.host)
    seen: dict[int, str] = {}
    for key in PORT_KEYS:
        port = getattr(section, key)
        if port in seen:
            raise ServerStartError(f"server.{seen[port]} and server.{key} are both {port}: they must differ")
        seen[port] = key
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as tritonserver does
            try:
                probe.bind((address, port))
            except OSError as error:
                raise ServerStartError(
                    f"port {port} (server.{key}) on {section.host} cannot be used: {error.strerror}; "
                    f"stop the process that uses it, or set server.{key} to another port (0 picks a free one)"
                ) from error


def is_open(url: str) -> bool:
    """Return whether a process accepts connections at `host:port`."""
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _address(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServerStartError(_cannot_bind(host, error)) from error
    return family, str(address[0])


def _cannot_bind(host: str, error: OSError) -> str:
    return f"server.host {host} is not an address of this machine ({error.strerror}); 127.0.0.1 always works"
