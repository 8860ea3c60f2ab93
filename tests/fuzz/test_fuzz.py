"""Bad requests to every model and to the gateway while a client scores valid rows. `make fuzz` sends thousands."""

import asyncio
import contextlib
import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import psutil
import pytest
import reward_functions
from bad_requests import DEFECTS, HANG_S, HUNG, bad_requests, call, grpc_sender, send_http
from fake_vllm import FakeVllm
from gateway_attacks import ATTACKS, GATEWAY_KEY, HEADERS, LEFT_OPEN
from hypothesis import strategies as st
from live_system import LiveRun, make_run, start_server, stop_process
from model_inputs import random_rows, scoring_inputs
from waiting import wait_for

from rlhf_triton.tools.server.ports import free_port, is_open
from rlhf_triton.wire.contract import CRITIC_INFER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "1"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
TOGETHER = 4  # requests of a round
PAUSE_S = 0.05  # between requests of the good client
TOLERANCE = 1e-4
# A status 500 is a defect, unless its message contains one of these, which tritonserver's own parsers send.
TRITONS_OWN = ("failed to parse the request JSON buffer", "Unable to parse", "unexpected", "Unexpected")
GATEWAY_BYTES = 300e6  # above its memory at the start
RELEASE_S = 30.0  # a large body's memory is released after its reply, or after its client has gone
WAITING_BYTES = 2 * 262_144  # read of a body that waits for memory: asyncio reads as much at once, twice
NUM_LEFT_OPEN = 40
TRAINING_KEY = "open sesame"
KEY_VARIABLE = "FUZZ_TRAINING_KEY"
GATEWAY_KEY_VARIABLE = "FUZZ_GATEWAY_KEY"
MIXTURE = {
    "rewards": {
        "model": {},
        "length": {"function": f"{reward_functions.__file__}:by_row", "timeout_s": 1.0, "weight": 0.1},
    },
    "reward": {"text": "pair"},
    "server": {"training_key_env": KEY_VARIABLE},
    "actor": {"kl": {"reference": "triton"}},
}


class GoodClient:
    """Sends the same valid request repeatedly and compares each answer with the first one."""

    def __init__(self, url, path, body, headers, read):
        """`read` returns the numbers of a reply, by name."""
        self.wrong = []
        self.longest_wait_s = 0.0
        self.answers = 0
        self._request = url, path, json.dumps(body).encode(), headers
        self._read = read
        self._end = threading.Event()
        self._expected = {}
        self._thread = threading.Thread(target=self._run, name="good client")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def check(self):
        """Fail unless it is served, was always served, and got the same numbers each time."""
        answers = self.answers
        wait_for(lambda: self.answers > answers + 1)
        assert not self.wrong
        print(f"longest wait {self.longest_wait_s:.2f} s", end=" ")
        assert self.longest_wait_s < HANG_S
        self.longest_wait_s = 0.0

    def _run(self):
        while not self._end.wait(PAUSE_S):
            begin = time.monotonic()
            answer = call(*self._request)
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - begin)
            self.answers += 1
            if answer.status != "200":
                self.wrong.append(f"{answer.status} {answer.text[:500]}")
                continue
            found = {name: np.asarray(numbers) for name, numbers in self._read(json.loads(answer.text)).items()}
            self._expected = self._expected or found
            for name, expected in self._expected.items():
                if name not in found or not np.allclose(found[name], expected, atol=TOLERANCE, rtol=0, equal_nan=True):
                    self.wrong.append(f"{name}: {found.get(name)} instead of {expected}")


def numbers_of(reply):
    return {item["name"]: item["data"] for item in reply["outputs"] if item["datatype"] == "FP32"}


@dataclass
class Stage:
    """A server that is attacked while a good client is served."""

    run: LiveRun
    log: Path
    good: GoodClient

    def check(self):
        """Fail if the good client was not served well, or a process had to be replaced."""
        self.good.check()
        replaced = [line for line in self.log.read_text().splitlines() if "restarting" in line or "reloading" in line]
        assert not replaced


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, checkpoints):
    """Yield a server with a reward mixture, training key and reference, but no sidecar, which would change values."""
    with contextlib.ExitStack() as running:
        keys = {KEY_VARIABLE: TRAINING_KEY, GATEWAY_KEY_VARIABLE: GATEWAY_KEY}
        running.enter_context(mock.patch.dict(os.environ, keys))
        run = make_run(tmp_path_factory.mktemp("guarded"), checkpoints, **MIXTURE)
        server = start_server(run)
        running.callback(stop_process, server)
        wait_for(lambda: (run.config.run.dir / "server.json").is_file(), server)
        inputs = [
            {"name": name, "datatype": "INT64", "shape": array.shape, "data": array.ravel().tolist()}
            for name, array in scoring_inputs(random_rows([3, 17], seed=SEED)).items()
        ]
        path = f"/v2/models/{CRITIC_INFER}/infer"
        good = running.enter_context(GoodClient(run.url, path, {"inputs": inputs}, {}, numbers_of))
        yield Stage(run, server.log_path, good)
        print(f"{good.answers} good answers, at most {good.longest_wait_s:.2f} s apart")


