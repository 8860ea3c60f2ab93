"""Tests of `actor.generation.engine: vllm` with fake servers that fail on demand; test_vllm_run.py uses a real one."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import FakeVllm
from loaders import skip_on_gpus
from vllm_setup import END, PROMPTS, VllmSetup, save_word_policy
from waiting import until

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.rollout_rows import Score
from rlhf_triton.actor.generation.conversations import ConversationRunner
from rlhf_triton.actor.generation.row_sources import SamplingJob
from rlhf_triton.actor.scoring.environment import add_environment_rewards
from rlhf_triton.actor.vllm import connection
from rlhf_triton.actor.vllm.generation import VllmGeneration
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environment_classes.py"
VLLM = {"engine": "vllm", "vllm": {"servers": ["127.0.0.1:1"]}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_word_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def setup(tmp_path, checkpoint):
    """A policy that generates with these servers."""
    return lambda *servers, **changes: VllmSetup(tmp_path, checkpoint, [server.url for server in servers], **changes)


async def run(here, **settings):
    """Generate in a thread; return the responses in the order of the prompts."""
    responses = await asyncio.to_thread(lambda: here.run(**settings))
    return [responses[row] for row in range(len(PROMPTS))]


@contextlib.contextmanager
def conversing(here):
    """Let the generation play conversations of as many turns as their prompts' metadata say."""
    settings = EnvironmentSection.model_validate({"class": f"{ENVIRONMENTS}:Countdown", "max_tokens": 60})
    here.generation.runner = ConversationRunner(settings, here.policy.tokenizer, max_prompt_tokens=40)
    try:
        yield
    finally:
        here.generation.runner.close()


# ---- versions of the policy ----


async def test_vllm_loads_each_new_policy_version_before_generating(setup):
    async with FakeVllm() as server:
        here = setup(server)
        for _ in range(2):
            assert await run(here) == [PolicyTurn(END, True, [-0.5] * 4)] * 3
        assert [path.name for path in server.loaded] == ["1"], "the weights are not loaded once for both ranks"
        here.policy.renew_generator()
        await run(here)
        assert len(server.loaded) == 1, "unchanged weights are written again"
        for version in ("2", "3"):
            here.update()
            await run(here)
            assert server.loaded[-1].name == version
            assert (server.loaded[-1] / "model.safetensors").is_file()
        kept = {path.name for path in server.loaded[-1].parent.iterdir()}
        assert kept == {"2", "3", "CURRENT", f"{server.url}.lock"}
        assert server.calls.count("/resume") == server.calls.count("/pause") == 3
        server.answer = lambda request: {"token_ids": [5] * 8, "finish_reason": "length"}
        assert await run(here) == [PolicyTurn([5] * 8, False, [-0.5] * 8)] * 3, (
            "a response of the maximum length counts as ended"
        )


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all weights", "adapters"])
async def test_responses_in_progress_continue_with_new_weights_or_with_their_adapters(setup, lora_rank):
    """Each token has the step of the weights that sampled it; later requests wait for the new ones."""
    ahead = {"max_off_policy_steps": 1, "algorithm": {"old_logprobs": "sampler"}}
    async with FakeVllm() as server:
        here = setup(server, policy={"lora_rank": lora_rank}, actor=ahead)
        versions = {}

        def finished(index, conversation):
            versions[index] = conversation[0].policy_steps[conversation[0].sampled].tolist()

        server.is_hanging = True
        running = asyncio.create_task(
            asyncio.to_thread(here.generation.run_rows, dict(enumerate(PROMPTS)), finished, seed=0)
        )
        await until(lambda: len(server.requests) == 3)
        first = server.weights
        here.update()
        await until(lambda: server.weights != first)
        here.generation.add(SamplingJob({3: PROMPTS[0]}, finished, seed=1))
        await until(lambda: len(server.requests) == 4)

        def spans(request):
            if request is server.requests[3]:
                return {}
            both = [{"version": first, "start": 0, "end": 1}, {"version": server.weights, "start": 1, "end": 4}]
            return {"weight_versions": both}

        server.answer = spans
        server.is_hanging = False
        await running
        expected = [0] * 4 if lora_rank else [0, 1, 1, 1]
        assert versions == {0: expected, 1: expected, 2: expected, 3: [1] * 4}
        assert server.pause_mode == ("" if lora_rank else "keep")
        assert len(server.adapters) == (2 if lora_rank else 0), (
            "the first adapters are unloaded while responses use them"
        )


