"""The gateway in front of a fake server: its protocols, wrong requests, failing servers, and limits per client."""

import asyncio
import contextlib
import json
import socket
import tracemalloc

import numpy as np
import pytest
from fake_reward import FakeReward, gateway, rows_of
from loop_clock import advance, hurried
from prometheus_client.parser import text_string_to_metric_families

from rlhf_triton.actor.capture.http import NOT_HONOURED
from rlhf_triton.client import reward_source
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import GatewaySection
from rlhf_triton.tools.gateway import app, command
from rlhf_triton.tools.gateway.command import check_key
from rlhf_triton.tools.gateway.protocols.vllm import activated

NONE = np.empty((0, 1))
CHAT = [{"role": "user", "content": "Hi"}]


@contextlib.asynccontextmanager
async def fake_gateway(*terms, **settings):
    """A gateway in front of one fake server."""
    served = {name: settings.pop(name) for name in ("labels", "text", "groupwise") if name in settings}
    async with FakeReward(terms=terms, **served) as server, gateway(server.url, **settings) as caller:
        yield caller, server


def metadata_of(server):
    return [json.loads(item) for inputs in server.received for item in inputs.get("metadata", NONE)[:, 0]]


async def test_json_api_scores_texts_chats_and_tokens_of_any_length():
    async with fake_gateway() as (caller, server):
        server.parameters["process"] = "step"  # which looks for no steps in prompts
        said = {"role": "assistant", "content": "Hello", "tool_calls": [{"id": "1"}]}
        inputs = [
            {"text": "four"},
            {"tokens": [3, 4, 5], "prompt_length": 2},
            {"prompt": "1 + 1 =", "response": " 2"},
            {"messages": [*CHAT, said]},
            {"tokens": [7]},
        ]
        for server.version in (3, 4):
            status, reply = await caller.post("/v1/rewards", {"inputs": inputs})
            assert (status, reply["rewards"], reply["errors"]) == (200, [4, 12, 9, 5, 7], [None] * 5)
            assert (reply["components"], reply["weights_versions"]) == ({}, [server.version] * 5)
        assert len(server.received) == 2 * 2  # one request with texts, one with tokens
        lengths = [each["prompt_lengths"].tolist() for each in server.received if "tokens" in each]
        assert lengths == [[[2], [0]]] * 2
        assert {"messages": CHAT, "response": "Hello", "reply_messages": [said]} in metadata_of(server)
        # The server truncates no row that has a reply.
        assert {"prompt": "1 + 1 =", "response": " 2"} in metadata_of(server)


async def test_each_group_is_one_request_and_callers_share_none():
    async with fake_gateway("verdict", groupwise=True, ROWS_PER_REQUEST=1) as (caller, server):
        chat = [*CHAT, {"role": "assistant", "content": "Hello"}]
        inputs = [
            {"prompt": "a", "response": "1"},
            {"prompt": "b", "response": "22"},
            {"prompt": "a", "response": "333"},
            {"messages": chat},
            {"prompt": CHAT, "response": ""},
            {"text": "alone"},
            {"tokens": [1, 2], "metadata": {"group": 7}},
            {"tokens": [5], "metadata": {"group": 7}},
        ]
        replies = await asyncio.gather(*(caller.post("/v1/rewards", {"inputs": inputs}) for _ in range(2)))
        assert [reply["rewards"] for _, reply in replies] == [[2, 3, 4, 5, 0, 5, 3, 5]] * 2
        sent = sorted(map(str, map(rows_of, server.received)))
        assert sent == sorted(map(str, [["a1", "a333"], ["b22"], ["Hello", ""], ["alone"], [[1, 2], [5]]] * 2))
        assert {"group": 7} in metadata_of(server)