def each_round(strategy, play):
    """Call `play` once with TOGETHER of the simplest examples, and ROUNDS times with as many others."""

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=1 + ROUNDS,  # the first one is the simplest
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(strategy, min_size=TOGETHER, max_size=TOGETHER))
    def play_one(examples):
        play(examples)

    play_one()


def check_answer(answer):
    """Fail if there is no answer, an internal error instead of a sentence, or an empty output."""
    assert answer.status != HUNG
    if answer.status in ("500", "INTERNAL", "UNKNOWN"):
        assert any(words in answer.text for words in TRITONS_OWN), answer
    elif answer.status == "200":
        assert not [name for name, shape in answer.outputs.items() if 0 in shape], answer


@pytest.mark.parametrize("defect", [None, *DEFECTS])
def test_bad_requests_are_answered_and_valid_scoring_continues(defect, guarded):
    models = sorted(path.parent.name for path in guarded.run.config.run.repository_dir.glob("*/config.pbtxt"))
    at = guarded.run.config.server

    def over_grpc(request):
        with grpc_sender(at.grpc_url) as send:
            return send(request)

    def play(requests):
        ways = [
            over_grpc if i % 2 and each.body is None else partial(send_http, at.http_url)
            for i, each in enumerate(requests)
        ]
        with ThreadPoolExecutor(TOGETHER) as executor:
            sent = [executor.submit(way, each) for way, each in zip(ways, requests, strict=True)]
        for each in sent:
            check_answer(each.result())

    each_round(bad_requests(models, TRAINING_KEY, defect), play)
    guarded.check()


# ---- the gateway ----


@pytest.fixture(scope="module")
def policy():
    """Yield a policy whose server runs in a thread."""
    loop = asyncio.new_event_loop()
    server = FakeVllm()
    thread = threading.Thread(target=loop.run_forever, name="policy")
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@dataclass
class Gateway:
    """A running gateway and its good client."""

    url: str
    process: psutil.Process
    bytes_at_start: int
    good: GoodClient

    def check(self, num_open=0):
        """Fail if the good client was not served well, or the gateway stays larger than `num_open` bodies need."""
        self.good.check()
        most = self.bytes_at_start + GATEWAY_BYTES + num_open * WAITING_BYTES
        wait_for(lambda: self.process.memory_info().rss < most, timeout_s=RELEASE_S)


@pytest.fixture(scope="module")
def gateway(guarded, policy):
    section = {"port": free_port(), "key_env": GATEWAY_KEY_VARIABLE}
    model = str(guarded.run.config.actor.policy.model)
    section["policy"] = {"model": model, "servers": [policy.url]}
    child = guarded.run.start("gateway", f"gateway={json.dumps(section)}", module="rlhf_triton.tools gateway")
    url = f"127.0.0.1:{section['port']}"
    try:
        wait_for(lambda: is_open(url), child)
        process = psutil.Process(child.process.pid)
        body = {"inputs": [{"text": "A list of words"}, {"prompt": "A list", "response": " of words"}]}
        read = lambda reply: {"rewards": reply["rewards"], **reply["components"]}  # noqa: E731
        with GoodClient(url, "/v1/rewards", body, HEADERS, read) as good:
            yield Gateway(url, process, process.memory_info().rss, good)
    finally:
        stop_process(child)


def status_of(url, content):
    """Send bytes; return the reply's status, or "" if the connection was closed without a reply."""
    host, port = url.split(":")
    with socket.create_connection((host, int(port)), HANG_S) as connection:
        with contextlib.suppress(ConnectionError):  # refused before the body was read
            connection.sendall(content)
        with contextlib.suppress(ConnectionError):
            found = re.match(rb"HTTP/1.1 (\d+)", connection.recv(4096))
            return found[1].decode() if found else ""
    return ""


@pytest.mark.parametrize("kind", ATTACKS)
def test_gateway_answers_attacks_and_valid_scoring_continues(gateway, kind):
    def play(attacks):
        with ThreadPoolExecutor(TOGETHER) as executor:
            statuses = list(executor.map(partial(status_of, gateway.url), attacks))
        print(kind, statuses)
        assert not set(statuses) & {"500", "502"}

    each_round(ATTACKS[kind], play)
    gateway.check()


@pytest.mark.parametrize("kind", LEFT_OPEN)
def test_gateway_keeps_serving_while_connections_stay_open(gateway, policy, kind):
    host, port = gateway.url.split(":")
    policy.is_hanging = True
    with contextlib.ExitStack() as opened:
        for _ in range(NUM_LEFT_OPEN * ROUNDS):
            connection = opened.enter_context(socket.create_connection((host, int(port)), HANG_S))
            connection.sendall(LEFT_OPEN[kind])
        gateway.check(NUM_LEFT_OPEN * ROUNDS)
    policy.is_hanging = False
    gateway.check()
