"""The tritonservers that serve one critic: found by address or DNS name, reloaded together, asked for their version."""

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
    """What became of a reload at one server."""

    url: str
    version: int | None  # that it serves now; None: see `error`
    error: ControlPlaneError | None = None


class CriticServers:
    """All servers of one critic; a DNS name is looked up anew at each call, so that servers may come and go."""

    def __init__(self, addresses: Sequence[str], key: str | None = None) -> None:
        """`key` opens their model control, which `load` needs."""
        self.addresses = tuple(addresses)
        self._key = key

    def urls(self) -> list[str]:
        """`host:port` of each server that there is now. Raises ControlPlaneError if a name cannot be resolved."""
        found: dict[str, None] = {}
        for address in self.addresses:
            for url in _resolve(address):
                found[url] = None
        return list(found)

    def load(self, version: int, *, timeout_s: float) -> list[Loaded]:
        """Have each server start the critic anew, all at once; a server counts as reloaded when its configuration is
        the one that was sent and a real request is answered by `version` or a later one.

        Args:
            version: what CURRENT names: the new processes load it.
            timeout_s: for each server.

        Raises:
            ControlPlaneError: a name cannot be resolved.
        """
        label = f"{version}-{uuid.uuid4().hex[:8]}"

        def load_one(control: ControlPlane) -> int:
            control.load(CRITIC, parameters={"weights_version": label}, timeout_s=timeout_s)
            active = control.active_parameters(CRITIC).get("weights_version")
            if active != label:
                raise ControlPlaneError(f"{CRITIC} runs with the configuration {active!r} instead of {label!r}")
            served = _ask(control)
            if served < version:
                raise ControlPlaneError(f"{CRITIC} answers with version {served} instead of {version}")
            return served

        return self._each(load_one)

    def versions(self) -> list[Loaded]:
        """The version with which each server answers a real request. Raises ControlPlaneError as `urls`."""
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