async def test_refused_group_is_not_split():
    """A part of it would have other rewards."""

    async with fake_gateway("verdict", groupwise=True) as (caller, server):
        tokens = [{"tokens": row, "metadata": {"group": group}} for row, group in (([1], 1), ([99], 1))]
        mixed = [{"tokens": [1], "metadata": {"group": 3}}, {"text": "x", "metadata": {"group": 3}}]
        good = [{"text": "good", "metadata": {"group": "good"}}]
        _, reply = await caller.post("/v1/rewards", {"inputs": [*tokens, *mixed, *good]})
        assert reply["rewards"] == [None] * 4 + [4]
        other = "tokens: other rows of the group are texts"
        outside = "tokens[1, 0]: 99 is outside the vocabulary"
        assert reply["errors"] == [outside, outside, other, other, None]
        assert sorted(len(rows_of(inputs)) for inputs in server.received) == [1, 2]


async def test_reward_terms_are_returned_and_metadata_is_sent():
    async with fake_gateway("verdict", "length") as (caller, server):
        row = {"prompt": "2+3=", "response": "5", "metadata": {"answer": "5"}}
        _, reply = await caller.post("/v1/rewards", {"inputs": [row, {"text": "nan"}]})
        assert reply["components"] == {"verdict": [5, 1], "length": [5, None]}
        assert reply["errors"] == [None, "the verifier crashed"]
        assert metadata_of(server)[0] == {"answer": "5", "prompt": "2+3=", "response": "5"}


async def test_prompt_and_response_are_sent_as_a_pair():
    async with fake_gateway(text="pair") as (caller, server):
        inputs = [
            {"prompt": "1 + 1 =", "response": " 2"},
            {"text": "alone"},
            {"messages": [*CHAT, {"role": "assistant", "content": "Hello"}]},
            {"prompt": "", "response": "x"},
        ]
        await caller.post("/v1/rewards", {"inputs": inputs})
        assert rows_of(server.received[0]) == ["1 + 1 =| 2", "alone|", "|Hello", "|x"]
        assert [row.get("messages") for row in metadata_of(server)] == [None, None, CHAT, None]
        await caller.post("/get_reward", {"query": ["<s>ab"], "prompts": ["<s>a"]})
        assert rows_of(server.received[1]) == ["<s>a|b"]


async def test_gateways_vllm_score_endpoint_scores_text_pairs():
    async with fake_gateway(text="pair", labels=("entailment",)) as (caller, _):
        raw = {"use_activation": False}
        for first, second, scores in (
            ("ab", ["c", "de"], [4, 5]),
            (["a", "abc"], ["", "d"], [2, 5]),
        ):
            _, reply = await caller.post("/score", {"text_1": first, "text_2": second, **raw})
            expected = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            assert (reply["object"], reply["data"]) == ("list", expected)
        _, reply = await caller.post("/v1/score", {"queries": "ab", "documents": ["c"]})
        assert reply["data"][0]["score"] == 1  # the probability of the only label
        body = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
        assert "text_1: 2 texts for 3 of text_2, must be as many, or one" in await caller.error("/score", body, 400)


async def test_gateways_rerank_endpoint_answers_in_vllm_and_tei_formats():
    async with fake_gateway(text="pair", labels=("entailment",)) as (caller, server):
        body = {"query": "q", "documents": ["a", "abc", "ab"], "use_activation": False}
        _, reply = await caller.post("/v2/rerank", {**body, "model": "reward_model", "return_documents": False})
        best = [{"index": 1, "relevance_score": 5}, {"index": 2, "relevance_score": 4}]
        assert (reply["model"], reply["results"]) == ("reward_model", [*best, {"index": 0, "relevance_score": 3}])
        assert rows_of(server.received[0]) == ["q|a", "q|abc", "q|ab"]
        for top_n, number in ((0, 3), (2, 2), (9, 3)):
            _, reply = await caller.post("/rerank", {**body, "top_n": top_n})
            assert [row["document"]["text"] for row in reply["results"]] == ["abc", "ab", "a"][:number]
        _, reply = await caller.post("/rerank", {"query": "q", "texts": ["a", "ab"], "raw_scores": True})
        assert reply == [{"index": 1, "score": 4}, {"index": 0, "score": 3}]
        _, reply = await caller.post("/rerank", {"query": "q", "texts": ["a"], "return_text": True, "truncate": False})
        assert reply == [{"index": 0, "score": 1, "text": "a"}]  # the probability of the only label
        refused = {"query": "q", "documents": ["a", "refuse"]}
        assert "documents[1]: " in await caller.error("/rerank", refused, 400)
    async with fake_gateway() as (caller, _):
        assert "use /v1/rewards" in await caller.error("/rerank", {"query": "q", "texts": ["a"]}, 501)


