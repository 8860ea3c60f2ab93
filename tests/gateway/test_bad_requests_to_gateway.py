"""Bad requests and bad servers: a clear error for that row or request, never an invented reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_reward import Caller, FakeReward, gateway, rows_of
from fake_triton import Behaviour

PROTOCOLS = {
    "/v1/rewards": {"inputs": [{"text": "abc"}]},
    "/get_reward": {"query": ["abc"]},
    "/remote_rm": {"prompt": "ab", "response": "c", "label": None},
    "/classify": {"input": "abc"},
    "/pooling": {"input": "abc"},
}

MORE_BODIES = [
    {
        "inputs": [
            {"messages": [{"role": "user", "content": "a"}]},
            {"tokens": [1, 2]},
            {"prompt": "a", "response": "b"},
        ]
    },
    {"query": ["a", "b"], "prompts": ["a", "b"], "labels": [1, None]},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "response": "b", "label": {}},
    {"model": "reward_model", "input": [[1, 2], [3]], "use_activation": False, "encoding_format": "base64"},
]
STRANGE: list[Any] = [None, True, -1, 2**64, 1.5, "", "refuse", "a" * 5000, "\ud800", [], {}, [[]], {"": None}, [None]]


@contextlib.asynccontextmanager
async def fake_gateway(
    behaviour: Behaviour = lambda model, number: "ok", **settings: Any
) -> AsyncIterator[tuple[Caller, FakeReward]]:
    """A gateway, which still answers a good request correctly at the end."""
    async with FakeReward(behaviour) as server, gateway(server.url, **settings) as caller:
        yield caller, server
        server.behaviour = lambda model, number: "ok"
        status = 0
        while status != 200:  # a server that was lost is found again after a pause
            status, reply = await caller.post("/get_reward", {"query": ["alive"]})
            assert status in (200, 504)
        assert reply["rewards"] == [5]


WRONG_BODIES = [
    ("/v1/rewards", {"inputs": [{"txet": "a"}]}, "inputs.0.txet"),
    ("/v1/rewards", {"inputs": [{"text": "a"}], "model": "x"}, "model"),
    ("/v1/rewards", {"inputs": [{"text": 5}]}, "inputs.0.text"),
    ("/v1/rewards", {"inputs": [{"text": "a", "tokens": [1]}]}, "text and tokens"),
    ("/v1/rewards", {"inputs": [{}]}, "no content"),
    ("/v1/rewards", {"inputs": [{"prompt": "a"}]}, "belong together"),
    ("/v1/rewards", {"inputs": [{"tokens": [1, -1]}]}, "inputs.0.tokens.1"),
    ("/v1/rewards", {"inputs": [{"tokens": [1, 2**70]}]}, "inputs.0.tokens.1"),
    ("/v1/rewards", {"inputs": [{"tokens": [True]}]}, "inputs.0.tokens.0"),
    ("/v1/rewards", {"inputs": [{"text": "a", "metadata": {"prompt": "b"}}]}, "metadata.prompt: a reserved name"),
    ("/v1/rewards", {"inputs": []}, "inputs"),
    ("/v1/rewards", [], "must be a JSON object, sent with the header Content-Type"),
    ("/get_reward", {"query": "abc"}, "query"),
    ("/get_reward", {"query": []}, "0 rows"),
    ("/get_reward", {"queries": ["a"]}, "query: Field required"),
    ("/remote_rm", {"prompt": "a"}, "response: Field required"),
    ("/remote_rm", {"prompt": [], "response": "a"}, "prompt"),
    ("/classify", {"input": [["a"]]}, "input.0.0"),
    ("/classify", {"input": "a", "add_special_tokens": False}, "reward.add_special_tokens True"),
    ("/classify", {"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input"),
    ("/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ("/pooling", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ("/get_reward", b'{"query": ["\xff"]}', "body"),
    ("/get_reward", b'{"query": ["abc"', "body"),
    ("/get_reward", b"[" * 100_000, "body"),
    ("/get_reward", b"", "body"),
]


async def test_a_wrong_body_is_named() -> None:
    async with fake_gateway() as (caller, server):
        for path, body, names in WRONG_BODIES:
            assert names in await caller.error(path, body, 400)
        assert not server.received


async def test_unknown_models_and_paths_are_not_found() -> None:
    async with fake_gateway() as (caller, _):
        assert "`other` does not exist" in await caller.error("/classify", {"model": "other", "input": "a"}, 404)
        await caller.error("/reward", {}, 404)


async def test_too_much_is_refused_before_it_is_read() -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 1000

    async with fake_gateway(max_body_bytes=8000, max_rows=4) as (caller, server):
        assert "max_body_bytes" in await caller.error("/get_reward", {"query": ["x" * 10_000]}, 413)
        async with caller.session.post(caller.url + "/get_reward", data=chunks()) as reply:  # no Content-Length
            assert reply.status == 413
        assert "5 rows" in await caller.error("/get_reward", {"query": ["a"] * 5}, 413)
        assert not server.received


async def test_rows_that_the_server_refuses_do_not_affect_others() -> None:
    async with fake_gateway() as (caller, _):
        texts = [{"text": "refuse" if i in (0, 5, 6) else "x" * i} for i in range(20)]
        inputs = [*texts, {"tokens": [99, 1]}, {"tokens": []}, {"tokens": [4]}, {"text": "nan"}]
        (status, reply), (_, other) = await asyncio.gather(
            caller.post("/v1/rewards", {"inputs": inputs}), caller.post("/get_reward", {"query": ["abc"]})
        )
        assert (status, other["rewards"]) == (200, [3])
        expected = [None if i in (0, 5, 6) else i for i in range(20)]
        assert reply["rewards"] == [*expected, None, None, 4, None]
        assert [i for i, error in enumerate(reply["errors"]) if error] == [0, 5, 6, 20, 21, 23]
        assert reply["errors"][5] == "text: 'refuse' has no tokens"
        assert reply["errors"][20] == "tokens[0]: 99 is outside the vocabulary"
        assert "empty" in reply["errors"][21]
        assert "[nan]" in reply["errors"][23]
        assert "query[1]: text: 'refuse'" in await caller.error("/get_reward", {"query": ["a", "refuse"]}, 400)


async def test_half_a_character_is_refused_and_harms_no_other_row() -> None:
    """The wire would make it a question mark, and a reward of another text."""

    async with fake_gateway() as (caller, server):
        chat = b'{"messages": [{"role": "user", "content": "b\\udc00"}]}'
        body = b'{"inputs": [{"text": "a\\ud800"}, {"text": "abc"}, {"prompt": "", "response": "\\udfff"}, %s]}' % chat
        status, reply = await caller.post("/v1/rewards", body)
        assert (status, reply["rewards"]) == (200, [None, 3, None, None])
        assert reply["errors"][0] == "text: character 1 is '\\ud800', half of a character, which UTF-8 cannot encode"
        assert "half of a character" in await caller.error("/get_reward", b'{"query": ["a\\ud800"]}', 400)
        assert [row for inputs in server.received for row in rows_of(inputs)] == ["abc"]


async def test_parts_of_a_message_are_joined_and_only_text_is_taken() -> None:
    def chat(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}]

    async with fake_gateway() as (caller, server):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for path, body in (
            ("/v1/rewards", lambda content: {"inputs": [{"messages": chat(content)}]}),
            ("/remote_rm", lambda content: {"prompt": chat(content), "response": "c", "label": None}),
            ("/pooling", lambda content: {"messages": chat(content)}),
        ):
            server.received.clear()
            assert (await caller.post(path, body(parts)))[0] == 200
            assert json.loads(server.received[0]["metadata"][0, 0])["messages"] == chat("a\nb")
            wrong = {"'image_url', only text": [{"type": "image_url"}], "content: missing or null": None}
            for told, content in wrong.items():
                assert told in await caller.error(path, body(content), 400)


def damaged(value: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON value in which some parts are replaced, missing, or too many."""
    if chance.random() < 0.15:
        return chance.choice(STRANGE)
    if isinstance(value, dict):
        kept = {key: damaged(item, chance) for key, item in value.items() if chance.random() > 0.1}
        return kept if chance.random() > 0.1 else {**kept, chance.choice(("x", "tokens", "metadata", "")): 1}
    if isinstance(value, list):
        return [damaged(item, chance) for item in value for _ in range(chance.choice((0, 1, 1, 1, 2)))]
    return value


