"""What one client sends must not take the gateway from the others: rows, bodies, heads, and connections are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import ssl
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from certificate import make_certificate
from fake_reward import Caller, FakeReward, gateway

from python_backend.client.connection import Message
from tools.gateway import app, connections, scoring

DEADLINE_S = 20.0
LONG = "x" * 200_000
# Bodies of at most 3 MB, which took 100 MB to 1 GB.
BOMBS: list[tuple[str, Any, int, str]] = [
    ("/score", {"text_1": LONG, "text_2": ["a"] * 5000}, 413, "5000 rows, must be 1 to 2000 (gateway.max_rows)"),
    ("/score", {"text_1": [LONG], "text_2": ["a"] * 1500}, 413, "300001500 characters in all rows, must be at most"),
    (
        "/score",
        {"text_1": "\u00e4" * 600_000, "text_2": ["b", "b"]},
        400,
        "text: 1200001 bytes, must be at most 1000000",
    ),
    ("/v1/rewards", {"inputs": [{}] * 2000}, 400, "inputs.0: has no content"),
    ("/v1/rewards", {"inputs": [{}] * 100_000}, 413, "100000 rows, must be 1 to 2000"),
    ("/v1/rewards", {"inputs": [{"tokens": ["a"] * 200_000}]}, 400, "inputs.0.tokens.0"),
    ("/v1/rewards", {"inputs": [{"messages": [{}] * 100_000}]}, 400, "inputs.0.messages.0"),
    ("/v1/rewards", {"inputs": [{str(i): 1 for i in range(70_000)}]}, 400, "70000 fields, must be at most 64"),
    ("/v1/rewards", {"inputs": [{"text": "a", "metadata": {"a": [[]] * 600_000}}]}, 413, "250000 texts, objects"),
    ("/get_reward", {"query": [1] * 2000}, 400, "query.0"),
    ("/remote_rm", {"prompt": [{"role": "user", "content": [1] * 200_000}], "response": ""}, 400, "content"),
    ("/classify", {"input": [[]] * 2000}, 400, "input.0"),
    ("/get_reward", {str(i): 1 for i in range(70_000)}, 400, "70000 fields"),
]


@pytest.mark.parametrize(("path", "body", "status", "told"), BOMBS)
def test_what_would_multiply_in_memory_is_refused_before(path: str, body: Any, status: int, told: str) -> None:
    async def play() -> None:
        async with FakeReward(text="pair") as server, gateway(server.url, max_rows=2000) as caller:
            await caller.post("/remote_rm", {"prompt": "", "response": "warm", "label": None})
            data = json.dumps(body).encode()
            tracemalloc.start()
            message = await caller.error(path, data, status)
            _, peak = tracemalloc.get_traced_memory()
            assert told in message
            assert len(message) < 500
            assert peak < 60e6
            assert len(server.received) == 1

    try:
        asyncio.run(play())
    finally:
        tracemalloc.stop()


async def test_large_bodies_wait_for_each_other_and_small_ones_for_none() -> None:
    async with (
        FakeReward(lambda model, number: "wait") as server,
        gateway(server.url, max_body_bytes=300_000, rows_per_request=1) as caller,
    ):
        texts = [LONG, LONG, "small"]
        posts = [asyncio.create_task(caller.post("/get_reward", {"query": [text]})) for text in texts]
        while server.in_flight < 2:
            await asyncio.sleep(0)
        for _ in range(5):
            await caller.get("/readyz")
        assert server.in_flight == 2
        server.go.set()
        assert [reply["rewards"] for _, reply in await asyncio.gather(*posts)] == [[len(text)] for text in texts]


@pytest.mark.parametrize("terms", [(), ("length",)], ids=["shared requests", "reward functions"])
async def test_no_request_has_more_text_than_a_server_takes(terms: tuple[str, ...]) -> None:
    """It would be refused, and sent again in halves."""

    async with FakeReward(terms=terms) as server, gateway(server.url, rows_per_request=8) as caller:
        server.parameters["max_request_bytes"] = "4000"
        query = ["x" * 900] * 6 + ["y"]
        _, reply = await caller.post("/get_reward", {"query": query})
        assert reply["rewards"] == [900] * 6 + [1]
        assert sorted(inputs["sentences"].size for inputs in server.received) == [3, 4]


KINDS_OF_SERVER: list[dict[str, Any]] = [{}, {"terms": ("length",)}, {"groupwise": True}]


@pytest.mark.parametrize("kind", KINDS_OF_SERVER, ids=["shared requests", "reward functions", "groups"])
async def test_many_rows_of_a_caller_keep_no_other_caller_waiting(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROWS_IN_FLIGHT", 4)

    async with FakeReward(**kind) as server, gateway(server.url, rows_per_request=2) as caller:
        await caller.post("/get_reward", {"query": ["a"]})
        server.behaviour, server.most_in_flight = (lambda model, number: "wait"), 0
        rows = [{"prompt": str(i // 2), "response": "a" * i} for i in range(20)]
        large = asyncio.create_task(caller.post("/v1/rewards", {"inputs": rows}))
        while server.in_flight < 2:
            await asyncio.sleep(0)
        other = asyncio.create_task(caller.post("/get_reward", {"query": ["abc"]}))
        while server.in_flight < 3:
            await asyncio.sleep(0)
        server.go.set()
        assert (await other)[1]["rewards"] == [3]
        assert (await large)[1]["rewards"] == [1 + i for i in range(20)]
        assert server.most_in_flight == 3
        assert len(server.received) == 12


async def test_rows_that_wait_for_others_of_their_caller_share_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROWS_IN_FLIGHT", 2)

    async with (
        FakeReward(terms=("length",)) as server,
        gateway(server.url, rows_per_request=1, deadline_s=0.3) as caller,
    ):
        await caller.post("/get_reward", {"query": ["a"]})
        server.behaviour = lambda model, number: "hang"
        await caller.error("/v1/rewards", {"inputs": [{"text": "a"}] * 20}, 504)
        assert len(server.asked) == 3


async def test_a_refused_request_is_not_kept_while_its_halves_are_scored() -> None:
    async with FakeReward(terms=("length",)) as server, gateway(server.url) as caller:
        server.behaviour = lambda model, number: "wrong" if number == 1 else "wait"
        scored = asyncio.create_task(caller.post("/get_reward", {"query": ["abc"] * 8}))
        while server.in_flight < 2:
            await asyncio.sleep(0)
        gc.collect()
        assert sum(type(found) is Message for found in gc.get_objects()) == 2
        server.go.set()
        assert (await scored)[1]["rewards"] == [3] * 8


async def test_only_what_is_parsed_counts_as_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_ITEMS", 10)

    async with FakeReward(terms=("length",)) as server, gateway(server.url) as caller:
        for text in ("[{" * 100, '"\\' * 100, "a"):
            assert (await caller.post("/get_reward", {"query": [text] * 7}))[1]["rewards"] == [len(text)] * 7
        for body in ({"query": ["a"] * 9}, {"query": ["a"], "labels": [[[]] * 6]}):
            assert "more than 10 texts" in await caller.error("/get_reward", body, 413)


async def answer(caller: Caller, *parts: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Return what the gateway sends until it closes the connection; b"" if it sends nothing or resets it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.url.rpartition(":")[2]), ssl=tls)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


POST = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
CLOSING = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
HELLO = b"\x16\x03\x01\x40\x00\x01\x01\xff\x00" + b"a" * 8000  # of a greeting of 130 kB, in records of 16 KiB
LATE = [(b"",), (b"GET /hea",), (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /hea"), (POST + b"\r\n", b'{"que')]


@pytest.mark.parametrize("parts", LATE, ids=["silent", "half a head", "half of a second head", "half a body"])
async def test_a_connection_on_which_no_request_arrives_is_closed(
    parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((connections, "HEAD_S"), (connections, "KEEP_ALIVE_S"), (app, "BODY_S")):
        monkeypatch.setattr(module, name, 0.05)

    async with FakeReward() as server, gateway(server.url) as caller:
        found = await answer(caller, *parts)
        assert (b"408" in found) == (parts[0] == POST + b"\r\n")
        assert not server.received


@pytest.mark.parametrize("part", [b"", HELLO[:9], HELLO], ids=["silent", "a length", "half a greeting"])
async def test_a_connection_without_a_handshake_is_closed(
    part: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)

    async with FakeReward() as server, gateway(server.url, **make_certificate(tmp_path)) as caller:
        assert await answer(caller, part) == b""


async def test_the_time_for_a_head_includes_the_handshake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    files = make_certificate(tmp_path)
    tls = ssl.create_default_context(cafile=files["tls_certificate"])

    async with FakeReward() as server, gateway(server.url, **files) as caller:
        assert await answer(caller, b"GET /hea", tls=tls) == b""
        assert b" 200 " in await answer(caller, CLOSING, tls=tls)


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
async def test_silent_connections_keep_no_client_out(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_TLS_CONNECTIONS" if secure else "MAX_CONNECTIONS", 8)
    files = make_certificate(tmp_path) if secure else {}

    async with FakeReward() as server, gateway(server.url, **files) as caller:
        port = int(caller.url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for _ in range(5):
            assert (await caller.post("/get_reward", {"query": ["abc"]}))[1]["rewards"] == [3]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(silent[0][0].read(), DEADLINE_S) == b""
        for _, writer in silent:
            writer.close()


async def test_closed_connections_whose_clients_keep_them_keep_no_client_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS waits 30 s for their answer to its end."""
    monkeypatch.setattr(connections, "MAX_TLS_CONNECTIONS", 8)
    files = make_certificate(tmp_path)
    tls = ssl.create_default_context(cafile=files["tls_certificate"])

    def keep(port: int) -> ssl.SSLSocket:
        kept = tls.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
        kept.sendall(CLOSING)
        return kept

    async with FakeReward() as server, gateway(server.url, **files) as caller:
        port = int(caller.url.rpartition(":")[2])
        kept = [await asyncio.to_thread(keep, port) for _ in range(20)]
        for _ in range(5):
            assert (await caller.post("/get_reward", {"query": ["abc"]}))[1]["rewards"] == [3]
        for one in kept:
            one.close()


@pytest.mark.parametrize("key", [None, "sesame"])
async def test_heads_and_bodies_are_bounded_before_the_key_is_checked(key: str | None) -> None:
    async with FakeReward() as server, gateway(server.url, key=key) as caller:
        head = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
        assert b" 200 " in await answer(caller, head + b"Connection: close\r\nX: " + b"a" * 10_000 + b"\r\n\r\n")
        for long in (b"X: " + b"a" * 4_000_000, b"X: a\r\n" * 500_000):
            assert b" 200 " not in await answer(caller, head + b"Connection: close\r\n", long + b"\r\n\r\n")
        assert b" 413 " in await answer(caller, head + b"Content-Length: 1000\r\n\r\n", b" " * 1000)
        if key:  # closed without the body
            assert b" 401 " in await answer(caller, POST + b"\r\n")