async def test_each_request_is_counted_and_logged_with_the_cause_of_a_failure(caplog):
    async with fake_gateway(key="sesame") as (caller, _):
        headers = {"Authorization": "Bearer sesame"}
        await caller.post("/v1/rewards", {"inputs": [{"text": "abc"}, {"text": "refuse"}]}, headers=headers)
        await caller.error("/get_reward", {"query": ["a", "refuse"]}, 400, headers=headers)
        await caller.error("/get_reward", {"query": ["a"]}, 401)
        await caller.error("/secret", {}, 404, headers=headers)
        async with caller.session.get(caller.url + "/metrics") as reply:
            page = await reply.text()
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[(sample.name.removeprefix("rlhf_gateway_"), *sample.labels.values())] = sample.value
    requests = {key[1:]: value for key, value in samples.items() if key[0] == "requests_total"}
    assert requests == {
        ("/v1/rewards", "200"): 1,
        ("/get_reward", "400"): 1,
        ("/get_reward", "401"): 1,
        ("other", "404"): 1,
    }
    assert (samples["rows_total",], samples["failed_rows_total",]) == (4, 3)
    assert "2 rows (1 without a reward)" in caplog.messages[0]
    assert caplog.messages[1].endswith("ms: query[1]: text: 'refuse' has no tokens")


async def test_gateways_openrlhf_protocol_returns_rewards_scores_and_terms():
    async with fake_gateway("verdict") as (caller, server):
        body = {"query": ["<s>ab", "<s>abcd"], "prompts": ["<s>a", "other"], "labels": [7, None]}
        status, reply = await caller.post("/get_reward", body)
        assert status == 200
        assert reply == {"rewards": [5, 7], "scores": [5, 7], "extra_logs": {"verdict": [5, 7]}}
        assert metadata_of(server) == [{"label": 7, "prompt": "<s>a", "response": "b"}, {"label": None}]
        _, reply = await caller.post("/get_reward", {"query": ["abc"]})
        assert reply["rewards"] == [3]
        await caller.error("/get_reward", {"query": ["a", "nan"]}, 502)


VLLM_BODIES = [
    ({"input": "abc"}, [3]),
    ({"input": ["a", "ab"]}, [1, 2]),
    ({"input": [1, 2]}, [3]),
    ({"input": [[5], [6, 7]]}, [5, 13]),
    ({"messages": [*CHAT, {"role": "assistant", "content": "Yes"}]}, [3]),
]


async def test_gateways_vllm_protocol_scores_texts_tokens_and_chats():
    async with fake_gateway() as (caller, _):
        for body, scores in VLLM_BODIES:
            for path, key in (("/classify", "probs"), ("/pooling", "data")):
                _, reply = await caller.post(path, {"model": "reward_model", "activation": False, **body})
                assert [(row["index"], row[key]) for row in reply["data"]] == [(i, [s]) for i, s in enumerate(scores)]
        row = (await caller.post("/classify", {"input": "ab"}))[1]["data"][0]
        assert row == {"index": 0, "label": None, "probs": [pytest.approx(0.880797)], "num_classes": 1}
        assert (await caller.get("/v1/models"))[1]["data"][0]["id"] == "reward_model"
    async with fake_gateway(labels=("bad", "mixed", "good")) as (caller, _):
        _, reply = await caller.post("/classify", {"input": ["ab"]})
        assert reply["data"] == [{"index": 0, "label": "good", "probs": [0, 0, 1], "num_classes": 3}]
    assert activated([-1000.0]) == [0.0]
    assert activated([1.0, 2.0, 3.0]) == pytest.approx([0.09003057, 0.24472847, 0.66524096])


