"""The client over HTTP against servers that fail on demand: retries, deadlines, order, outages, closing."""

import asyncio
import contextlib
import itertools
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from fake_server import FakeServer
from fake_triton import FakeTriton, client_of
from loop_clock import advance
from model_inputs import training_inputs
from waiting import until

from rlhf_triton.client import retry
from rlhf_triton.client.client import REPEAT_AFTER_S, TritonClient
from rlhf_triton.client.errors import RequestFailed, RequestRefused, ServerFailed
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    DEMANDED,
    LOAD_LABEL,
    REWARD_MODEL,
    STORE_ID,
    VersionRange,
)

ROOT = Path(__file__).resolve().parents[3]
ROWS = [np.asarray([3, 4, 5])]


def first(*answers):
    """Give the first requests these answers, all later ones `ok`."""
    return lambda model, number: answers[number - 1] if number <= len(answers) else "ok"


def clock_of_retries(monkeypatch, step_s):
    """Advance the clock that limits retrying by `step_s` with each reading."""
    ticks = itertools.count(1.0, step_s)
    monkeypatch.setattr(retry, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))


async def train(client, step):
    await client.train(training_inputs(seed=step), run_id="r", step=step)


# ---- one server ----


@pytest.mark.parametrize(
    ("answers", "error", "num_asked"),
    [
        (["busy", "busy"], None, 3),
        (["drop", "drop"], None, 3),
        (["failed", "failed"], None, 3),
        (["dead", "dead"], None, 3),
        (["busy"] * 4, "^reward_model at URL refused after 3 attempts: no room$", 3),
        (["wrong"], "^reward_model at URL refused: tokens: missing$", 1),
    ],
)
async def test_a_transient_failure_is_retried_and_a_final_one_is_not(answers, error, num_asked):
    async with FakeTriton(first(*answers)) as server, client_of(server, retries=2) as client:
        message = (error or "").replace("URL", re.escape(server.url))
        with pytest.raises(RequestFailed, match=message) if error else contextlib.nullcontext():
            assert (await client.rewards(ROWS))["rewards"] == [[0.5]]
        assert len(server.asked) == num_asked
        seen = client.counters
        assert (seen.requests, seen.retries, seen.failed_requests) == (1, num_asked - 1, bool(error))
        assert server.encodings == {"identity"}, "responses are compressed, which costs CPU time"


@pytest.mark.parametrize("kind", ["scoring", "training"])
async def test_scoring_and_training_attempts_have_their_own_deadlines(kind, monkeypatch):
    scoring_s, training_s = (0.05, 1000) if kind == "scoring" else (1000, 0.05)
    monkeypatch.setattr("rlhf_triton.client.client.TRAIN_DEADLINE_S", training_s)
    async with FakeTriton(lambda *_: "hang") as server, client_of(server, retries=1, deadline_s=scoring_s) as client:
        with pytest.raises(RequestFailed, match=r"did not respond within 0\.05 s after 2 attempts$"):
            await (client.rewards(ROWS) if kind == "scoring" else train(client, 1))
        assert client.counters == RequestCounters(requests=1, retries=1, failed_requests=1)


async def test_requests_in_flight_are_bounded_and_reuse_connections():
    async with FakeTriton(lambda *_: "wait") as server, client_of(server, max_in_flight=3) as client:
        asking = [asyncio.create_task(client.rewards(ROWS)) for _ in range(12)]
        await until(lambda: server.in_flight == 3)
        await asyncio.sleep(0.05)
        assert len(server.asked) == 3
        server.go.set()
        await asyncio.gather(*asking)
        assert server.most_in_flight == len(server.connections) == 3