async def test_damaged_requests_get_an_answer() -> None:
    async with fake_gateway() as (caller, _):
        chance = random.Random(0)
        for _ in range(30):
            paths = chance.choices([*PROTOCOLS], k=10)
            bodies = [damaged(chance.choice((PROTOCOLS[path], *MORE_BODIES)), chance) for path in paths]
            replies = await asyncio.gather(*map(caller.post, paths, bodies))
            for status, reply in replies:
                assert status in (200, 400, 404, 413, 502), reply
                assert (status == 200) == (not isinstance(reply, dict) or "error" not in reply)


@pytest.mark.parametrize(("answer", "status"), [("failed", 502), ("busy", 503), ("dead", 503), ("hang", 504)])
async def test_no_reward_is_invented_while_the_server_fails(answer: str, status: int) -> None:
    client, deadline_s = {"retries": 1, "max_outage_s": 0}, 0.3 if answer == "hang" else 20.0
    async with fake_gateway(lambda model, number: answer, client=client, deadline_s=deadline_s) as (caller, _):
        single = {path: body for path, body in PROTOCOLS.items() if path != "/v1/rewards"}
        await asyncio.gather(*(caller.error(path, body, status) for path, body in single.items()))
        found, reply = await caller.post("/v1/rewards", PROTOCOLS["/v1/rewards"])
        assert found == (200 if status == 502 else status)  # 502: the server answered, and this row has no reward
        assert found != 200 or (reply["rewards"] == [None] and "not finite" in reply["errors"][0])


