"""The gateway's protocols against a fake server: what each request becomes, and the shape of each reply."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fake_reward import Caller, FakeReward, gateway, rows_of

from python_backend.config import ConfigError, GatewaySection, RunConfig
from tools.gateway import command
from tools.gateway.command import check_key
from tools.gateway.vllm import activated

NONE = np.empty((0, 1))
CHAT = [{"role": "user", "content": "Hi"}]


@contextlib.asynccontextmanager
async def fake_gateway(*terms: str, **settings: Any) -> AsyncIterator[tuple[Caller, FakeReward]]:
    """A gateway in front of one fake server."""
    served = {name: settings.pop(name) for name in ("labels", "text", "groupwise") if name in settings}
    async with FakeReward(terms=terms, **served) as server, gateway(server.url, **settings) as caller:
        yield caller, server


def metadata_of(server: FakeReward) -> list[dict[str, Any]]:
    return [json.loads(item) for inputs in server.received for item in inputs.get("metadata", NONE)[:, 0]]


async def test_json_api_scores_texts_chats_and_tokens_of_any_length() -> None:
    async with fake_gateway() as (caller, server):
        inputs = [
            {"text": "four"},
            {"tokens": [3, 4, 5]},
            {"prompt": "1 + 1 =", "response": " 2"},
            {"messages": [*CHAT, {"role": "assistant", "content": "Hello"}]},
            {"tokens": [7]},
        ]
        status, reply = await caller.post("/v1/rewards", {"inputs": inputs})
        assert (status, reply["rewards"], reply["errors"]) == (200, [4, 12, 9, 5, 7], [None] * 5)
        assert (reply["components"], reply["weights_versions"]) == ({}, [None] * 5)
        assert len(server.received) == 2  # one request with texts, one with tokens
        assert {"messages": CHAT, "response": "Hello"} in metadata_of(server)


async def test_chats_without_a_reply_are_sent_whole() -> None:
    """The server would leave out an empty reply, which the chat template may render all the same."""

    async with fake_gateway() as (caller, server):
        empty = [*CHAT, {"role": "assistant", "content": ""}]
        called = [*CHAT, {"role": "assistant", "content": "Yes", "tool_calls": [{"id": "1"}]}]
        inputs = [{"messages": CHAT}, {"prompt": CHAT, "response": ""}, {"messages": called}]
        await caller.post("/v1/rewards", {"inputs": inputs})
        assert rows_of(server.received[0]) == ["", "", ""]
        assert metadata_of(server) == [{"messages": CHAT}, {"messages": empty}, {"messages": called}]


async def test_a_group_is_one_request_to_triton_and_no_two_callers_share_one() -> None:
    async with fake_gateway("verdict", groupwise=True, rows_per_request=1) as (caller, server):
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


async def test_a_group_that_the_server_refuses_is_not_divided() -> None:
    """A part of it would have other rewards."""

    async with fake_gateway("verdict", groupwise=True) as (caller, server):
        tokens = [
            {"tokens": row, "metadata": {"group": group}} for row, group in (([1], 1), ([99], 1), ([], 2), ([3], 2))
        ]
        mixed = [{"tokens": [1], "metadata": {"group": 3}}, {"text": "x", "metadata": {"group": 3}}]
        good = [{"text": "good", "metadata": {"group": "good"}}]
        _, reply = await caller.post("/v1/rewards", {"inputs": [*tokens, *mixed, *good]})
        assert reply["rewards"] == [None] * 6 + [4]
        empty, other = "tokens: empty, an empty sequence cannot be scored", "tokens: other rows of the group are texts"
        outside = "tokens[1, 0]: 99 is outside the vocabulary"
        assert reply["errors"] == [outside, outside, empty, empty, other, other, None]
        assert sorted(len(rows_of(inputs)) for inputs in server.received) == [1, 2]


async def test_rows_of_several_requests_share_one_to_triton() -> None:
    async with fake_gateway(rows_per_request=8) as (caller, server):
        await caller.post("/remote_rm", {"prompt": "", "response": "warm", "label": None})
        server.received.clear()
        body = {"inputs": [{"text": "x" * i} for i in range(1, 11)]}
        replies = await asyncio.gather(*(caller.post("/v1/rewards", body) for _ in range(3)))
        assert [reply["rewards"] for _, reply in replies] == [list(range(1, 11))] * 3
        assert len(server.received) < 10
        assert max(len(rows_of(inputs)) for inputs in server.received) <= 8


async def test_callers_share_no_request_if_functions_score_the_rows() -> None:
    """Else a slow row of one would cost the others their rewards."""

    async with fake_gateway("verdict", rows_per_request=8) as (caller, server):
        await caller.post("/remote_rm", {"prompt": "", "response": "warm", "label": None})
        server.received.clear()
        bodies = [{"inputs": [{"text": name * i} for i in range(1, 11)]} for name in "abc"]
        replies = await asyncio.gather(*(caller.post("/v1/rewards", body) for body in bodies))
        assert [reply["rewards"] for _, reply in replies] == [list(range(1, 11))] * 3
        sent = list(map(rows_of, server.received))
        assert sorted(map(len, sent)) == [2, 2, 2, 8, 8, 8]
        assert all(len(set("".join(texts))) == 1 for texts in sent)


async def test_terms_of_a_sum_and_metadata_reach_both_sides() -> None:
    async with fake_gateway("verdict", "length") as (caller, server):
        row = {"prompt": "2+3=", "response": "5", "metadata": {"answer": "5"}}
        _, reply = await caller.post("/v1/rewards", {"inputs": [row, {"text": "nan"}]})
        assert reply["components"] == {"verdict": [5, 1], "length": [5, None]}
        assert reply["errors"] == [None, "the verifier crashed"]
        assert metadata_of(server)[0] == {"answer": "5", "prompt": "2+3=", "response": "5"}


@pytest.mark.parametrize("declared", [{"texts_only": "true"}, {"process": "step"}])
async def test_a_template_and_steps_get_the_metadata_that_they_need(declared: dict[str, str]) -> None:
    async with fake_gateway() as (caller, server):
        server.parameters |= declared
        row = {"prompt": "2+3=", "response": "5", "metadata": {"step_ends": [1]}}
        await caller.post("/v1/rewards", {"inputs": [row]})
        assert metadata_of(server) == [{"step_ends": [1], "prompt": "2+3=", "response": "5"}]


async def test_the_prompt_of_token_rows_is_known_to_a_process_reward() -> None:
    async with fake_gateway() as (caller, server):
        server.parameters["process"] = "step"
        rows = [{"tokens": [3, 4, 5], "prompt_length": 2}, {"tokens": [7]}]
        assert (await caller.post("/v1/rewards", {"inputs": rows}))[1]["rewards"] == [12, 7]
        assert server.received[0]["prompt_lengths"].tolist() == [[2], [0]]
        for row in ({"tokens": [3, 4], "prompt_length": 2}, {"text": "four", "prompt_length": 1}):
            status, reply = await caller.post("/v1/rewards", {"inputs": [row]})
            assert status == 400
            assert "must be less than the number of tokens" in str(reply)


async def test_the_version_of_the_weights_is_that_of_each_reply() -> None:
    async with fake_gateway() as (caller, server):
        for server.version in (3, 4):
            _, reply = await caller.post("/v1/rewards", {"inputs": [{"text": "a"}, {"tokens": [99]}]})
            assert (reply["rewards"], reply["weights_versions"]) == ([1, None], [server.version, None])


async def test_probabilities_and_times_are_returned_on_request_only() -> None:
    async with fake_gateway(labels=("bad", "good")) as (caller, _):
        body = {"inputs": [{"text": "four"}, {"tokens": [99]}]}
        _, reply = await caller.post("/v1/rewards", body)
        assert not {"labels", "probabilities", "queue_us", "compute_us"} & reply.keys()
        _, reply = await caller.post("/v1/rewards", {**body, "probabilities": True, "timing": True})
        assert (reply["rewards"], reply["labels"]) == ([4, None], ["bad", "good"])
        assert reply["probabilities"] == [[0, 1], None]
        assert (reply["queue_us"], reply["compute_us"]) == ([7, None], [1000, None])


async def test_probabilities_of_a_server_without_labels_are_an_error() -> None:
    async with fake_gateway() as (caller, _):
        for name in ("probabilities", "timing"):
            body = {"inputs": [{"text": "a"}], name: True}
            assert f"{name}: the served reward has none" in await caller.error("/v1/rewards", body, 400)


async def test_prompt_and_response_are_sent_as_a_pair() -> None:
    async with fake_gateway(text="pair") as (caller, server):
        reply = {"role": "assistant", "content": "Hello"}
        inputs = [
            {"prompt": "1 + 1 =", "response": " 2"},
            {"text": "alone"},
            {"prompt": CHAT, "response": "Hello"},
            {"messages": [*CHAT, reply]},
            {"messages": CHAT},
            {"prompt": "", "response": "x"},
        ]
        await caller.post("/v1/rewards", {"inputs": inputs})
        assert rows_of(server.received[0]) == ["1 + 1 =| 2", "alone|", "|Hello", "|Hello", "|", "|x"]
        assert [row.get("messages") for row in metadata_of(server)] == [None, None, CHAT, CHAT, CHAT, None]
        await caller.post("/get_reward", {"query": ["<s>ab"], "prompts": ["<s>a"]})
        await caller.post("/remote_rm", {"prompt": "a", "response": "bc", "label": None})
        assert [rows_of(inputs) for inputs in server.received[1:]] == [["<s>a|b"], ["a|bc"]]


async def test_vllm_scores_text_pairs() -> None:
    async with fake_gateway(text="pair", labels=("entailment",)) as (caller, _):
        raw = {"use_activation": False}
        for first, second, scores in (
            ("a", "b", [3]),
            ("ab", ["c", "de"], [4, 5]),
            (["a", "abc"], ["", "d"], [2, 5]),
            ("a", ["b"], [3]),
        ):
            status, reply = await caller.post("/score", {"text_1": first, "text_2": second, **raw})
            assert (status, reply["object"]) == (200, "list")
            expected = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            assert reply["data"] == expected
        for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            _, reply = await caller.post("/score", {**dict(zip(names, ("ab", ["c"]), strict=True)), **raw})
            assert reply["data"][0]["score"] == 4
        _, reply = await caller.post("/score", {"text_1": "a", "text_2": "b"})
        assert reply["data"][0]["score"] == 1  # the probability of the only label
        body = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
        assert "text_1: 2 texts for 3 of text_2, must be as many, or one" in await caller.error("/score", body, 400)
        for wrong in ({"text_1": "a"}, {"text_1": [], "text_2": "a"}, {"text_1": 5, "text_2": "a"}):
            await caller.error("/score", wrong, 400)


async def test_vllm_refuses_pairs_that_are_not_served() -> None:
    async with fake_gateway() as (caller, _):
        body = {"text_1": "a", "text_2": "b"}
        assert "needs reward.text: pair" in await caller.error("/score", body, 501)


async def test_vllm_classifies_with_the_labels_of_the_checkpoint() -> None:
    async with fake_gateway(labels=("bad", "mixed", "good")) as (caller, _):
        _, reply = await caller.post("/classify", {"input": ["ab", "c"]})
        row = {"label": "good", "probs": [0, 0, 1], "num_classes": 3}
        assert reply["data"] == [{"index": 0, **row}, {"index": 1, **row}]
        _, reply = await caller.post("/pooling", {"input": "ab"})
        assert reply["data"][0]["data"] == [0, 0, 1]
        _, reply = await caller.post("/classify", {"input": "ab", "use_activation": False})
        assert reply["data"] == [{"index": 0, "label": None, "probs": [2], "num_classes": 1}]


async def test_openrlhf_gets_rewards_scores_and_terms() -> None:
    async with fake_gateway("verdict") as (caller, server):
        body = {"query": ["<s>ab", "<s>abcd"], "prompts": ["<s>a", "other"], "labels": [7, None]}
        status, reply = await caller.post("/get_reward", body)
        assert status == 200
        assert reply == {"rewards": [5, 7], "scores": [5, 7], "extra_logs": {"verdict": [5, 7]}}
        assert metadata_of(server) == [{"label": 7, "prompt": "<s>a", "response": "b"}, {"label": None}]
        _, reply = await caller.post("/get_reward", {"query": ["abc"]})
        assert reply["rewards"] == [3]
        await caller.error("/get_reward", {"query": ["a", "nan"]}, 502)
        assert "labels: 2 entries" in await caller.error("/get_reward", {"query": ["a"], "labels": [1, 2]}, 400)


async def test_slime_gets_a_bare_number() -> None:
    async with fake_gateway("verdict") as (caller, server):
        for prompt, reward in (("12345", 8), (CHAT, 3)):
            body = {"prompt": prompt, "response": "yes", "label": {"answer": 1}}
            assert await caller.post("/remote_rm", body) == (200, reward)
            assert metadata_of(server)[-1]["label"] == {"answer": 1}


VLLM_BODIES = [
    ({"input": "abc"}, [3]),
    ({"input": ["a", "ab"]}, [1, 2]),
    ({"input": [1, 2]}, [3]),
    ({"input": [[5], [6, 7]]}, [5, 13]),
    ({"messages": [*CHAT, {"role": "assistant", "content": "Yes"}]}, [3]),
    ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]}, [3]),
]


async def test_vllm_scores_texts_tokens_and_chats() -> None:
    async with fake_gateway() as (caller, _):
        for body, scores in VLLM_BODIES:
            for path, key in (("/classify", "probs"), ("/pooling", "data")):
                status, reply = await caller.post(path, {"model": "reward_model", "use_activation": False, **body})
                assert status == 200
                assert [(row["index"], row[key]) for row in reply["data"]] == [(i, [s]) for i, s in enumerate(scores)]
                assert (reply["object"], reply["model"]) == ("list", "reward_model")


async def test_vllm_activates_by_default_and_encodes() -> None:
    async with fake_gateway() as (caller, _):
        _, reply = await caller.post("/classify", {"input": "ab"})
        row = reply["data"][0]
        assert row == {"index": 0, "label": None, "probs": [pytest.approx(0.880797)], "num_classes": 1}
        _, reply = await caller.post("/classify", {"input": "ab", "activation": False})  # as verl writes it
        assert reply["data"][0]["probs"] == [2]
        body = {"input": [[1, 2], [4]], "use_activation": False, "encoding_format": "base64"}
        _, reply = await caller.post("/pooling", body)
        assert struct.unpack("<f", base64.b64decode(reply["data"][0]["data"])) == (3.0,)
        assert reply["usage"]["prompt_tokens"] == 3
        _, reply = await caller.get("/v1/models")
        assert reply["data"][0]["id"] == "reward_model"


def test_activation_is_vllms() -> None:
    assert activated([0.0]) == [0.5]
    assert activated([-1000.0]) == [0.0]
    assert activated([1.0, 2.0, 3.0]) == pytest.approx([0.09003057, 0.24472847, 0.66524096])


async def test_health_readiness_and_the_api_page() -> None:
    async with fake_gateway() as (caller, server):
        assert await caller.get("/healthz") == (200, {"status": "ok"})
        assert (await caller.get("/readyz"))[0] == 200
        server.ready = lambda model: False
        status, reply = await caller.get("/readyz")
        assert (status, "reward_model not ready" in reply["error"]["message"]) == (503, True)
        _, page = await caller.get("/openapi.json")
        assert {"/v1/rewards", "/get_reward", "/remote_rm", "/classify", "/pooling"} <= page["paths"].keys()


@pytest.mark.parametrize(("key", "told"), [("", "not set or empty"), ("schlüssel", "ASCII"), ("a\nb", "ASCII")])
def test_keys_that_no_header_can_carry_are_refused(key: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", key)
    with pytest.raises(ConfigError, match=f"gateway.key_env: .*A_KEY.*{told}"):
        check_key(GatewaySection(key_env="A_KEY"))


def test_the_command_expects_the_rewards_of_its_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected(Exception):
        pass

    given: dict[str, Any] = {}

    def connect(*_: Any, expected: dict[str, Any]) -> None:
        given.update(expected)
        raise Connected

    monkeypatch.setattr(command, "TritonClient", connect)
    config = RunConfig.model_validate({"rewards": {"verdict": {"function": "mine:verify"}}})
    with pytest.raises(Connected):
        asyncio.run(command.serve(config))
    assert json.loads(given["reward_model"]["reward_components"]) == ["verdict"]


async def test_a_key_is_a_bearer_token_or_a_password() -> None:
    async with fake_gateway(key="sesame") as (caller, _):
        body = {"query": ["abc"]}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic ///"}):
            await caller.error("/get_reward", body, 401, headers=headers)
        assert (await caller.get("/healthz"))[0] == 200
        status, _ = await caller.post("/get_reward", body, headers={"Authorization": "Bearer sesame"})
        assert status == 200
        caller.url = caller.url.replace("://", "://:sesame@")  # OpenRLHF and slime have no other place for it
        assert (await caller.post("/get_reward", body))[1]["rewards"] == [3]
