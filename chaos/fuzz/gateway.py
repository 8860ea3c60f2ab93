"""Attacks on the gateway: bodies, heads and connections that could cost it more than they cost a client."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from hypothesis import strategies as st

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


def attacks() -> st.SearchStrategy[Attack]:
    """Return attacks of all kinds."""
    kinds = [st.builds(Attack, st.just(name), content, st.just(0)) for name, content in ATTACKS.items()]
    open_heads = (b"", b"GET /hea", _head("/healthz", 10, {}) + b"{", _head("/get_reward", 10, HEADERS))
    left_open = st.builds(Attack, st.just("left open"), st.sampled_from(open_heads), st.sampled_from((10, 100, 300)))
    return st.one_of(*kinds, left_open)


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


def _repeated(item: Any, number: int) -> bytes:
    """Return the JSON of a list; `json` would hold the interpreter's lock for seconds, which the good client needs."""
    return b"[%s]" % b", ".join([json.dumps(item, ensure_ascii=False).encode()] * number)


def _many_items(item: Any, number: int, place: bytes) -> bytes:
    if b"**" not in place:
        return _post("/v1/rewards", place % _repeated(item, number))
    value = json.dumps(item, ensure_ascii=False).encode()
    fields = b", ".join(b'"%d": %s' % (i, value) for i in range(number // 4))
    return _post("/v1/rewards", place.replace(b"**", fields))


def _texts(*lengths: int) -> st.SearchStrategy[str]:
    return st.builds(lambda text, length: text * length, st.sampled_from(TEXTS), st.sampled_from(lengths))


def _invalid(path: str, name: str) -> st.SearchStrategy[bytes]:
    def content(item: Any, number: int) -> bytes:
        return _post(path, b'{"%s": %s}' % (name.encode(), _repeated(item, number)))

    return st.builds(content, st.sampled_from(INVALID), st.sampled_from(ROWS))


def _headers(sizes: Iterable[int], headers_of: Any) -> st.SearchStrategy[bytes]:
    return st.sampled_from(list(sizes)).map(lambda size: _head("/get_reward", 0, headers_of(size)))


ATTACKS: dict[str, st.SearchStrategy[bytes]] = {
    "product": st.builds(
        lambda text, rows: _post("/score", {"text_1": text, "text_2": ["b"] * rows}),
        _texts(1, 100, 1_000_000),
        st.sampled_from(ROWS),
    ),
    "long texts": st.builds(
        lambda text, rows: _post("/get_reward", {"query": [text] * rows}),
        _texts(10_000, 300_000, 3_000_000),
        st.sampled_from((1, 5)),
    ),
    "invalid inputs": _invalid("/v1/rewards", "inputs"),
    "invalid query": _invalid("/get_reward", "query"),
    "items": st.builds(
        _many_items, st.sampled_from(ITEMS), st.sampled_from((1000, 400_000, 2_000_000)), st.sampled_from(PLACES)
    ),
    "metadata": st.sampled_from(METADATA_TEXTS).map(
        lambda text: _post("/v1/rewards", b'{"inputs": [{"text": "a"}, {"text": "a", "metadata": %s}]}' % text)
    ),
    "long head": _headers((60_000, 1_000_000, 50_000_000), lambda size: {"X": "a" * size}),
    "many headers": _headers((1000, 100_000), lambda size: {f"X{i}": "a" for i in range(size)}),
    "no key": st.builds(
        lambda path, size: _post(path, b" " * size, {}),
        st.sampled_from(("/get_reward", "/healthz")),
        st.sampled_from((10, 100_000, 17_000_000)),
    ),
}
"""What is sent over one connection, by kind."""