async def test_a_stopped_server_is_waited_for_until_the_deadline() -> None:
    async with fake_gateway(deadline_s=2.0) as (caller, server):
        assert (await caller.post("/get_reward", {"query": ["abc"]}))[1]["rewards"] == [3]
        await server.stop()
        message = await caller.error("/get_reward", {"query": ["abc"]}, 504)
        assert "gateway.deadline_s" in message
        assert server.url in message
        assert (await caller.get("/readyz"))[0] == 503
        await server.start()


async def test_a_first_request_waits_for_a_server_and_fails_with_the_cause() -> None:
    async with FakeReward() as later, gateway(later.url, deadline_s=20.0) as caller:
        await later.stop()
        asked = asyncio.create_task(caller.post("/v1/rewards", {"inputs": [{"text": "abc"}]}))
        await asyncio.sleep(0.3)
        assert (await caller.get("/readyz"))[0] == 503
        await later.start()
        assert (await asked)[1]["rewards"] == [3]
    async with gateway("127.0.0.1:1", deadline_s=0.1) as caller:
        for path, body in PROTOCOLS.items():
            assert "127.0.0.1:1" in await caller.error(path, body, 503)
        assert (await caller.get("/healthz"))[0] == 200
        assert (await caller.get("/readyz"))[0] == 503


async def test_rewards_of_other_terms_are_none_until_the_server_serves_the_yaml() -> None:
    ours, theirs = '["verdict"]', '["length"]'

    body = {"query": ["abc"]}
    async with (
        FakeReward(terms=("length",)) as server,
        gateway(server.url, expected={"reward_components": ours, "groupwise": None}) as caller,
    ):
        for path in ("/get_reward", "/get_reward", "/classify"):
            message = await caller.error(path, body if path == "/get_reward" else {"input": "abc"}, 503)
            assert f"{server.url} serves another configuration" in message
            assert f"reward_model has reward_components {theirs}, but {ours} is expected" in message
        assert theirs in (await caller.get("/readyz"))[1]["error"]["message"]
        for terms in (ours, '["other"]', ours, None, ours):  # each time another server at the address
            await server.stop()
            server.parameters = {**server.parameters, "reward_components": terms or ""}
            server.terms = tuple(json.loads(terms or "[]"))
            server.received.clear()
            await server.start()
            status = 0
            while status != (200 if terms == ours else 503):
                status, reply = await caller.post("/get_reward", body)
                assert status in ((200, 503) if terms == ours else (503,)), reply
            if terms == ours:
                assert reply == {"rewards": [3], "scores": [3], "extra_logs": {"verdict": [3]}}


async def test_what_servers_declare_is_read_again_from_one_that_was_started_again() -> None:
    async with (
        FakeReward(labels=("bad", "good")) as server,
        gateway(server.url, expected={"text": "joined"}) as caller,
    ):
        assert (await caller.post("/classify", {"input": "abc"}))[1]["data"][0]["label"] == "good"
        await server.stop()
        server.labels, server.parameters["labels"] = ("no", "yes"), '["no", "yes"]'
        await server.start()
        await caller.post("/classify", {"input": "abc"})
        assert (await caller.post("/classify", {"input": "abc"}))[1]["data"][0]["label"] == "yes"


async def test_a_lost_server_is_replaced_by_another() -> None:
    async with FakeReward() as one, FakeReward() as other, gateway(one.url, other.url) as caller:
        await caller.post("/get_reward", {"query": ["abc"]})
        await one.stop()
        replies = await asyncio.gather(*(caller.post("/get_reward", {"query": ["x" * i]}) for i in range(1, 20)))
        assert [reply["rewards"] for _, reply in replies] == [[i] for i in range(1, 20)]
        assert sum(len(rows_of(inputs)) for inputs in other.received) >= 19
        assert (await caller.get("/readyz"))[0] == 200
