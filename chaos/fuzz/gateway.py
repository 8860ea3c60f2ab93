"""Attacks on the gateway: bodies, heads and connections that could cost it more than they cost a client."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from chaos.fuzz.client import HANG_S, Answer
from chaos.fuzz.requests import METADATA_TEXTS
from python_backend.config import RunConfig

KEY_VARIABLE, KEY = "FUZZ_GATEWAY_KEY", "sesame"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
TEXTS = ("a", "word ", '"\\', "\u00e4\U0001f600")
ROWS = (1, 2, 1500, 4096, 4097, 200_000)
INVALID: tuple[Any, ...] = ({}, [], 5, {"text": 1}, {"tokens": ["a"] * 100}, {"messages": [{}] * 100})
ITEMS: tuple[Any, ...] = ({}, [], "", "\u0101", {"a": 1}, 1000, 1.5)
PLACES = (  # of many items; `**`: as fields, a quarter of them
    b'{"inputs": [{"text": "a", "metadata": {"a": %s}}]}',
    b'{"inputs": [{"tokens": %s}]}',
    b'{"inputs": %s}',
    b'{"inputs": [{"text": "a"}], **}',
    b'{"inputs": [{"text": "a", "metadata": {**}}]}',
)
MOST_OPEN = 2500  # connections left open: more than the gateway takes


@dataclass
class Attack:
    """Content of one connection, or of several that are left open, as no answer is expected."""

    name: str
    content: bytes
    left_open: int = 0


def make_attack(generator: random.Random) -> Attack:
    """Return an attack of any kind."""
    name = generator.choice([*ATTACKS])
    left_open = generator.choice((10, 100, 300)) if name == LEFT_OPEN else 0
    return Attack(name, ATTACKS[name](generator), left_open)


class GatewayProcess:
    """`python -m tools gateway`; `peak_mb` is its most memory above that at the first `look`."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        command = [sys.executable, "-m", "tools", "gateway", "--config", str(path)]
        environment = {**os.environ, KEY_VARIABLE: KEY}
        server = f"server.http_port={config.server.http_port}"
        self._process = subprocess.Popen([*command, server], stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        self.address = re.sub(r"^.*http://|,.*\n", "", self._process.stdout.readline())
        self.peak_mb, self._idle_mb = 0.0, 0.0
        self._open: list[socket.socket] = []

    def look(self) -> None:
        """Measure the memory; raises psutil.NoSuchProcess if the gateway has ended."""
        memory_mb = psutil.Process(self._process.pid).memory_info().rss / 1e6
        self._idle_mb = self._idle_mb or memory_mb
        self.peak_mb = max(self.peak_mb, memory_mb - self._idle_mb)

    def send(self, attack: Attack) -> Answer:
        """Send an attack; the status of the answer is None if the connection broke."""
        begin, status = time.monotonic(), b""
        host, port = self.address.split(":")
        opened: list[socket.socket] = []
        try:
            for _ in range(attack.left_open or 1):
                connection = socket.create_connection((host, int(port)), HANG_S)
                opened.append(connection)
                connection.sendall(attack.content)
            if not attack.left_open:
                status = connection.recv(4096)
        except OSError as error:
            return Answer(None, f"{type(error).__name__}: {error}", time.monotonic() - begin)
        finally:
            self._open += opened
            self._close_all_but(MOST_OPEN)
        found = re.match(rb"HTTP/1.1 (\d+)", status)
        return Answer(found[1].decode() if found else attack.name, status.decode("latin-1"), time.monotonic() - begin)

    def stop(self) -> None:
        """Stop the process, and close all connections."""
        self._process.terminate()
        self._process.communicate()
        self._close_all_but(0)

    def _close_all_but(self, newest: int) -> None:
        for _ in range(len(self._open) - newest):
            self._open.pop(0).close()


def _head(path: str, length: int, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: fuzz", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _post(path: str, body: Any, headers: dict[str, str] = HEADERS) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return _head(path, len(content), headers) + content


def _text(g: random.Random, *lengths: int) -> str:
    return g.choice(TEXTS) * g.choice(lengths)


def _repeated(item: Any, number: int) -> bytes:
    """Return the JSON of a list; `json` would hold the interpreter's lock for seconds, which the good client needs."""
    return b"[%s]" % b", ".join([json.dumps(item, ensure_ascii=False).encode()] * number)


def _many_items(g: random.Random) -> bytes:
    item, number = g.choice(ITEMS), g.choice((1000, 400_000, 2_000_000))
    place = g.choice(PLACES)
    if b"**" not in place:
        return place % _repeated(item, number)
    value = json.dumps(item, ensure_ascii=False).encode()
    return place.replace(b"**", b", ".join(b'"%d": %s' % (i, value) for i in range(number // 4)))


LEFT_OPEN = "left open"
ATTACKS: dict[str, Callable[[random.Random], bytes]] = {
    "product": lambda g: _post("/score", {"text_1": _text(g, 1, 100, 1_000_000), "text_2": ["b"] * g.choice(ROWS)}),
    "long texts": lambda g: _post("/get_reward", {"query": [_text(g, 10_000, 300_000, 3_000_000)] * g.choice((1, 5))}),
    "invalid inputs": lambda g: _post("/v1/rewards", b'{"inputs": %s}' % _repeated(g.choice(INVALID), g.choice(ROWS))),
    "invalid query": lambda g: _post("/get_reward", b'{"query": %s}' % _repeated(g.choice(INVALID), g.choice(ROWS))),
    "items": lambda g: _post("/v1/rewards", _many_items(g)),
    "metadata": lambda g: _post(
        "/v1/rewards", b'{"inputs": [{"text": "a"}, {"text": "a", "metadata": %s}]}' % g.choice(METADATA_TEXTS)
    ),
    "long head": lambda g: _head("/get_reward", 0, {"X": "a" * g.choice((60_000, 1_000_000, 50_000_000))}),
    "many headers": lambda g: _head("/get_reward", 0, {f"X{i}": "a" for i in range(g.choice((1000, 100_000)))}),
    "no key": lambda g: _post(g.choice(("/get_reward", "/healthz")), b" " * g.choice((10, 100_000, 17_000_000)), {}),
    LEFT_OPEN: lambda g: g.choice(
        (b"", b"GET /hea", _head("/healthz", 10, {}) + b"{", _head("/get_reward", 10, HEADERS))
    ),
}