@pytest.mark.parametrize(("key", "told"), [("", "not set or empty"), ("schlüssel", "ASCII"), ("a\nb", "ASCII")])
def test_key_that_no_http_header_can_carry_is_refused(key, told, monkeypatch):
    monkeypatch.setenv("A_KEY", key)
    with pytest.raises(ConfigError, match=f"gateway.key_env: .*A_KEY.*{told}"):
        check_key(GatewaySection(key_env="A_KEY"))


def test_gateway_that_cannot_bind_reports_one_sentence(tmp_path, capsys):
    (tmp_path / "my.yaml").write_text("gateway: {}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        for setting, told in (
            (
                f"port={number}",
                f"port {number} (gateway.port) on 127.0.0.1 cannot be used: Address already in use; st",
            ),
            ("host=no.such.invalid", "gateway.host: 'no.such.invalid' is not an address of this machine (Name or ser"),
        ):
            assert command.main(["--config", str(tmp_path / "my.yaml"), f"gateway.{setting}"]) == 2
            assert f"error: {told}" in capsys.readouterr().err


def test_gateway_command_expects_the_reward_terms_of_its_yaml(monkeypatch):
    class Connected(Exception):
        pass

    given = {}

    def connect(*_, expected):
        given.update(expected)
        raise Connected

    monkeypatch.setattr(command, "TritonClient", connect)
    config = RunConfig.model_validate({"rewards": {"verdict": {"function": "mine:verify"}}})
    with pytest.raises(Connected):
        asyncio.run(command.serve(config))
    assert json.loads(given["reward_model"]["reward_components"]) == ["verdict"]


async def test_key_is_accepted_as_bearer_token_api_key_or_url_password():
    async with fake_gateway(key="sesame") as (caller, _):
        body = {"query": ["abc"]}
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Basic ///"}, 401),
            ({"Authorization": "Bearer sesame"}, 200),
            ({"x-api-key": "sesame"}, 200),  # as Anthropic's client
        ):
            assert (await caller.post("/get_reward", body, headers=headers))[0] == status
        assert (await caller.get("/healthz"))[0] == 200
        caller.url = caller.url.replace("://", "://:sesame@")  # OpenRLHF has no other place for it
        assert (await caller.post("/get_reward", body))[1]["rewards"] == [3]


# ---- wrong requests and failing servers ----

PROTOCOLS = {
    "/v1/rewards": {"inputs": [{"text": "abc"}]},
    "/get_reward": {"query": ["abc"]},
    "/classify": {"input": "abc"},
    "/pooling": {"input": "abc"},
}


@contextlib.asynccontextmanager
async def checked_gateway(behaviour=lambda model, number: "ok", **settings):
    """Yield a gateway; check at the end that it still answers a good request correctly."""
    async with FakeReward(behaviour) as server, gateway(server.url, **settings) as caller:
        yield caller, server
        server.behaviour = lambda model, number: "ok"
        status = 0
        while status != 200:  # a server that was lost is found again after a pause
            status, reply = await caller.post("/get_reward", {"query": ["alive"]})
            assert status in (200, 504)
        assert reply["rewards"] == [5]