@pytest.mark.parametrize("lora_rank", [0, 2], ids=["all weights", "adapters"])
async def test_two_ranks_load_each_version_into_vllm_once(setup, lora_rank):
    """Each rank of the actor has connections of its own to every server. Adapters are published alone."""
    async with FakeVllm() as server:
        here = setup(server, policy={"lora_rank": lora_rank})
        other = VllmGeneration(here.config, here.policy)  # which publishes nothing
        for version in range(1, 4):
            ranked = asyncio.to_thread(other.run_rows, dict(enumerate(PROMPTS)), lambda row, response: None, seed=4)
            await asyncio.gather(run(here), ranked)
            assert [path.name for path in server.loaded] == [str(n + 1) for n in range(version)]
            here.update()
        written = {path.name for path in server.loaded[-1].iterdir()}
        assert ("adapter_model.safetensors" in written, "model.safetensors" in written) == (
            lora_rank > 0,
            not lora_rank,
        )
        if lora_rank:
            assert len(server.adapters) == 1, "the previous adapter is not unloaded"
            assert server.requests[-1]["model"] == server.adapters[0] == server.weights


async def test_dropped_jobs_do_not_wait_for_their_vllm_responses(setup):
    """A run that ends at `actor.max_minutes` drops its jobs and then still samples the validation."""
    async with FakeVllm() as server:
        here = setup(server)
        found = []
        server.is_hanging = True
        here.generation.add(SamplingJob(dict(enumerate(PROMPTS)), lambda index, _: found.append(index), seed=0))
        await until(lambda: len(server.requests) == 3)
        dropping = asyncio.create_task(asyncio.to_thread(here.generation.abandon))
        done, _ = await asyncio.wait([dropping], timeout=10)
        server.is_hanging = False
        await dropping
        assert done
        assert found == []
        assert await run(here) == [PolicyTurn(END, True, [-0.5] * 4)] * 3


async def test_min_tokens_is_capped_at_the_turns_max_tokens(setup):
    """vLLM refuses min_tokens above max_tokens, which is what is left of a conversation."""
    generation = setup(FakeVllm(), generation={"min_new_tokens": 4}).generation
    sent = [generation._sampling_parameters([0], most, greedy=False) for most in (9, 3)]
    assert [(each["min_tokens"], each["max_tokens"]) for each in sent] == [(4, 9), (3, 3)]


async def test_sampling_settings_reach_the_vllm_server(setup):
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2, "stop_strings": ["zz"]}
    async with FakeVllm() as server:
        here = setup(server, generation=settings)
        assert (await run(here))[0].logprobs is None, "vLLM's log-probs, which are after top-k and top-p, are used"
        sent = [request["sampling_params"] for request in server.requests]
        assert {(s["temperature"], s["top_k"], s["top_p"], s["min_tokens"]) for s in sent} == {(0.7, 5, 0.9, 2)}
        assert (sent[0]["stop"], sent[0]["stop_token_ids"]) == (["zz"], here.policy.eos_ids)
        assert set(sent[0].get("logit_bias", {})) == {str(token) for token in here.policy.banned_ids}
        seeds = {s["seed"] for s in sent}
        assert len(seeds) == 3, "rows share a seed"
        await run(here, greedy=True)
        greedy = [request["sampling_params"] for request in server.requests[3:]]
        assert ({s["seed"] for s in greedy}, {s["temperature"] for s in greedy}) == (seeds, {0.0})


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        (
            {"algorithm": {"correction": {"high": 2}}},
            r"actor.algorithm.correction has no effect, because the updated policy itself samples",
        ),
        ({"generation": VLLM | {"top_k": 5}, "algorithm": {"correction": {"high": 2}}}, r"generation.top_k \(5\)"),
        ({"generation": VLLM | {"min_new_tokens": 3}, "algorithm": {"old_logprobs": "sampler"}}, r"new_tokens \(3\)"),
        (
            {"generation": VLLM, "algorithm": {"old_logprobs": "sampler", "correction": {"high": 2}}},
            "actor.algorithm.correction has no effect with actor.algorithm.old_logprobs: sampler",
        ),
    ],
)
def test_config_refuses_importance_corrections_without_comparable_logprobs(actor, words):
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"actor": {"policy": {"device": "cpu"}, **actor}})


# ---- trouble ----


def aborted(server):
    """vLLM answers 200 with the tokens so far when another client pauses it."""
    return {"token_ids": [5], "finish_reason": "abort"}