async def test_retry_budget_limits_scoring_without_using_trainings_retries(monkeypatch):
    """Forty requests of six retries each: 240 attempts more without a budget, here 5 + 20 % of 40.

    With one budget for both, every critic_train of 200 rounds failed at its first 503.
    """
    refused = {REWARD_MODEL: 10_000, CRITIC_TRAIN: 2, CRITIC_SAVE: 2}

    def behave(model, number):
        refused[model] -= 1
        return "busy" if refused[model] >= 0 else "ok"

    monkeypatch.setattr("rlhf_triton.client.client.RETRY_RESERVE", 5)
    async with FakeTriton(behave) as server, client_of(server, retries=6) as client:
        answers = await asyncio.gather(*(client.rewards(ROWS) for _ in range(40)), return_exceptions=True)
        counters = client.counters
        spent = [answer for answer in answers if "the retry budget is exhausted" in str(answer)]
        assert counters.failed_requests == sum(isinstance(answer, RequestFailed) for answer in answers) == 40
        assert 5 <= counters.retries <= 5 + 8
        assert len(server.asked) == 40 + counters.retries
        assert counters.over_budget == len(spent) >= 40 - 5 - 8
        assert all("no room" in str(answer) for answer in spent)
        await train(client, 1)
        await client.save(run_id="r", step=1)
        assert [server.asked.count(model) for model in (CRITIC_TRAIN, CRITIC_SAVE)] == [3, 3]


# ---- demanded versions ----

NEWER = VersionRange(4)


@pytest.fixture
def no_budget(monkeypatch):
    monkeypatch.setattr("rlhf_triton.client.client.RETRY_RESERVE", 0)


@pytest.mark.usefixtures("no_budget")
async def test_request_waits_for_its_demanded_version_without_spending_retries():
    async with FakeTriton(first(*["behind"] * 9)) as server, client_of(server, retries=0) as client:
        await client.score(ROWS, ("values",), versions=NEWER)
        assert client.counters == RequestCounters(requests=1, retries=9)
        assert server.probes == 0, "a healthy server is probed"


async def test_missing_demanded_version_raises_at_the_deadline_with_both_versions(monkeypatch):
    clock_of_retries(monkeypatch, 50.0)
    async with FakeTriton(lambda *_: "behind") as server, client_of(server, deadline_s=120) as client:
        told = (
            r"^critic_infer at \S+ refused after \d+ attempts: .* critic serves version 3, but .* version 4 or newer$"
        )
        with pytest.raises(RequestFailed, match=told) as failed:
            await client.score(ROWS, ("values",), versions=NEWER)
        assert failed.value.code == DEMANDED
        assert not isinstance(failed.value, RequestRefused), "the request would be halved in vain"
        assert client.counters.failed_requests == 1
        assert len(server.asked) == 4


@pytest.mark.usefixtures("no_budget")
async def test_request_fails_over_from_a_server_that_lacks_the_demanded_version():
    behind = FakeTriton(lambda *_: "behind")
    other = FakeTriton()
    async with behind, other, client_of(behind, other, retries=0) as client:
        for _ in range(4):
            await client.score(ROWS, ("values",), versions=NEWER)
        assert len(other.asked) == 4
        seen = client.counters
        assert seen.retries == seen.failovers == len(behind.asked) > 0


async def test_quoted_error_code_is_not_a_version_refusal():
    """Messages may quote texts of the request."""
    async with FakeTriton(first("behind")) as server, client_of(server, retries=1) as client:
        await client.score(ROWS, ("values",))
        assert len(server.asked) == 2


# ---- training requests ----


async def test_step_that_failed_at_the_sidecar_raises_server_failed():
    async with FakeTriton(first("failed", "wrong")) as server, client_of(server) as client:
        with pytest.raises(ServerFailed, match=r"critic_train at .* refused: the gradients are not finite"):
            await train(client, 1)
        with pytest.raises(RequestFailed, match="tokens: missing") as refused:
            await train(client, 2)
        assert not isinstance(refused.value, ServerFailed)
        assert len(server.asked) == 2, "a refused request is repeated"