ROW = {"text": "a"}
WRONG_BODIES = [
    ("/v1/rewards", {"inputs": [{"txet": "a"}]}, 400, "inputs[0]: unknown field 'txet'; known: messages"),
    ("/v1/rewards", {"inputs": [ROW | {"tokens": [1]}]}, 400, "text and tokens"),
    ("/v1/rewards", {"inputs": [{"prompt": "a"}]}, 400, "has only one of prompt and response; send both"),
    ("/v1/rewards", {"inputs": [ROW | {"metadata": {"prompt": "b"}}]}, 400, "metadata.prompt: a reserved name"),
    ("/v1/rewards", {"inputs": [{"prompt": [{}], "response": "a"}]}, 400, "inputs[0].prompt.chat[0]: must be"),
    (
        "/v1/rewards",
        {"inputs": [{"tokens": [3, 4], "prompt_length": 2}]},
        400,
        "must be less than the number of tokens",
    ),
    ("/get_reward", {"query": "abc"}, 400, "query: must be a valid list, got 'abc'"),
    ("/get_reward", {"query": []}, 400, "0 rows"),
    ("/v1/rewards", {"inputs": [{"tokens": []}]}, 400, "inputs[0].tokens: "),
    ("/v1/rewards", {"inputs": ["a"]}, 400, "inputs[0]: must be a valid dictionary, got 'a'"),
    ("/get_reward", {"query": ["a"], "labels": [1, 2]}, 400, "labels: 2 entries"),
    ("/classify", {"input": [["a"]]}, 400, "input[0].tokens[0]: must be a valid integer"),
    ("/classify", {"input": "a", "messages": CHAT}, 400, "input and messages are given"),
    ("/classify", {"model": "other", "input": "a"}, 404, "'other' does not exist"),
    ("/score", {"text_1": "a", "text_2": "b"}, 501, "need reward.text: pair"),
    ("/get_reward", b'{"query": ["\xff"]}', 400, "body: must be JSON in UTF-8"),
    ("/get_reward", b'{"query": ["a\\ud800"]}', 400, "surrogates not allowed"),  # the wire would make it another text
    ("/get_reward", b"[" * 100_000, 400, "body"),
    ("/get_rewards", {}, 404, "/get_rewards: no such path; known: /classify, /get_reward, "),
    ("/v1/models", {}, 405, "/v1/models: POST is not allowed here; "),
    ("/health", {}, 413, "send no body to this path"),
]


async def test_error_of_an_invalid_body_names_the_field():
    async with checked_gateway() as (caller, server):
        for path, body, status, names in WRONG_BODIES:
            assert names in await caller.error(path, body, status)
        assert not server.received


async def test_request_options_that_would_change_a_score_are_refused():
    async with fake_gateway(text="pair", labels=("good",)) as (caller, server):
        for name in NOT_HONOURED:
            told = await caller.error("/rerank", {"query": "a", "documents": ["b"], name: 0}, 400)
            assert f"body: {name} is 0, but no row is truncated" in told
        assert not server.received
        harmless = {**dict.fromkeys(NOT_HONOURED), "truncate": False, "model": "reward_model"}
        assert (await caller.post("/classify", {"input": "a", **harmless}))[0] == 200


async def test_oversized_bodies_are_refused_before_reading():
    async def chunks():
        for _ in range(20):
            yield b" " * 3000

    async with checked_gateway(MAX_BODY_BYTES=50_000) as (caller, server):
        assert "exceeds 50000 bytes" in await caller.error("/get_reward", {"query": ["x" * 60_000]}, 413)
        async with caller.session.post(caller.url + "/get_reward", data=chunks()) as reply:  # no Content-Length
            assert reply.status == 413
        assert not server.received


async def test_refused_rows_do_not_affect_other_rows():
    async with checked_gateway() as (caller, _):
        texts = [{"text": "refuse" if i in (0, 5, 6) else "x" * i} for i in range(20)]
        inputs = [*texts, {"tokens": [99, 1]}, {"tokens": [4]}, {"text": "nan"}]
        (status, reply), (_, other) = await asyncio.gather(
            caller.post("/v1/rewards", {"inputs": inputs}), caller.post("/get_reward", {"query": ["abc"]})
        )
        assert (status, other["rewards"]) == (200, [3])
        expected = [None if i in (0, 5, 6) else i for i in range(20)]
        assert reply["rewards"] == [*expected, None, 4, None]
        assert [i for i, error in enumerate(reply["errors"]) if error] == [0, 5, 6, 20, 22]
        assert reply["errors"][5] == "text: 'refuse' has no tokens"
        assert reply["errors"][20] == "tokens[0]: 99 is outside the vocabulary"
        assert "[nan]" in reply["errors"][22]
        assert "query[1]: text: 'refuse'" in await caller.error("/get_reward", {"query": ["a", "refuse"]}, 400)