def dropped(server):
    server.drops = 4
    return {}


def restarted(server):
    """The server answers with its initial weights after a restart; such a response is discarded."""
    server.weights = "initial"
    return {"weight_versions": [{"version": "initial", "start": 0, "end": 4}], "token_ids": [9, 9, 9, 1]}


@pytest.mark.parametrize("fault", [aborted, dropped, restarted])
async def test_lost_response_is_generated_again(setup, fault):
    async with FakeVllm() as server:

        def once(request):
            server.answer = lambda request: {}
            return fault(server)

        server.answer = once
        assert [response.tokens for response in await run(setup(server))] == [END] * 3
        assert (len(server.loaded) >= 2) == (fault is restarted), "the restarted server has no weights"


async def test_response_that_does_not_arrive_in_time_fails_alone(setup, monkeypatch):
    """The server is ready all the time, so the request is not repeated, which would hold up the step again."""
    monkeypatch.setattr("rlhf_triton.actor.vllm.generation.DEADLINE_S", 3.0)
    async with FakeVllm() as server:
        here = setup(server)
        found = {}
        server.stuck = [5]
        await asyncio.to_thread(here.generation.run_rows, dict(enumerate(PROMPTS)), found.__setitem__, seed=0)
        assert [found[index][0].error for index in (0, 2)] == ["", ""]
        assert found[1][0].error == f"vLLM at {server.url} did not respond within 3 s"
        (scored,) = add_environment_rewards((replace(found[1][0], score=Score(reward=1.0)),))
        assert (scored.score.failure, scored.sampled.any()) == (scored.error, False)
        assert sum(request["token_ids"] == [5] for request in server.requests) == 1


async def test_timeouts_of_a_vllm_server_that_is_not_ready_are_an_outage(setup, monkeypatch, caplog):
    monkeypatch.setattr("rlhf_triton.actor.vllm.generation.DEADLINE_S", 3.0)
    monkeypatch.setattr("rlhf_triton.actor.vllm.connection.PROBE_S", 0.2)
    async with FakeVllm() as server:
        here = setup(server)
        server.is_hanging = True
        running = asyncio.create_task(run(here))
        await until(lambda: len(server.requests) == 3)
        server.silent = {"/version", "/weight_info"}
        await until(lambda: "no healthy server" in caplog.text)
        server.silent = set()
        server.is_hanging = False
        assert await running == [PolicyTurn(END, True, [-0.5] * 4)] * 3


async def test_conversation_ends_with_a_turn_that_could_not_be_sampled(setup, monkeypatch):
    monkeypatch.setattr("rlhf_triton.actor.vllm.generation.DEADLINE_S", 3.0)
    async with FakeVllm() as server:
        here = setup(server)
        prompts = {i: Prompt(str(i), "", np.array([5, i]), {"turns": 2}) for i in (6, 7)}
        found = {}

        def second_turn_is_late(request):
            if request["token_ids"][1] == 6 and server.stuck is None:
                server.stuck = [*request["token_ids"], *END]
            return {}

        server.answer = second_turn_is_late
        with conversing(here):
            await asyncio.to_thread(here.generation.run_rows, prompts, found.__setitem__, seed=1)
        (late,) = found[6]
        (whole,) = found[7]
        assert (len(late.turns), late.ended, whole.ended) == (1, False, True)
        assert "did not respond within 3 s" in late.error


