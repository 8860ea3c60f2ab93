"""All servers of one model: reloads it on each of them, and asks each for the version that it serves."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlhf_triton.client.control_plane import ControlPlane, ControlPlaneError
from rlhf_triton.config.fields import resolve
from rlhf_triton.errors import reason_of
from rlhf_triton.wire.contract import CRITIC, LOAD_LABEL, REWARD_VERSION, WEIGHTS_VERSION

PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Loaded:
    """Result of a reload or version query at one server."""

    url: str
    version: int | None  # version served now; None if there is an `error`
    error: ControlPlaneError | None = None


class ModelServers:
    """All servers of one model. Each call resolves DNS names again, because servers may be added or removed."""

    def __init__(self, addresses: Sequence[str], key: str | None = None, *, model: str = CRITIC) -> None:
        """
        Args:
            addresses: `host:port` or `dns:name:port` of the servers' gRPC.
            key: key for model control, needed only by `load`.
            model: the model's name on the servers.
        """
        self.addresses = tuple(addresses)
        self._key = key
        self._model = model
        self._output = WEIGHTS_VERSION if model == CRITIC else REWARD_VERSION

    def urls(self) -> list[str]:
        """Return `host:port` of each current server. Raises ControlPlaneError if a name cannot be resolved."""
        return list(dict.fromkeys(url for address in self.addresses for url in _resolve(address)))

    def load(self, version: int, *, timeout_s: float) -> list[Loaded]:
        """Reload the model on all servers in parallel.

        A server counts as reloaded if its active configuration is the one that was sent, and its reply to an
        inference request comes from `version` or a later one.

        Args:
            version: the version that CURRENT names, which the new processes load.
            timeout_s: timeout of the load at each server.

        Raises:
            ControlPlaneError: a name cannot be resolved.
        """
        label = f"{version}-{uuid.uuid4().hex[:8]}"  # unique: Triton reloads only if the configuration has changed

        def load_one(control: ControlPlane) -> int:
            control.load(self._model, parameters={LOAD_LABEL: label}, timeout_s=timeout_s)
            active = control.config(self._model).parameters[LOAD_LABEL].string_value
            if active != label:
                raise ControlPlaneError(
                    f"{self._model}: Triton loaded the configuration {active!r} instead of {label!r}; "
                    "another process reloads the model at the same time; stop one of the two"
                )
            served = self._ask(control)
            if served < version:
                raise ControlPlaneError(f"{self._model} serves version {served} instead of {version}")
            return served

        return self._ask_all(load_one)

    def versions(self) -> list[Loaded]:
        """Return the version that each server serves, from its reply to an inference request.

        Raises ControlPlaneError if a name cannot be resolved.
        """
        return self._ask_all(self._ask)

    def _ask_all(self, ask: Callable[[ControlPlane], int]) -> list[Loaded]:
        def ask_one(url: str) -> Loaded:
            try:
                with ControlPlane(url, self._key) as control:
                    return Loaded(url, ask(control))
            except ControlPlaneError as error:
                return Loaded(url, None, error)

        urls = self.urls()
        with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="servers") as pool:
            return list(pool.map(ask_one, urls))

    def _ask(self, control: ControlPlane) -> int:
        reply = control.probe(self._model, PROBE_TIMEOUT_S, [self._output])
        return int(reply[self._output].ravel()[0])


def _resolve(address: str) -> list[str]:
    try:
        return resolve(address)
    except (OSError, ValueError) as error:
        raise ControlPlaneError(f"trainer.servers: {address!r} cannot be resolved: {reason_of(error)}") from error