async def test_message_parts_are_joined_and_non_text_parts_are_refused():
    async with fake_gateway() as (caller, server):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        await caller.post("/pooling", {"messages": [{"role": "user", "content": parts}]})
        assert metadata_of(server)[0]["messages"] == [{"role": "user", "content": "a\nb"}]
        image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        assert "'image_url', must have only text" in await caller.error("/pooling", image, 400)


@pytest.mark.parametrize(("answer", "status"), [("failed", 502), ("busy", 503), ("dead", 503), ("hang", 504)])
async def test_failing_server_gives_errors_and_no_rewards(answer, status):
    client = {"max_outage_s": 0}
    deadline_s = 0.3 if answer == "hang" else 120.0
    async with checked_gateway(lambda model, number: answer, client=client, retries=1, DEADLINE_S=deadline_s) as (
        caller,
        _,
    ):
        single = {path: body for path, body in PROTOCOLS.items() if path != "/v1/rewards"}
        await asyncio.gather(*(caller.error(path, body, status) for path, body in single.items()))
        found, reply = await caller.post("/v1/rewards", PROTOCOLS["/v1/rewards"])
        assert found == (200 if status == 502 else status)  # 502: the server answered, and this row has no reward
        assert found != 200 or (reply["rewards"] == [None] and "not finite" in reply["errors"][0])


async def test_requests_wait_for_a_stopped_server_until_the_deadline():
    async with checked_gateway(DEADLINE_S=20.0) as (caller, server):
        assert (await caller.post("/get_reward", {"query": ["abc"]}))[1]["rewards"] == [3]
        await server.stop()
        assert server.url in await hurried(caller.error("/get_reward", {"query": ["abc"]}, 504))
        assert (await caller.get("/readyz"))[0] == 503
        await server.start()

        async def until_it_is_found():
            while (await caller.post("/get_reward", {"query": ["abc"]}))[0] != 200:
                pass

        await hurried(until_it_is_found())


async def test_a_first_request_waits_for_a_server_and_fails_with_the_cause():
    async with FakeReward() as later, gateway(later.url, DEADLINE_S=120.0) as caller:
        await later.stop()
        asked = asyncio.create_task(caller.post("/v1/rewards", {"inputs": [{"text": "abc"}]}))
        await asyncio.sleep(0.3)
        await later.start()
        assert (await asked)[1]["rewards"] == [3]
    async with gateway("127.0.0.1:1", DEADLINE_S=20.0) as caller:
        assert "127.0.0.1:1" in await hurried(caller.error("/get_reward", PROTOCOLS["/get_reward"], 503))
        assert (await caller.get("/healthz"))[0] == 200


async def test_shutdown_does_not_wait_for_disconnected_clients(monkeypatch):
    """The disconnected clients' requests are still waiting for a server."""
    asked = asyncio.Event()
    served = reward_source.RewardSource.served

    async def watched(source):
        asked.set()
        return await served(source)

    async def leave():
        async with gateway("127.0.0.1:1", DEADLINE_S=600.0) as caller:
            request = asyncio.create_task(caller.post("/get_reward", {"query": ["abc"]}))
            await asked.wait()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    monkeypatch.setattr(reward_source.RewardSource, "served", watched)
    await asyncio.wait_for(leave(), 120.0)


def test_gateway_finds_a_running_server_with_http_port_0(tmp_path, monkeypatch):
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, "server": {"http_port": 0}})
    given = config.model_copy(update={"server": config.server.model_copy(update={"http_port": 5})})
    assert command.server_url(given) == "127.0.0.1:5"
    up = []
    monkeypatch.setattr(command, "is_triton", up.__contains__)
    for written in ({}, {"http": "127.0.0.1:7"}):
        (tmp_path / "server.json").write_text(json.dumps(written))
        with pytest.raises(ConfigError, match=r"server\.http_port is 0, a port that .*, but it is not up; start it"):
            command.server_url(config)
    up.append("127.0.0.1:7")
    assert command.server_url(config) == "127.0.0.1:7"


