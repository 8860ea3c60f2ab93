"""OpenEnv servers as environments: each instance is a session over the server's websocket, `URL/ws`."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlhf_triton.backoff import backoff_s
from rlhf_triton.environment import EnvironmentLost
from rlhf_triton.errors import FunctionError, reason_of

MAX_MESSAGE_BYTES = 100 << 20  # as OpenEnv's own client
AT_CAPACITY = "CAPACITY_REACHED"  # code of the error that a server sends to a session beyond its limit


class OpenEnv:
    """A session of an OpenEnv server.

    `action` names the text field of an action. `observation` names the field of an observation that the policy sees;
    without it, the policy sees the only text field, or all fields as JSON if there is not exactly one.
    """

    def __init__(self, url: str, *, timeout_s: float, action: str = "message", observation: str | None = None) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise FunctionError(f"options.url: {url!r}, must begin with http://, https://, ws:// or wss://")
        self._url = f"{url.rstrip('/')}/ws"
        self._timeout_s = timeout_s
        self._action = action
        self._observation = observation
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse[Any]
        self._received: asyncio.Queue[aiohttp.WSMessage]
        self._receiving: asyncio.Task[None]

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Open a session, with the row's `seed` if it has one, and return the first observation.

        Retry while the server is full or down. Raises EnvironmentLost if it stays down, RuntimeError if it stays full.
        """
        data = {"seed": row["seed"]} if row.get("seed") is not None else {}
        end = time.monotonic() + 0.9 * self._timeout_s  # before the call times out, whose error has no cause
        for attempt in itertools.count():
            await self.close()
            self._session = aiohttp.ClientSession()
            pause = backoff_s(0.1, attempt)
            is_late = time.monotonic() + pause > end
            try:
                self._socket = await self._session.ws_connect(self._url, max_msg_size=MAX_MESSAGE_BYTES)
                self._received = asyncio.Queue()
                self._receiving = asyncio.create_task(self._receive())
                reply = await self._exchange("reset", data)
                if is_late or reply["data"].get("code") != AT_CAPACITY:
                    break
            except (OSError, aiohttp.ClientError) as error:  # also a proxy's 502 while the server restarts
                if isinstance(error, aiohttp.WSServerHandshakeError) and error.status < 500:  # such as a wrong path
                    raise
                if is_late:
                    raise EnvironmentLost(f"no session at {self._url}: {reason_of(error)}") from error
            await asyncio.sleep(pause)
        return self._text(_content(reply)["observation"])

    async def step(self, action: str) -> tuple[str, Any, Any]:
        """Send the action; return observation, reward and whether the episode has ended."""
        content = _content(await self._exchange("step", {self._action: action}))
        return self._text(content["observation"]), content.get("reward"), content.get("done")

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(ConnectionResetError):  # a server that is full sends its error and closes at once
            await self._socket.send_json({"type": kind, "data": data})
        reply = await self._received.get()
        if reply.type is not aiohttp.WSMsgType.TEXT:
            self._received.put_nowait(reply)  # for further calls
            raise EnvironmentLost("the server has closed the connection")
        return reply.json()

    async def _receive(self) -> None:
        """Receive messages all the time, because pings are answered only meanwhile; otherwise the server hangs up."""
        is_open = True
        while is_open:
            message = await self._socket.receive()
            is_open = message.type is aiohttp.WSMsgType.TEXT
            self._received.put_nowait(message)

    def _text(self, observation: Mapping[str, Any]) -> str:
        texts = [value for value in observation.values() if isinstance(value, str)]
        shown: Any = texts[0] if len(texts) == 1 else observation
        if self._observation is not None:
            if self._observation not in observation:
                raise ValueError(
                    f"options.observation is {self._observation!r}, but the observation has {', '.join(observation)}"
                )
            shown = observation[self._observation]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _content(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a reply. Raises RuntimeError if the reply is an error."""
    data: dict[str, Any] = reply["data"]
    if reply["type"] == "error":
        details = data.get("errors", "")  # for an action that does not fit the environment's schema
        raise RuntimeError(f"{data['message']} ({data.get('code')}) {details}".strip())
    return data