@pytest.mark.parametrize("is_usable", [True, False])
async def test_generation_waits_for_an_unreachable_vllm_server(setup, caplog, is_usable):
    async with FakeVllm() as server:
        here = setup(server, max_outage_s=600)
        server.is_hanging = True
        running = asyncio.create_task(run(here))
        await until(lambda: len(server.requests) >= 3)
        await server.stop()
        await until(lambda: "no healthy server" in caplog.text)
        server.is_hanging = False
        server.missing = set() if is_usable else {"/pause", "/weight_info"}  # started without VLLM_SERVER_DEV_MODE
        await server.start()
        if is_usable:
            assert len(await running) == 3
            assert len(server.loaded) == 2
            return
        with pytest.raises(RlhfError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await running


async def test_waiting_rows_share_one_attempt_to_load_a_vllm_server(setup, monkeypatch):
    """Its waiting rows share one attempt; each of them tried for itself, one after the other."""
    monkeypatch.setattr("rlhf_triton.actor.vllm.connection.PROBE_S", 0.5)
    async with FakeVllm() as one, FakeVllm() as two:
        one.silent = {"/version"}
        generation = setup(one, two).generation
        many = [*PROMPTS] * 20
        responses = []
        await asyncio.to_thread(
            generation.run_rows, dict(enumerate(many)), lambda row, _: responses.append(row), seed=0, greedy=True
        )
        assert sorted(responses) == list(range(len(many)))
        assert one.calls.count("/version") <= 4, "a lost server is asked more often than one attempt and its probes"


async def test_each_turn_sends_the_whole_row_to_one_vllm_server(setup):
    """The turns of a conversation go to one server, and the conversations to all of them."""
    async with FakeVllm() as one, FakeVllm() as two:
        here = setup(one, two)
        prompts = [Prompt(str(i), "", np.array([5 + i % 8, 5 + i // 8]), {"turns": 2}) for i in range(24)]
        found = {}
        with conversing(here):
            await asyncio.to_thread(here.generation.run_rows, dict(enumerate(prompts)), found.__setitem__, seed=1)
        assert all(server.requests for server in (one, two)), "a server gets no conversations"
        assert len(one.requests) + len(two.requests) == 2 * len(prompts)
        for (talk,) in found.values():
            assert talk.ended
            row = talk.tokens.tolist()
            turns = talk.turns
            assert [row[turn.start : turn.end] for turn in turns] == [[5, 6, 7, 1]] * 2
            befores = [row[: turn.start] for turn in turns]
            asked = [[each for each in server.requests if each["token_ids"] in befores] for server in (one, two)]
            assert sorted(map(len, asked)) == [0, 2]
            assert len({request["sampling_params"]["seed"] for request in max(asked, key=len)}) == 2


@pytest.mark.parametrize("call", ["/pause", "/collective_rpc"])
async def test_close_during_a_weight_load_resumes_the_vllm_server(setup, call):
    async with FakeVllm() as server:
        here = setup(server)
        server.silent = {call}
        running = asyncio.create_task(run(here))
        await until(lambda: call in server.calls)
        here.policy.close()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert server.calls[-1] == "/resume"


async def test_connection_that_was_idle_too_long_is_not_reused(monkeypatch):
    """This server closes a connection when a second request comes in on it, as vLLM may after five seconds."""
    monkeypatch.setattr(connection, "IDLE_S", 0.01)

    async def answer_once(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = connection.VllmClient(f"{host}:{port}", limit=1, deadline_s=120, checked=set())
    try:
        for _ in range(2):
            assert await client.post("/resume", {}) == {}
            await asyncio.sleep(0.1)
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"release": "0.9.2"}, "is vLLM 0.9.2; 0.32 or newer is needed"),
        ({"missing": {"/weight_info"}}, "has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/pause"}}, "has no /pause: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"missing": {"/inference/v1/generate"}}, "does not accept token ids: start it with --enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs, .*: start it with --logprobs-mode processed_logp"),
        ({"answer": lambda request: {"token_ids": [5, 0, 1]}}, "generated the tokens \\[0\\]"),
    ],
)
async def test_unusable_vllm_server_raises_one_sentence(setup, change, words):
    async with FakeVllm() as server:
        vars(server).update(change)
        here = setup(server)
        here.generation._banned_ids = [0]
        with pytest.raises(RlhfError, match=words):
            await run(here)


async def test_tied_embeddings_are_refused_on_a_vllm_server_that_packs_the_output_layer(setup):
    async with FakeVllm() as server:
        server.device = "cpu"
        for tied, lora_rank in ((False, 0), (True, 2), (True, 0)):
            here = setup(server, policy={"lora_rank": lora_rank})
            server.weights = "default"
            here.policy.model.config.tie_word_embeddings = tied
            if tied and not lora_rank:
                with pytest.raises(RlhfError, match=r"runs on a CPU, .* set actor.generation.engine: slots, or actor"):
                    await run(here)
            else:
                await run(here)


async def test_adapters_are_refused_on_a_vllm_server_with_another_runs_weights(setup):
    """They would generate with a base model that is not theirs."""
    async with FakeVllm() as server:
        await run(setup(server))
        with pytest.raises(RlhfError, match=r"has the weights of another run .* restart it"):
            await run(setup(server, policy={"lora_rank": 2}))


def test_vllm_engine_without_servers_is_refused(setup):
    skip_on_gpus("a configuration that starts vLLM on the policy's machine must name its GPUs first")
    with pytest.raises(ConfigError, match=r"actor\.generation\.vllm\.servers: empty"):
        setup()