async def test_rewards_are_refused_until_the_server_matches_the_yaml():
    ours = '["verdict"]'
    theirs = '["length"]'
    body = {"query": ["abc"]}
    async with (
        FakeReward(terms=("length",)) as server,
        gateway(server.url, expected={"reward_components": ours, "groupwise": None}) as caller,
    ):
        message = await caller.error("/get_reward", body, 503)
        assert f"reward_model has reward_components {theirs}, but {ours} is expected" in message
        assert theirs in (await caller.get("/readyz"))[1]["error"]["message"]
        for terms in (ours, '["other"]', ours):  # each time another server at the address
            await server.stop()
            server.parameters = {**server.parameters, "reward_components": terms}
            server.terms = tuple(json.loads(terms))
            await server.start()
            status = 0
            while status != (200 if terms == ours else 503):
                status, reply = await caller.post("/get_reward", body)
                assert status in ((200, 503) if terms == ours else (503,)), reply


# ---- what one client sends does not take the gateway from the others ----

LONG = "x" * 200_000
# Bodies of at most 4 MB, which took 100 MB to 1 GB.
BOMBS = [
    ("/score", {"text_1": LONG, "text_2": ["a"] * 5000}, 413, "5000 rows, must be 1 to 4096 per request"),
    ("/score", {"text_1": [LONG], "text_2": ["a"] * 1500}, 413, "300001500 characters in all rows, must be at most"),
    ("/score", {"text_1": "x" * 4_100_000, "text_2": ["b"] * 2}, 413, "a text of 4100001 characters, must have at"),
    ("/v1/rewards", {"inputs": [{}] * 2000}, 400, "inputs[0]: has no content"),
    ("/v1/rewards", {"inputs": [{"messages": [{}] * 100_000}]}, 400, "inputs[0].messages[0]"),
    ("/v1/rewards", {"inputs": [{str(i): 1 for i in range(70_000)}]}, 400, "inputs[0]: unknown field '0'; known: "),
    ("/v1/rewards", {"inputs": [{"text": "a", "metadata": {"a": [[]] * 600_000}}]}, 413, "250000 texts, objects"),
    ("/classify", {"messages": [{"role": "user", "content": [1] * 200_000}]}, 400, "content"),
]


async def test_bodies_that_expand_in_memory_are_refused_early():
    async with fake_gateway(text="pair") as (caller, server):
        await caller.post("/get_reward", {"query": ["warm"]})
        for path, body, status, told in BOMBS:
            data = json.dumps(body).encode()
            tracemalloc.start()
            try:
                message = await caller.error(path, data, status)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert told in message
            assert len(message) < 500
            assert peak < 60e6, told
        assert len(server.received) == 1


async def test_large_bodies_wait_for_each_other_and_small_ones_do_not():
    async with (
        FakeReward(lambda model, number: "wait") as server,
        gateway(server.url, MAX_BODY_BYTES=300_000, ROWS_PER_REQUEST=1) as caller,
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


async def test_slow_upload_does_not_hold_up_other_large_bodies():
    """The part that has arrived leaves too little memory for the other body, which is complete first."""
    async with FakeReward() as server, gateway(server.url, MAX_BODY_BYTES=300_000, BODY_S=60) as caller:
        body = json.dumps({"query": ["x" * 250_000]}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.url.rpartition(":")[2]))
        head = f"POST /get_reward HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with contextlib.closing(writer):
            writer.write(head.encode() + body[:160_000])
            await writer.drain()
            for _ in range(5):
                await caller.get("/readyz")
            for _ in range(2):
                _, reply = await asyncio.wait_for(caller.post("/get_reward", body), 20)
                assert reply["rewards"] == [250_000]
            writer.write(body[160_000:])
            assert b" 200 " in await reader.read()