async def test_missing_sidecar_is_waited_for_once_the_run_has_trained(monkeypatch):
    async with FakeTriton(first("busy", "busy")) as server, client_of(server, retries=1) as client:
        with pytest.raises(RequestFailed, match="after 2 attempts: no room"):
            await train(client, 1)
    async with FakeTriton(first("ok", *["busy"] * 9)) as server, client_of(server, retries=1) as client:
        await train(client, 1)
        await train(client, 2)
        assert len(server.asked) == 1 + 9 + 1
    clock_of_retries(monkeypatch, 10.0)
    async with (
        FakeTriton(first("ok", *["busy"] * 9999)) as server,
        client_of(server, retries=6, max_outage_s=100) as client,
    ):
        await train(client, 1)
        with pytest.raises(RequestFailed, match="no room"):
            await train(client, 2)
        assert len(server.asked) == 1 + 11 + 6, "the request is not repeated more often than retries allows"


async def test_request_in_the_journal_has_no_result_yet():
    """A sidecar that starts later executes it, so it is not refused."""
    async with FakeTriton(lambda model, number: "journalled") as server, client_of(server, retries=1) as client:
        with pytest.raises(RequestFailed, match=r"^critic_train at \S+ has no result yet after 2 attempts: no sidecar"):
            await train(client, 1)


async def test_request_is_sent_again_if_its_model_process_was_killed():
    """Triton never answers it: a run stood still until TRAIN_DEADLINE_S."""
    async with FakeTriton(first("hang", "hang")) as server, client_of(server, retries=0) as client:
        step = asyncio.create_task(train(client, 1))
        for number in (1, 2):
            await until(lambda number=number: len(server.asked) == number)
            advance(number * REPEAT_AFTER_S)
        await step
        assert len(server.asked) == 3
        assert client.counters == RequestCounters(requests=1)


# ---- a server that goes away ----


async def test_non_http_servers_are_not_retried():
    asked = []

    async def grpc(reader, writer):
        asked.append(await reader.read(100))
        writer.write(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00" + bytes(24))  # HTTP/2's settings
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(grpc, "127.0.0.1", 0) as server:
        url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with TritonClient(url, ClientSettings()) as client:
            for call in (lambda: client.rewards(ROWS), lambda: client.describe(REWARD_MODEL)):
                with pytest.raises(RequestRefused, match=f"{url} does not answer in HTTP: give Triton's HTTP port"):
                    await call()
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            200,
            "# HELP nv_inference_request_success Number of",
            "^reward_model at URL does not answer as Triton does: give",
        ),
        (200, '["ok"]', "^reward_model at URL does not answer as Triton does: give"),
        (
            404,
            "<html>nginx</html>",
            "^reward_model at URL refused: HTTP 404 without Triton's JSON; give Triton's HTTP port",
        ),
        (404, '{"detail": "Not Found"}', "^reward_model at URL refused: HTTP 404 without Triton's JSON; give"),
    ],
)
async def test_servers_other_than_triton_are_named_in_a_sentence(status, body, message):
    """Such servers are Triton's own metrics port, a web server, and a gateway."""

    async def reply(request):
        return web.Response(status=status, text=body)

    async with (
        FakeServer([web.route("*", "/{path:.*}", reply)]) as server,
        TritonClient(server.url, ClientSettings()) as client,
    ):
        with pytest.raises(RequestRefused, match=message.replace("URL", server.url)):
            await client.describe(REWARD_MODEL)


async def test_reply_without_a_requested_output_is_refused():
    async with FakeTriton() as server, client_of(server) as client:
        message = f"^reward_model at {server.url} does not answer as Triton does: its reply lacks reward_errors$"
        with pytest.raises(RequestRefused, match=message):
            await client.rewards(ROWS, ("rewards", "reward_errors"))


@pytest.mark.parametrize("host", ["256.0.0.1", "127.1"])
async def test_invalid_addresses_are_refused_without_waiting(host):
    async with TritonClient(f"{host}:80", ClientSettings()) as client:
        with pytest.raises(RequestRefused, match=f"^reward_model at {host}:80 cannot be reached: .*IPv4"):
            await client.rewards(ROWS)


async def test_describe_accepts_any_server_and_does_not_wait_for_a_lost_one():
    async with FakeTriton() as lost, FakeTriton() as other:
        await lost.stop()
        async with client_of(lost, retries=6) as client:
            with pytest.raises(RequestFailed, match=r"cannot be reached after 2 attempts: Connection refused"):
                await client.describe(REWARD_MODEL)
            assert client.counters.outages == 0
        for order in ([lost, other], [other, lost]):
            async with client_of(*order, retries=0) as client:
                assert (await client.describe(REWARD_MODEL)).parameters == other.parameters


