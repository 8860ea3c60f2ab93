"""The tritonservers that serve one critic: resolves their addresses, reloads them, and queries their versions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from python_backend.config.addresses import resolve
from python_backend.wire.contract import CRITIC, WEIGHTS_VERSION
from trainer.control_plane import ControlPlane, ControlPlaneError

T = TypeVar("T")
PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Loaded:
    """Result of a reload or version query at one server."""

    url: str
    version: int | None  # served now; None if there is an `error`
    error: ControlPlaneError | None = None


class CriticServers:
    """All servers of one critic; DNS names are resolved again at each call, because servers may be added or removed."""

    def __init__(self, addresses: Sequence[str], key: str | None = None) -> None:
        """`key` is the servers' key for model control, which `load` needs."""
        self.addresses = tuple(addresses)
        self._key = key

    def urls(self) -> list[str]:
        """Return `host:port` of each current server. Raises ControlPlaneError if a name cannot be resolved."""
        found: dict[str, None] = {}
        for address in self.addresses:
            for url in _resolve(address):
                found[url] = None
        return list(found)

    def load(self, version: int, *, timeout_s: float) -> list[Loaded]:
        """Reload the critic on all servers in parallel.

        A server counts as reloaded if its active configuration is the one that was sent, and its response to an
        inference request names `version` or a later one.

        Args:
            version: the version that CURRENT names, which the new processes load.
            timeout_s: timeout of the load at each server.

        Raises:
            ControlPlaneError: a name cannot be resolved.
        """
        label = f"{version}-{uuid.uuid4().hex[:8]}"  # unique: Triton reloads only if the configuration has changed

        def load_one(control: ControlPlane) -> int:
            control.load(CRITIC, parameters={"weights_version": label}, timeout_s=timeout_s)
            active = control.active_parameters(CRITIC).get("weights_version")
            if active != label:
                raise ControlPlaneError(f"{CRITIC} runs with the configuration {active!r} instead of {label!r}")
            served = _ask(control)
            if served < version:
                raise ControlPlaneError(f"{CRITIC} serves version {served} instead of {version}")
            return served

        return self._each(load_one)

    def versions(self) -> list[Loaded]:
        """Return the version in each server's response to an inference request.

        Raises ControlPlaneError if a name cannot be resolved.
        """
        return self._each(_ask)

    def _each(self, ask: Callable[[ControlPlane], int]) -> list[Loaded]:
        def one(url: str) -> Loaded:
            try:
                with ControlPlane(url, self._key) as control:
                    return Loaded(url, ask(control))
            except ControlPlaneError as error:
                return Loaded(url, None, error)

        urls = self.urls()
        with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="servers") as pool:
            return list(pool.map(one, urls))


def _ask(control: ControlPlane) -> int:
    answer = control.probe_scoring(CRITIC, [WEIGHTS_VERSION], PROBE_TIMEOUT_S)
    return int(answer[WEIGHTS_VERSION].ravel()[0])


def _resolve(address: str) -> list[str]:
    try:
        return resolve(address)
    except (OSError, ValueError) as error:
        raise ControlPlaneError(f"trainer.servers: {address!r} cannot be resolved: {error}") from error