async def test_large_body_in_tiny_pieces_takes_no_more_memory():
    pieces = [b" " * app.SMALL_BODY_BYTES, *[b" "] * 5000]

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def consume(scope, receive, send):
        assert len((await receive())["body"]) == app.SMALL_BODY_BYTES + 5000

    guard = app.RequestGuard(consume, key=None)
    tracemalloc.start()
    try:
        await guard({"type": "http", "path": "/get_reward", "headers": []}, receive, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6


async def test_gateway_splits_requests_at_max_request_tokens():
    """It would be refused, and sent again in halves."""

    async with FakeReward() as server, gateway(server.url, ROWS_PER_REQUEST=8) as caller:
        server.parameters["max_request_tokens"] = "4000"
        query = ["x" * 900] * 6 + ["y"]
        _, reply = await caller.post("/get_reward", {"query": query})
        assert reply["rewards"] == [900] * 6 + [1]
        assert sorted(inputs["sentences"].size for inputs in server.received) == [3, 4]


@pytest.mark.parametrize("kind", [{}, {"groupwise": True}], ids=["requests", "groups"])
async def test_a_large_request_does_not_delay_other_callers(kind, monkeypatch):
    monkeypatch.setattr(reward_source, "ROWS_IN_FLIGHT", 4)

    async with FakeReward(**kind) as server, gateway(server.url, ROWS_PER_REQUEST=2) as caller:
        await caller.post("/get_reward", {"query": ["a"]})
        server.behaviour = lambda model, number: "wait"
        server.most_in_flight = 0
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


async def test_queued_rows_of_one_request_share_a_deadline(monkeypatch):
    monkeypatch.setattr(reward_source, "ROWS_IN_FLIGHT", 2)

    async with (
        FakeReward(terms=("length",)) as server,
        gateway(server.url, ROWS_PER_REQUEST=1, DEADLINE_S=60.0) as caller,
    ):
        await caller.post("/get_reward", {"query": ["a"]})
        server.behaviour = lambda model, number: "hang"
        asked = asyncio.create_task(caller.error("/v1/rewards", {"inputs": [{"text": "a"}] * 20}, 504))
        while server.in_flight < 2:
            await asyncio.sleep(0)
        advance(61.0)
        await asked
        assert len(server.asked) == 3


async def test_max_items_counts_parsed_items_not_brackets_in_texts(monkeypatch):
    monkeypatch.setattr(app, "MAX_ITEMS", 10)

    async with FakeReward(terms=("length",)) as server, gateway(server.url) as caller:
        for text in ("[{" * 100, '"\\' * 100, "a"):
            assert (await caller.post("/get_reward", {"query": [text] * 7}))[1]["rewards"] == [len(text)] * 7
        for body in ({"query": ["a"] * 9}, {"query": ["a"], "labels": [[[]] * 6]}):
            assert "more than 10 texts" in await caller.error("/get_reward", body, 413)


async def answer(caller, *parts):
    """Return what the gateway sends until it closes the connection; b"" if it sends nothing or resets it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(caller.url.rpartition(":")[2]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)  # for the reply to one request before the next
        return await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionError:
        return b""
    finally:
        writer.close()


POST = b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"


async def test_header_and_body_sizes_are_checked_before_the_key():
    async with FakeReward() as server, gateway(server.url, key="sesame", BODY_S=0.2) as caller:
        head = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
        assert b" 200 " in await answer(caller, head + b"Connection: close\r\nX: " + b"a" * 10_000 + b"\r\n\r\n")
        for long in (b"X: " + b"a" * 4_000_000, b"X: a\r\n" * 500_000):
            assert b" 200 " not in await answer(caller, head + b"Connection: close\r\n", long + b"\r\n\r\n")
        assert b" 413 " in await answer(caller, head + b"Content-Length: 1000\r\n\r\n", b" " * 1000)
        assert b" 401 " in await answer(caller, POST + b"\r\n")  # closed without the body
        assert b" 408 " in await answer(caller, POST + b'Authorization: Bearer sesame\r\n\r\n{"que')