# ---- several servers ----


@pytest.mark.parametrize(
    ("setting", "ours"), [("tokenizer_fingerprint", "ours"), ("standardization", "ours"), ("any_other", None)]
)
async def test_server_with_other_reward_settings_is_not_readmitted(setting, ours, caplog):
    declared = {} if ours is None else {setting: ours}
    async with FakeTriton() as one, FakeTriton() as two, client_of(one, two) as client:
        one.parameters |= {**declared, "workers": "1", "device": "cpu"}  # what changes no score
        two.parameters |= {**declared, "workers": "4", "device": "cuda", LOAD_LABEL: "reloaded"}
        await client.describe(REWARD_MODEL)
        await two.stop()
        await asyncio.gather(*(client.rewards(ROWS) for _ in range(4)))
        two.parameters[setting] = "theirs"
        two.asked.clear()
        await two.start()
        await until(lambda: f"reward_model has {setting} theirs" in caplog.text)
        await until(lambda: two.probes >= 5)
        await asyncio.gather(*(client.rewards(ROWS) for _ in range(4)))
        assert two.asked == []
        del two.parameters[setting]
        two.parameters |= declared
        while not two.asked:
            await client.rewards(ROWS)
    assert caplog.text.count(f"but {ours or 'none'} is expected") == 1


async def test_critic_of_another_store_is_not_asked_through_the_ensemble(caplog):
    """critic_infer declares nothing, and the reward model is the same."""
    async with FakeTriton() as one, FakeTriton() as two, client_of(one, two) as client:
        for server, store in ((one, "ours"), (two, "theirs")):
            server.parameters_of = {CRITIC: {STORE_ID: store}, CRITIC_INFER: {}}
        for model in (REWARD_MODEL, CRITIC):
            await client.describe(model)
        await asyncio.gather(*(client.rewards(ROWS) for _ in range(4)))
        await asyncio.gather(*(client.score(ROWS) for _ in range(4)))
        asked = [len(server.asked) for server in (one, two)]
        await asyncio.gather(*(client.score(ROWS) for _ in range(4)))
        assert sorted(len(server.asked) - before for server, before in zip((one, two), asked, strict=True)) == [0, 4]
    assert "expected; serve both from the weights store of one run.dir" in caplog.text


# ---- the end ----


STOPPED = """
import asyncio, signal, sys
import numpy as np
from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.client import ClientSettings

signal.signal(signal.SIGINT, signal.default_int_handler)

async def main(url, how):
    settings = ClientSettings(deadline_s=60)
    async with TritonClient(url, settings, max_in_flight=3) as client:
        asking = [asyncio.create_task(client.rewards([np.asarray([3, 4])])) for _ in range(5)]
        asking.append(asyncio.create_task(client.train({"tokens": np.zeros((1, 2), int)}, run_id="r", step=1)))
        await asyncio.sleep(0.2)
        if how == "ValueError":
            raise ValueError("as any error of the run")
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

try:
    asyncio.run(main(*sys.argv[1:]))
except (KeyboardInterrupt, ValueError) as error:
    print("ended by", type(error).__name__)
"""


@pytest.mark.parametrize(("how", "is_away"), [("KeyboardInterrupt", False), ("ValueError", True)])
async def test_closing_the_client_leaves_no_tasks_or_connections(how, is_away):
    """Runs in its own process with asyncio's debug mode and all warnings."""
    async with FakeTriton(lambda *_: "hang") as server:
        if is_away:
            await server.stop()
        command = [sys.executable, "-X", "dev", "-c", STOPPED, server.url, how]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = (text.decode() for text in await process.communicate())
        assert output == f"ended by {how}\n", errors
        words = ("destroyed", "nclosed", "never retrieved", "never awaited", "Traceback", "Warning")
        assert [word for word in words if word in errors] == [], errors
