"""The functions for TRL and verl, against a gateway in front of a fake server."""

import asyncio
import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_reward import FakeReward, gateway

from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.function import Sample, load_function
from rlhf_triton.tools.gateway import trainer_rewards
from rlhf_triton.tools.gateway.trainer_rewards import compute_score, rewards_of, trl_reward

CHAT = [{"role": "user", "content": "Hi"}]


def reply(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_rewards, "WAIT_S", 0.0)


def play(monkeypatch: pytest.MonkeyPatch, call: Callable[[FakeReward], Any], *terms: str, **settings: Any) -> Any:
    """Return what `call` returns, in a thread, while the gateway runs."""

    async def run() -> Any:
        async with FakeReward(terms=terms) as server, gateway(server.url, **settings) as caller:
            monkeypatch.setenv("REWARD_GATEWAY_URL", caller.url)
            return await asyncio.to_thread(call, server)

    return asyncio.run(run())


def test_trl_gets_rewards_or_none_of_texts_chats_and_columns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def call(server: FakeReward) -> list[float | None]:
        texts = trl_reward(["a", "b", "c"], ["bc", "refuse", "nan"], completion_ids=[[1], [2], [3]], trainer_state=None)
        assert texts == [3, None, None]
        server.received.clear()
        columns = {"answer": ["x", "y"], "image": [object(), object()], "step": 3, "completion_ids": [[1], [2]]}
        rewards = trl_reward(prompts=[CHAT, CHAT], completions=[reply("Yes"), reply("No")], **columns)
        sent = [item for inputs in server.received for item in inputs["metadata"][:, 0]]
        assert [name in sent[0] for name in (b'"answer": "x"', b"image", b"completion_ids")] == [True, False, False]
        return rewards

    assert play(monkeypatch, call) == [3, 2]
    told = [message for message in caplog.messages if "column" in message]
    assert told == ["reward functions do not receive the column image: object cannot be sent as JSON"]


def test_verl_gets_a_number_or_an_error(monkeypatch: pytest.MonkeyPatch):
    def call(server: FakeReward) -> float:
        info = {"question": "2+3=", "num_turns": np.int64(1)}
        with pytest.raises(RlhfError, match="has no tokens"):
            compute_score("sums", "refuse", "5", info)
        with pytest.raises(KeyError, match="prompt_key"):
            compute_score("sums", "5", "5", {})
        chat = compute_score("sums", "five", None, {"turns": np.asarray(CHAT, object)}, prompt_key="turns")
        assert chat == 4
        return compute_score(data_source="sums", solution_str="5", ground_truth="5", extra_info=info, router="unused")

    assert play(monkeypatch, call) == 5


def test_no_reward_is_invented_without_a_server(monkeypatch: pytest.MonkeyPatch):
    def call(server: FakeReward) -> None:
        server.behaviour = lambda model, number: "failed"  # the server's last word on this row
        assert trl_reward(["a"], ["b"]) == [None]
        server.behaviour = lambda model, number: "busy"
        with pytest.raises(RlhfError, match="503"):
            trl_reward(["a"], ["b"])
        with pytest.raises(RlhfError, match="503"):
            compute_score("sums", "5", "5", {"question": "2+3="})

    play(monkeypatch, call, client={"max_outage_s": 0}, retries=0)
    with pytest.raises(RlhfError, match="no answer"):  # the gateway is gone too
        trl_reward(["a"], ["b"])


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Run a server that sends these bytes, whatever it receives; yield its `host:port`."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1)
            self.request.sendall(answer)
            self.request.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while self.request.recv(65536):  # or the client may lose the answer
                    continue

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("ask", [lambda url: rewards_of([{"text": "a"}], url), lambda url: judge_at(url)])
@pytest.mark.parametrize("way", ["redirect", "http_proxy"])
def test_the_key_reaches_no_other_address(way: str, ask: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_rewards, "TIMEOUT_S", 10.0)
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REWARD_GATEWAY_KEY", "sesame")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        other = f"http://127.0.0.1:{elsewhere.getsockname()[1]}"
        if way == "http_proxy":
            monkeypatch.setenv(way, other)
        answer = f"HTTP/1.1 302 Found\r\nLocation: {other}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        with answering(answer.encode()) as url, pytest.raises(RlhfError, match="302"):
            ask(f"http://{url}")
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


TEXTS = {"prompt": "a", "response": "b"}


def judge_at(url: str) -> Any:
    options = {"model": "m", "base_url": url, "api_key_env": "REWARD_GATEWAY_KEY"}
    return load_function("rlhf_triton.rewards.judge:Judge", options, timeout_s=10.0)(Sample("", [], TEXTS))


def test_a_key_is_required(monkeypatch: pytest.MonkeyPatch):
    def call(server: FakeReward) -> list[float | None]:
        with pytest.raises(RlhfError, match="401: no valid key") as refused:
            trl_reward(["a"], ["b"])
        assert "no answer for" not in str(refused.value)  # no reason to wait
        monkeypatch.setenv("REWARD_GATEWAY_KEY", "sesame")
        return trl_reward(["a"], ["b"])

    assert play(monkeypatch, call, key="sesame") == [2]


HTTP_2 = b"\x00\x00\x18\x04\x00\x00\x00\x00\x00" + bytes(24)  # how a gRPC server begins
NO_GATEWAY = r"is this the address of `rlhf-triton gateway` .*not Triton's\?"


@pytest.mark.parametrize(
    ("url", "answer", "told"),
    [
        ("localhost:8100", b"", "must be the gateway's address"),
        ("http://", b"", "must be the gateway's address"),
        ("http://:sesame@host", b"", "its key belongs into REWARD_GATEWAY_KEY"),
        ("http://URL", HTTP_2, f"the reply has no rewards; {NO_GATEWAY}"),
        ("http://URL", b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", f"404: Not Found; {NO_GATEWAY}"),
        ("http://URL", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", NO_GATEWAY),
    ],
)
def test_a_wrong_address_fails_at_once(url: str, answer: bytes, told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_rewards, "WAIT_S", 300.0)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is repeated"))
    with answering(answer) as other:
        monkeypatch.setenv("REWARD_GATEWAY_URL", url.replace("URL", other))
        with pytest.raises(RlhfError, match=told) as failed:
            trl_reward(["a"], ["b"])
    assert "sesame" not in str(failed.value)


def test_the_functions_need_the_standard_library_alone():
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print('numpy' in sys.modules)"
    command = [sys.executable, "-S", "-c", code, trainer_rewards.__file__]  # -S: without installed packages
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_responses_to_a_prompt_share_a_request(monkeypatch: pytest.MonkeyPatch):
    """Of a groupwise function, requests of half a group would have other rewards."""
    monkeypatch.setattr(trainer_rewards, "ROWS_PER_REQUEST", 4)
    sizes = []

    def post(body: dict[str, Any], _: str | None) -> dict[str, Any]:
        sizes.append(len(body["inputs"]))
        return {"rewards": [1.0] * sizes[-1], "errors": [None] * sizes[-1]}

    monkeypatch.setattr(trainer_rewards, "_post", post)
    assert trl_reward(["a"] * 3 + ["b"] * 3 + ["c"] * 6 + ["d"], ["x"] * 13) == [1.0] * 13
    assert sizes == [6, 6, 1]
    sizes.clear()
    trainer_rewards.rewards_of([{}] * 9)
    assert sizes == [4, 4, 1]
    assert trl_reward([], []) == []
