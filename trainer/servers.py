"""The tritonservers that serve one model: resolves their addresses, reloads them, and queries their versions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from python_backend.config.addresses import resolve
from python_backend.wire.contract import CRITIC, REWARD_VERSION, WEIGHTS_VERSION
from trainer.control_plane import ControlPlane, ControlPlaneError

T = TypeVar("T")
PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Loaded:
    """Result of a reload or version query at one server."""

    url: str
    version: int | None  # served now; None if there is an `error`
    error: ControlPlaneError | None = None


class ModelServers:
    """All servers of one model; DNS names are resolved again at each call, because servers may be added or removed."""

    def __init__(self, addresses: Sequence[str], key: str | None = None, *, model: str = CRITIC) -> None:
        """`key` is the servers' key for model control, which `load` needs; `model`: its name on the servers."""
        self.addresses = tuple(addresses)
        self._key, self._model = key, model
        self._output = WEIGHTS_VERSION if model == CRITIC else REWARD_VERSION

    def urls(self) -> list[str]:
        """Return `host:port` of each current server. Raises ControlPlaneError if a name cannot be resolved."""
        return list(dict.fromkeys(url for address in self.addresses for url in _resolve(address)))

    def load(self, version: int, *, timeout_s: float) -> list[Loaded]:
        """Reload the model on all servers in parallel.

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
            control.load(self._model, parameters={"weights_version": label}, timeout_s=timeout_s)
            active = control.active_parameters(self._model).get("weights_version")
            if active != label:
                raise ControlPlaneError(f"{self._model} runs with the configuration {active!r} instead of {label!r}")
            served = self._ask(control)
            if served < version:
                raise ControlPlaneError(f"{self._model} serves version {served} instead of {version}")
            return served

        return self._each(load_one)

    def versions(self) -> list[Loaded]:
        """Return the version in each server's response to an inference request.

        Raises ControlPlaneError if a name cannot be resolved.
        """
        return self._each(self._ask)

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

    def _ask(self, control: ControlPlane) -> int:
        answer = control.probe_scoring(self._model, [self._output], PROBE_TIMEOUT_S)
        return int(answer[self._output].ravel()[0])


def _resolve(address: str) -> list[str]:
    try:
        return resolve(address)
    except (OSError, ValueError) as error:
        raise ControlPlaneError(f"trainer.servers: {address!r} cannot be resolved: {error}") from error
