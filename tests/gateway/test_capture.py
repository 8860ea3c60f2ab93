"""Agents against the gateway: their calls become rows of exactly the tokens that a scripted policy saw and sampled."""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import threading
from pathlib import Path

import pytest
from fake_reward import gateway
from fake_vllm import FakeVllm
from scripted_policy import EOS, TEMPLATE, TOKENIZER, ScriptedSampler, ids, scripted_gateway
from tiny_tokenizers import make_text_tokenizer
from waiting import until

from rlhf_triton.actor.capture import app as capture_app
from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.actor.capture.sessions import Sampling, Session, SessionLimits, Sessions
from rlhf_triton.actor.capture.vllm import VllmSampler
from rlhf_triton.actor.data.chat import Chat, TemplateError
from rlhf_triton.actor.data.reply_parts import HERMES, tool_calls
from rlhf_triton.config.sections import ServedPolicySection
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.tools.gateway.policy import policy_routes

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "Hello"}


async def chat(caller, session, messages, **fields):
    """Call like OpenAI's client; return the body."""
    body = {"model": "m", "messages": messages, **fields}
    status, reply = await caller.post(f"/sessions/{session}{CHAT}", body)
    assert status == 200, reply
    return reply


async def say(caller, session, messages, **fields):
    """Call like OpenAI's client; return the message."""
    return (await chat(caller, session, messages, **fields))["choices"][0]["message"]


async def ask(caller, session, messages, **fields):
    """Call like Anthropic's client; return the body."""
    body = {"model": "m", "max_tokens": 100, "messages": messages, **fields}
    status, reply = await caller.post(f"/sessions/{session}{MESSAGES}", body)
    assert status == 200, reply
    return reply


async def rows(caller, session):
    return (await caller.get(f"/sessions/{session}"))[1]["trajectories"]


def trained(row):
    """Return the tokens of each turn, and check that exactly the turns are marked for training."""
    turns = [range(turn["start"], turn["end"]) for turn in row["turns"]]
    seen = [not any(i in turn for turn in turns) for i in range(len(row["tokens"]))]
    assert row["observed"] == seen
    assert [logprob == 0 for logprob in row["logprobs"]] == seen
    assert [version is None for version in row["versions"]] == seen
    return [row["tokens"][turn.start : turn.stop] for turn in turns]


def rendered(messages, *tools):
    return str(TOKENIZER.apply_chat_template(messages, tools=[*tools] or None, tokenize=False))


# ---- tokens ----


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


async def with_openai(caller):
    """Make three calls, one with a tool; each reply is sent back as the official client dumps it."""
    messages = [{"role": "developer", "content": parts("Be", "brief.")}, USER]
    for answers in ([{"role": "tool", "content": "2"}], [{"role": "user", "content": parts("Bye", "now")}]):
        reply = await say(caller, "s", messages, tools=[TOOL])
        for call in reply.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"] |= {"arguments": json.dumps(arguments, indent=1), "parsed_arguments": arguments}
            answers[0]["tool_call_id"] = call["id"]
        messages += [{**reply, "annotations": None, "audio": None, "function_call": None, "parsed": None}, *answers]
    await say(caller, "s", messages, tools=[TOOL])


async def with_anthropic(caller):
    tools = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
    messages = [USER]
    system = [{**part, "cache_control": {"type": "ephemeral"}} for part in parts("Be", "brief.")]
    for answers in ([{"type": "tool_result", "content": "2"}], parts("Bye", "now")):
        content = (await ask(caller, "s", messages, tools=tools, system=system))["content"]
        if content[-1]["type"] == "tool_use":
            answers[0]["tool_use_id"] = content[-1]["id"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": answers}]
    await ask(caller, "s", messages, tools=tools, system=system)


@pytest.mark.parametrize("lead", [with_openai, with_anthropic])
async def test_captured_conversation_continues_its_sampled_tokens(lead):
    sampler = ScriptedSampler(CALL, "Two.", "Bye!")
    async with scripted_gateway(sampler) as (caller, _):
        await lead(caller)
        [row] = await rows(caller, "s")
    assert trained(row) == sampler.completions == [[*ids(text), EOS] for text in (CALL, "Two.", "Bye!")]
    for turn, prompt in zip(row["turns"], sampler.prompts, strict=True):
        assert row["tokens"][: turn["start"]] == prompt, "the trained prompt differs from the sampled one"
    assert [message["role"] for message in row["messages"]] == [
        *["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    ]
    assert (row["messages"][0]["content"], row["messages"][-2]["content"]) == ("Be\nbrief.", "Bye\nnow")
    assert TOKENIZER.decode(row["tokens"]) + "\n" == rendered(row["messages"], TOOL)
    assert (row["session"], row["group"], row["tools"]) == ("s", "s", [TOOL])
    assert [row["versions"][turn["start"]] for turn in row["turns"]] == [1, 2, 3]


async def test_sampled_tokens_survive_ambiguous_tokenisation():
    class Spelling(ScriptedSampler):
        async def sample(self, session, tokens, sampling):
            self.prompts.append(tokens)
            self.completions.append([*(ids(letter)[0] for letter in "the"), EOS])
            return type(await super().sample(session, tokens, sampling))(self.completions[0], True, [-1.0] * 4, [7] * 4)

    sampler = Spelling()
    assert ids("the") != [ids(letter)[0] for letter in "the"]
    async with scripted_gateway(sampler) as (caller, _):
        reply = await say(caller, "s", [USER])
        assert reply["content"] == "the"
        await say(caller, "s", [USER, reply, USER])
        [row] = await rows(caller, "s")
    assert trained(row)[0] == sampler.completions[0]


async def test_edited_history_and_other_contexts_start_new_rows():
    sampler = ScriptedSampler("one", "two", "three", "sub", "edited", "other tools")
    async with scripted_gateway(sampler) as (caller, _):
        first = await say(caller, "s", [USER])
        second = await say(caller, "s", [USER, first, USER])
        await say(caller, "s", [USER, first, {"role": "user", "content": "Instead"}])  # from the longest known part
        await say(caller, "s", [{"role": "system", "content": "A helper."}, USER])
        await say(caller, "s", [USER, {**first, "content": "uno"}, USER, second, USER])
        await say(caller, "s", [USER, first, USER], tools=[TOOL])
        found = await rows(caller, "s")
    said = [[TOKENIZER.decode(turn[:-1]) for turn in trained(row)] for row in found]
    assert said == [["one", "two"], ["three"], ["sub"], ["edited"], ["other tools"]]
    each = [turn for row in found for turn in trained(row)]
    assert sorted(each) == sorted(sampler.completions), "a reply is trained twice or never"
    assert [row["tools"] for row in found] == [[], [], [], [], [TOOL]]
    for row in found:
        assert TOKENIZER.decode(row["tokens"]) + "\n" == rendered(row["messages"], *row["tools"])
    shared = [*sampler.prompts[0], *sampler.completions[0]]
    assert [row["tokens"][: len(shared)] == shared for row in found] == [True, True, False, False, False]


def stripping():
    """Return a tokenizer whose chat template changes replies."""
    strips = TEMPLATE.replace("{{ m.content }}", "{{ '…' * (m.role == 'assistant') }}{{ m.content }}")
    return make_text_tokenizer("qwen2", ["Yes. Hello …"], chat_template=strips, model_max_length=1000)


async def test_each_call_starts_a_row_if_the_template_rewrites_replies(caplog):
    tokenizer = stripping()
    with caplog.at_level(logging.WARNING):
        async with scripted_gateway(ScriptedSampler(), tokenizer=tokenizer) as (caller, _):
            messages = [USER]
            for _ in range(3):
                messages += [await say(caller, "s", messages), USER]
            assert [len(row["turns"]) for row in await rows(caller, "s")] == [1, 1, 1]
    assert sum("changes earlier messages" in line for line in caplog.messages) == 2, (
        "the warning is not logged at the start and the first call"
    )
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        Sessions(tokenizer, SessionLimits(1), most=1, idle_s=1)


async def test_capture_refuses_a_message_that_the_chat_template_leaves_out():
    template = TEMPLATE.replace("in messages", "in messages if m.role != 'system'")
    made = make_text_tokenizer("qwen2", chat_template=template)
    async with scripted_gateway(ScriptedSampler(), tokenizer=made) as (caller, sessions):
        messages = [{"role": "system", "content": "Be brief."}, USER]
        told = await caller.error(f"/sessions/s{CHAT}", {"messages": messages}, 400)
        assert "messages[0]: the policy's chat template omits" in told
        assert len(sessions) == 0


async def test_session_rewards_are_summed_in_the_documented_trl_function(tmp_path):
    """Three rows; the middle call and the last one are rewarded. The code for TRL is that of docs/gateway.md."""
    export = tmp_path / "rows.jsonl"
    page = Path(__file__).resolve().parents[2] / "docs/gateway.md"
    async with scripted_gateway(ScriptedSampler(), tokenizer=stripping(), export=export) as (caller, _):
        messages = [USER]
        for reward in (0.0, 0.5, 1.0):
            messages += [await say(caller, "s", messages), USER]
            await caller.post("/sessions/s/reward", {"reward": reward})
        await caller.post("/sessions/s/end", {})
    found = read_jsonl(export)
    assert [row["turns"][0]["reward"] for row in found] == [0.0, 0.5, 1.0]
    code = next(block for block in page.read_text().split("```py\n") if "def exported" in block).partition("```")[0]
    given = {"json": json, "open": lambda _: export.read_text().splitlines()}
    exec(code, given)
    assert given["exported"]([""] * 3, None)["reward"] == [1.5] * 3


# ---- replies ----


async def test_replies_end_at_the_requests_stop_strings_and_max_tokens():
    sampler = ScriptedSampler(reply=lambda prompt: "A END B")
    async with scripted_gateway(sampler) as (caller, _):
        for fields, text, openai, anthropic, stop in (
            ({}, "A END B", "stop", "end_turn", None),
            ({"stop": ["X", "END"]}, "A ", "stop", "stop_sequence", "END"),
            ({"max_tokens": 1}, TOKENIZER.decode(ids("A END B")[:1]), "length", "max_tokens", None),
        ):
            body = await chat(caller, "s", [USER], **fields)
            assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == (text, openai)
            usage = {"prompt_tokens": len(sampler.prompts[-1]), "completion_tokens": len(sampler.completions[-1])}
            assert body["usage"] == {**usage, "total_tokens": sum(usage.values())}
            if "stop" in fields:
                fields = {"stop_sequences": fields["stop"]}
            body = await ask(caller, "s", [USER], **fields)
            assert body["content"] == [{"type": "text", "text": text}]
            assert (body["stop_reason"], body["stop_sequence"]) == (anthropic, stop)
            assert [*body["usage"].values()] == [*usage.values()]
        await chat(caller, "s", [USER], temperature=0.5, top_p=0.9, max_completion_tokens=3, stop="x")
        assert sampler.samplings[-1] == Sampling(3, 0.5, 0.9, ("x",))
        await chat(caller, "s", [USER])
        assert sampler.samplings[-1] == Sampling(500)


async def test_only_well_formed_tool_calls_are_parsed():
    wrong = '<tool_call>{"name": 5}</tool_call>'
    async with scripted_gateway(ScriptedSampler(reply=lambda _: f"I add. {CALL}{CALL} {wrong}")) as (caller, _):
        body = await chat(caller, "s", [USER], tools=[TOOL])
        [choice] = body["choices"]
        first = {"name": "add", "arguments": '{"a": 1}'}
        assert (choice["message"]["content"], choice["finish_reason"]) == (f"I add.  {wrong}", "tool_calls")
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [first, first]
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
        for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            message = await say(caller, "s", [USER], **fields)
            assert "tool_calls" not in message
            assert message["content"] == f"I add. {CALL}{CALL} {wrong}"


async def test_tool_calls_within_a_thought_stay_text():
    thought = f"<think>Perhaps {CALL}?</think>"
    async with scripted_gateway(ScriptedSampler(f"{thought}No.", f"{thought}{CALL}")) as (caller, _):
        for content, num_calls in ((f"{thought}No.", 0), (thought, 1)):
            message = await say(caller, "s", [USER], tools=[TOOL])
            assert (message["content"], len(message.get("tool_calls", ()))) == (content, num_calls)


def test_pattern_of_tool_calls_cannot_backtrack():
    """Beside a second repetition, a reply of n spaces in a tool call that is not closed takes n squared steps."""
    assert len(re.findall(r"[*+?{]", HERMES.pattern.replace("*?", "*").replace("(?:", "("))) == 1
    for unclosed in ("", " \n{", "</tool_cal", "<tool_call>"):
        [match] = HERMES.finditer(f"<tool_call>{unclosed}")
        assert match.span() == (0, len("<tool_call>" + unclosed)), "the pattern backtracks"
    assert [call.name for call in tool_calls('<tool_call> \n{"name": "f"}\n </tool_call>')] == ["f"]


async def events_of(caller, path, body):
    async with caller.session.post(f"{caller.url}/sessions/s{path}", json={**body, "stream": True}) as reply:
        assert reply.content_type == "text/event-stream"
        return (await reply.text()).removesuffix("\n\n").split("\n\n")


async def test_streamed_replies_have_openai_and_anthropic_events():
    async with scripted_gateway(ScriptedSampler(reply=lambda _: f"I add. {CALL}")) as (caller, _):
        body = {"messages": [USER], "tools": [TOOL], "stream_options": {"include_usage": True}}
        *chunks, done = [event.removeprefix("data: ") for event in await events_of(caller, CHAT, body)]
        first, last, usage = map(json.loads, chunks)
        assert done == "[DONE]"
        assert {each["object"] for each in (first, last, usage)} == {"chat.completion.chunk"}
        delta = first["choices"][0]["delta"]
        assert (delta["role"], delta["content"], delta["tool_calls"][0]["index"]) == ("assistant", "I add.", 0)
        assert delta["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "tool_calls")
        assert (usage["choices"], usage["usage"]["completion_tokens"] > 0) == ([], True)
        result = {"role": "tool", "tool_call_id": delta["tool_calls"][0]["id"], "content": "1"}
        await say(caller, "s", [USER, delta, result], tools=[TOOL])  # with the index, as OpenAI's client sends it back

        tools = [{"name": "add", "input_schema": SCHEMA}]
        events = await events_of(caller, MESSAGES, {"max_tokens": 90, "messages": [USER], "tools": tools})
        data = [json.loads(event.split("\n")[1].removeprefix("data: ")) for event in events]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [each["type"] for each in data] == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert events[0].startswith("event: message_start\n")
        assert (data[0]["message"]["content"], data[0]["message"]["stop_reason"]) == ([], None)
        assert data[2]["delta"] == {"type": "text_delta", "text": "I add."}
        assert (data[4]["content_block"]["name"], data[4]["content_block"]["input"]) == ("add", {})
        assert json.loads(data[5]["delta"]["partial_json"]) == {"a": 1}
        assert data[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert sorted(len(row["turns"]) for row in await rows(caller, "s")) == [1, 2]


# ---- what is refused ----


LONG = "x" * 201
FUNCTION = {"name": "f", "arguments": "{}"}


def called(**fields):
    return {"role": "assistant", "tool_calls": [{"function": FUNCTION, **fields}]}


def block(kind, **fields):
    return {"role": "user", "content": [{"type": kind, **fields}]}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
BOTH = [
    ("messages", {"messages": []}),
    ("messages[0]", {"messages": [5]}),
    ("messages[0].role", {"messages": [{"role": "critic", "content": "x"}]}),
    ("temperature", {"temperature": float("nan")}),
    ("max_tokens", {"max_tokens": 0}),
    ("body", {"unknown": 1}),
    ("stream", {"stream": 1}),
]
REFUSED = [
    *((path, field, fields) for path in (CHAT, MESSAGES) for field, fields in BOTH),
    (CHAT, "n", {"n": 2}),
    (CHAT, "messages[0].name", {"messages": [{**USER, "name": LONG}]}),
    (CHAT, "messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "1", "tool_call_id": LONG}]}),
    (CHAT, "messages[0].tool_calls[0].id", {"messages": [called(id=LONG)]}),
    (CHAT, "messages[0].tool_calls[0].function.name", {"messages": [called(function={**FUNCTION, "name": LONG})]}),
    (CHAT, "tools[0].function.name", {"tools": [{"type": "function", "function": {"name": LONG}}]}),
    (MESSAGES, "messages[0].content[0].tool_use.id", {"messages": [block("tool_use", id=LONG, name="f", input={})]}),
    (MESSAGES, "messages[0].content[0].tool_use.name", {"messages": [block("tool_use", id="1", name=LONG, input={})]}),
    (
        MESSAGES,
        "messages[0].content[0].tool_result.tool_use_id",
        {"messages": [block("tool_result", tool_use_id=LONG)]},
    ),
    (MESSAGES, "tools[0].name", {"tools": [{"name": LONG, "input_schema": {}}]}),
    (CHAT, "stop", {"stop": ["x"] * 65}),
    (MESSAGES, "stop_sequences", {"stop_sequences": ["x"] * 65}),
    (CHAT, "response_format.type", {"response_format": {"type": "json_object"}}),
    (CHAT, "logprobs", {"logprobs": True}),
    (CHAT, "tool_choice", {"tool_choice": "required"}),
    (CHAT, "tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    (CHAT, "messages", {"messages": [USER, {"role": "assistant", "content": "a prefix"}]}),
    (CHAT, "messages[0].content[0]", {"messages": [IMAGE]}),
    *(
        (
            CHAT,
            "messages[0].tool_calls[0].function.arguments",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]},
                    USER,
                ]
            },
        )
        for text in ("[1", "[" * 20_000)
    ),
    (MESSAGES, "messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    (MESSAGES, "thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (MESSAGES, "tool_choice.type", {"tool_choice": {"type": "any"}}),
    (MESSAGES, "stop_sequences[0]", {"stop_sequences": [""]}),
]


async def test_unsupported_fields_are_refused_in_the_apis_error_format():
    async with scripted_gateway(ScriptedSampler()) as (caller, sessions):
        for path, field, fields in REFUSED:
            body = json.dumps({"model": "m", "max_tokens": 10, "messages": [USER], **fields}).encode()
            status, reply = await caller.post(f"/sessions/s{path}", body)
            error = reply["error"]
            assert (status, error["type"]) == (400, "invalid_request_error"), (path, field)
            assert error["message"].startswith(f"{field}: "), error
            assert "\n" not in error["message"]
            assert (reply["type"], error["param"], error["code"]) == ("error", field, 400), (
                "the error lacks the shape of one of the APIs"
            )
        for path in (CHAT, MESSAGES):
            for damaged in (b"{", b'{"messages": "\\ud800"}', b"[" * 100_000, b"\xff", b"[]"):
                status, reply = await caller.post(f"/sessions/s{path}", damaged)
                assert (status, reply["error"]["message"][:5]) == (400, "body:"), damaged
        assert len(sessions) == 0
        status, reply = await caller.post(f"/sessions/{'x' * 300}{CHAT}", {"messages": [USER]})
        assert (status, "path.name" in reply["error"]["message"]) == (400, True)


async def test_harmless_client_fields_are_accepted():
    async with scripted_gateway(ScriptedSampler()) as (caller, _):
        fields = {"n": 1, "user": "u", "logit_bias": None, "response_format": {"type": "text"}}
        await chat(caller, "s", [USER], **fields, parallel_tool_calls=True, presence_penalty=0.0)
        await ask(caller, "s", [USER], metadata={"user_id": "u"}, thinking={"type": "disabled"})
        models = await caller.get("/sessions/s/v1/models")
        assert [each["id"] for each in models[1]["data"]] == ["policy"]
        status, _ = await caller.post("/sessions/s/v1/v1/messages", {"max_tokens": 5, "messages": [USER]})
        assert status == 200, "the path of Anthropic's client, which appends /v1/messages, is unknown"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8100"}, 200),
        ({"Host": "[::1]:8100"}, 200),
        ({"Origin": "null"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "["}, 403),
    ],
    ids=str,
)
async def test_cross_origin_requests_are_refused_without_a_key(headers, status):
    """A browser sends the page's Origin, or a host name that the page has pointed at this machine."""
    async with scripted_gateway(ScriptedSampler()) as (caller, _):
        await say(caller, "s", [USER])
        async with caller.session.post(f"{caller.url}/sessions/s/end", data=b"", headers=headers) as reply:
            assert reply.status == status, await reply.text()
    async with scripted_gateway(ScriptedSampler(), key="secret") as (caller, _):  # a proxy's host name, for example
        known = {**headers, "Authorization": "Bearer secret"}
        assert (await caller.post(f"/sessions/s{CHAT}", {"messages": [USER]}, headers=known))[0] == 200


# ---- long contexts ----


async def test_request_bodies_are_released_before_the_policy_samples(monkeypatch):
    """The twenty together exceed the limit that all large bodies share."""
    monkeypatch.setattr("rlhf_triton.tools.gateway.app.MAX_BODY_BYTES", 1_600_000)
    sampler = ScriptedSampler()
    async with scripted_gateway(sampler) as (caller, _):
        sampler.open.clear()
        body = {"messages": [USER], "metadata": {"note": "x" * 90_000}}
        calls = [asyncio.create_task(caller.post(f"/sessions/{i}{CHAT}", body)) for i in range(20)]
        await until(lambda: sampler.in_flight == 20)
        sampler.open.set()
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_memory_is_released_once_for_bodies_that_end_meanwhile(monkeypatch):
    monkeypatch.setattr("rlhf_triton.tools.gateway.app.COLLECTED_BYTES", 1000)
    monkeypatch.setattr("rlhf_triton.tools.gateway.app.RELEASE_S", 0.0)
    goes_on = threading.Event()
    begun = []

    def release():
        begun.append(threading.current_thread())
        assert goes_on.wait(60)

    monkeypatch.setattr("rlhf_triton.tools.gateway.app._release_memory", release)
    async with scripted_gateway(ScriptedSampler()) as (caller, _):
        body = {"messages": [USER], "metadata": "x" * 1000}
        try:
            for i in range(5):
                assert (await caller.post(f"/sessions/{i}{CHAT}", body))[0] == 200
                await until(lambda: begun)
            assert len(begun) == 1
        finally:
            goes_on.set()
        await until(lambda: len(begun) == 2)


async def test_chat_template_is_rendered_off_the_event_loop(monkeypatch):
    places = []
    prompt = Chat.prompt

    def watched(chat, messages):
        places.append(threading.current_thread())
        return prompt(chat, messages)

    async with scripted_gateway(ScriptedSampler()) as (caller, _):
        monkeypatch.setattr(Chat, "prompt", watched)
        await say(caller, "s", [USER])
        assert len(places) == 1
        assert places[0] is not threading.current_thread()


async def test_large_contexts_leave_threads_for_other_agents(monkeypatch):
    """Each takes seconds to tokenise, and all requests share one pool of at most 32 threads.

    Agents that leave take theirs out of the queue.
    """
    call = Session.call
    tokenised = threading.Event()
    names = []

    def slow(session, messages, tools):
        names.append(session.name)
        assert session.name == "small" or tokenised.wait(60)
        return call(session, messages, tools)

    def num_requests():
        return sum("run_asgi" in str(task.get_coro()) for task in asyncio.all_tasks())

    monkeypatch.setattr(Session, "call", slow)
    async with scripted_gateway(ScriptedSampler()) as (caller, _):
        body = {"messages": [USER], "metadata": "x" * 100_000}

        def start(numbers):
            return [asyncio.create_task(caller.post(f"/sessions/{i}{CHAT}", body)) for i in numbers]

        calls = start(range(20))
        await until(lambda: names)
        calls += start(range(20, 40))  # which are not even parsed
        await until(lambda: num_requests() == 40)
        try:
            await asyncio.wait_for(say(caller, "small", [USER]), 30)
            stay = int(names[0])
            for i, left in enumerate(calls):
                if i != stay:
                    left.cancel()
            await asyncio.wait_for(until(lambda: num_requests() == 1), 30)
        finally:
            tokenised.set()
        assert (await calls[stay])[0] == 200
        assert names == [str(stay), "small"]


async def test_rows_are_built_and_exported_off_the_event_loop(monkeypatch, tmp_path):
    threads = []

    def watched(function):
        def watch(*given):
            threads.append(threading.current_thread())
            return function(*given)

        return watch

    async with scripted_gateway(ScriptedSampler(), export=tmp_path / "rows.jsonl") as (caller, _):
        monkeypatch.setattr(Session, "rows", watched(Session.rows))
        monkeypatch.setattr(capture_app, "append_jsonl", watched(capture_app.append_jsonl))
        await say(caller, "s", [USER])
        await rows(caller, "s")
        await caller.post("/sessions/s/end", {})
        assert len(threads) == 3
        assert threading.current_thread() not in threads


async def test_conversation_keeps_its_tools_once():
    async with scripted_gateway(ScriptedSampler()) as (caller, sessions):
        first = await say(caller, "s", [USER], tools=[TOOL])
        await say(caller, "s", [USER, first, USER], tools=[TOOL])
        one, two = sessions.find("s").calls
        assert one.options is two.options


# ---- sessions ----


async def test_posted_rewards_are_assigned_to_turns_and_exported(tmp_path):
    file = tmp_path / "rows.jsonl"
    async with scripted_gateway(ScriptedSampler("one", "two", "sub"), export=file) as (caller, sessions):
        await caller.error("/sessions/s/reward", {"reward": 1}, 404)
        first = await say(caller, "s", [USER])
        assert (await caller.post("/sessions/s/reward", {"reward": 0.5}))[1] == {"reward": 0.5}
        await say(caller, "s", [USER, first, USER])
        await say(caller, "s", [{"role": "system", "content": "x"}, USER])
        await caller.post("/sessions/s/reward", {"reward": 1})
        assert (await caller.post("/sessions/s/reward", {"reward": -3.0}))[1] == {"reward": -2.0}
        for wrong in ({}, {"reward": "1"}, {"reward": float("inf")}, {"rewards": 1}):
            assert "reward" in await caller.error("/sessions/s/reward", wrong, 400)
        shown = await rows(caller, "s")
        status, reply = await caller.post("/sessions/s/end", {"group": "task 7"})
        assert (status, len(sessions)) == (200, 0)
        assert reply["trajectories"] == read_jsonl(file) == [{**row, "group": "task 7"} for row in shown]
        assert [[turn["reward"] for turn in row["turns"]] for row in shown] == [[0.5, 0.0], [-2.0]]
        assert "session s is unknown" in await caller.error("/sessions/s/end", {}, 404)

        await say(caller, "t", [USER])
        file.unlink()
        file.mkdir()
        assert "its export failed" in await caller.error("/sessions/t/end", {}, 500)
        assert len(await rows(caller, "t")) == 1


async def test_sessions_are_bounded_in_number_tokens_and_idle_time(caplog):
    async with scripted_gateway(ScriptedSampler(), most=2, most_tokens=60) as (caller, sessions):
        for name in "ab":
            await say(caller, name, [USER])
        assert "2 open sessions are the limit" in await caller.error(f"/sessions/c{CHAT}", {"messages": [USER]}, 429)
        long = {"messages": [{"role": "user", "content": "word " * 60}]}
        assert ": end the session" in await caller.error(f"/sessions/a{CHAT}", long, 400)
        await say(caller, "a", [USER], max_tokens=500)
        assert len(await rows(caller, "a")) == 2
    sampler = ScriptedSampler(reply=lambda _: "word " * 60)
    async with scripted_gateway(sampler, most_tokens=60) as (caller, _):
        body = await chat(caller, "a", [USER])
        assert (body["usage"]["total_tokens"], body["choices"][0]["finish_reason"]) == (60, "length")
    async with scripted_gateway(ScriptedSampler(), idle_s=1e-6) as (caller, sessions):
        await say(caller, "a", [USER])
        await caller.error("/sessions/a/end", {}, 404)
        assert "session a: dropped with 1 calls" in caplog.text
        assert len(sessions) == 0


async def test_a_session_counts_the_tokens_of_all_its_rows():
    """Tokens that a branch repeats count again, because its row contains them."""
    async with scripted_gateway(ScriptedSampler(), most_tokens=700) as (caller, sessions):
        first = await say(caller, "s", [{"role": "user", "content": "word " * 30}])
        body = {"messages": [{"role": "user", "content": "word " * 30}, first, USER]}
        statuses = [(await caller.post(f"/sessions/s{CHAT}", body))[0] for _ in range(6)]
        found = await rows(caller, "s")
        assert sum(len(row["tokens"]) for row in found) == sessions.find("s").num_tokens <= 700
        assert statuses == [*[200] * len(found), *[400] * (6 - len(found))]
        assert 1 < len(found) < 6


async def test_a_session_counts_the_tokens_of_calls_in_flight():
    sampler = ScriptedSampler()
    async with scripted_gateway(sampler, most_tokens=700) as (caller, sessions):
        body = {"messages": [{"role": "user", "content": "word " * 30}]}
        for name, count in (("s", 0), ("t", 1)):  # without an earlier call, and as branches of one
            sampler.open.set()
            messages = [*body["messages"]]
            for _ in range(count):
                messages += [await say(caller, name, messages), USER]
            sampler.open.clear()
            path = f"/sessions/{name}{CHAT}"
            calls = [asyncio.create_task(caller.post(path, {"messages": messages})) for _ in range(9)]
            await until(lambda calls=calls: sampler.in_flight + sum(call.done() for call in calls) == 9)
            sampler.open.set()
            assert {status for status, _ in await asyncio.gather(*calls)} == {200, 400}
            session = sessions.find(name)
            assert sum(len(row["tokens"]) for row in await rows(caller, name)) == session.num_tokens
            assert session.num_tokens < 800, "the session holds more tokens than its 700 and the replies"
            assert not session._begun, "calls that ended count as in flight"


async def test_call_fails_if_its_session_ended_meanwhile():
    sampler = ScriptedSampler()
    async with scripted_gateway(sampler) as (caller, sessions):
        first = await say(caller, "s", [USER])
        sampler.open.clear()
        late = asyncio.create_task(caller.post(f"/sessions/s{CHAT}", {"messages": [USER, first, USER]}))
        await until(lambda: sampler.in_flight == 1)
        assert (await caller.post("/sessions/s/end", {}))[0] == 200
        sampler.open.set()
        for answer in (await late, await caller.post(f"/sessions/s{CHAT}", {"messages": [USER]})):
            assert (answer[0], len(sessions)) == (404, 0), "a late call opened the ended session again"
            assert "session s has ended: call under another name" in answer[1]["error"]["message"]


@pytest.mark.parametrize("is_called", [True, False], ids=["during the first call", "before the first call"])
async def test_session_without_calls_stays_closed_once_it_is_ended(is_called):
    """Otherwise a late agent's call would become a row of the next attempt with that name."""
    sampler = ScriptedSampler()
    async with scripted_gateway(sampler) as (caller, sessions):
        sampler.open.clear()
        calls = [asyncio.create_task(caller.post(f"/sessions/s{CHAT}", {"messages": [USER]}))] if is_called else []
        await until(lambda: sampler.in_flight == len(calls))
        assert "session s is unknown" in await caller.error("/sessions/s/end", {}, 404)
        sampler.open.set()
        calls.append(asyncio.create_task(caller.post(f"/sessions/s{CHAT}", {"messages": [USER]})))
        assert {status for status, _ in await asyncio.gather(*calls)} == {404}
        assert len(sessions) == 0


async def test_disconnected_clients_leave_no_session_turn_or_task():
    """A third of the 60 sessions disconnect during the policy's first call, another third during its second."""
    sampler = ScriptedSampler()
    async with scripted_gateway(sampler) as (caller, sessions):
        messages = {name: [USER] for name in range(60)}
        for number in range(2):
            sampler.open.clear()
            calls = {
                name: asyncio.create_task(caller.post(f"/sessions/{name}{CHAT}", {"messages": history}))
                for name, history in messages.items()
            }
            await until(lambda: sampler.in_flight == len(messages))
            for name in [name for name in messages if name % 3 == number]:
                calls.pop(name).cancel()
                del messages[name]
            await until(lambda: sampler.in_flight == len(messages))
            sampler.open.set()
            for name, call in calls.items():
                messages[name] += [(await call)[1]["choices"][0]["message"], USER]
        assert len(sessions) == 40, "a session without calls counts"
        for name in (1, 2):
            _, reply = await caller.post(f"/sessions/{name}/end", {})
            assert [len(row["turns"]) for row in reply["trajectories"]] == [name]
        running = [str(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [coroutine for coroutine in running if "left" in coroutine or "sample" in coroutine]


# ---- vLLM ----


async def test_sessions_stick_to_a_vllm_server_while_it_is_up():
    async with FakeVllm() as one, FakeVllm() as two, contextlib.AsyncExitStack() as opened:
        servers = [one, two]
        one.answer = two.answer = lambda body: {"weight_versions": [{"version": "w", "start": 1, "end": 4}]}
        sampler = VllmSampler([server.url for server in servers], eos_ids=[1], deadline_s=120)
        opened.push_async_callback(sampler.close)
        names = map(chr, itertools.count(ord("a")))
        while not (one.requests and two.requests):  # sessions are dealt by a hash of addresses, whose ports are drawn
            name = next(names)
            for _ in range(2):
                sampled = await sampler.sample(name, [ord(name), 3], Sampling(9, 0.5, 0.9, ("x",)))
        assert (sampled.tokens, sampled.logprobs, sampled.ended) == ([5, 6, 7, 1], [-0.5] * 4, True)
        assert sampled.versions == [None, "w", "w", "w"], "a token has another version than its span"
        first, second = ([body["token_ids"][0] for body in server.requests] for server in servers)
        assert not {*first} & {*second}
        sampling = one.requests[0]["sampling_params"]
        expected = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stop_token_ids": [1]}
        assert expected.items() <= sampling.items()
        one.drops = 1
        await sampler.sample(chr(first[0]), [8], Sampling(9))
        assert [body["token_ids"] for body in one.requests[-2:]] == [[8], [8]], (
            "the session left a healthy server that has its prefix"
        )
        await one.stop()
        await sampler.sample(chr(first[0]), [9], Sampling(9))
        assert two.requests[-1]["token_ids"] == [9]
        await one.start()
        while one.requests[-1]["token_ids"] != [10]:  # until a probe has found it
            await sampler.sample(chr(first[0]), [10], Sampling(9))
            await asyncio.sleep(0.01)
        await two.stop()
        await sampler.sample(chr(second[0]), [11], Sampling(9))
        assert one.requests[-1]["token_ids"] == [11]
        await one.stop()
        with pytest.raises(HttpError, match="is vLLM running there") as found:
            await sampler.sample("a", [9], Sampling(9))
        assert found.value.status == 503


def logprobs_of(value):
    return {"logprobs": {"content": [{"logprob": value}] * 4}}


def span(start, end):
    return {"weight_versions": [{"version": "w", "start": start, "end": end}]}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"logprobs": {"content": [{"logprob": -0.5}] * 3}}, "4 tokens with 3 log-probs"),
        ({"logprobs": None}, "4 tokens with 0 log-probs"),
        ({"logprobs": [1, 2]}, "choices.0.logprobs: "),
        (logprobs_of(float("nan")), "choices.0.logprobs.content.0.logprob: must be a finite number, got nan"),
        (logprobs_of(None), "choices.0.logprobs.content.0.logprob: "),
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": None, "logprobs": None}, "0 tokens"),
        ({"token_ids": ["a"] * 4}, "choices.0.token_ids.0: must be a valid integer, got 'a'"),
        ({"token_ids": [5, 6, 7, -1]}, "choices.0.token_ids.3: must be greater than or equal to 0, got -1"),
        ({"token_ids": [5, 6, 7, 100]}, "token id 100 is outside the vocabulary of 100"),
        (span(0, 5), "weights version w of the tokens 0 to 5 of 4"),
        (span(3, 1), "weights version w of the tokens 3 to 1 of 4"),
        (span(-2, 2), "choices.0.weight_versions.0.start: "),
        (span(0.0, 4), "choices.0.weight_versions.0.start: "),
        (span(0, None), "choices.0.weight_versions.0.end: "),
    ],
    ids=str,
)
async def test_replies_with_damaged_columns_are_rejected(columns, told):
    """Otherwise a log-prob belongs to another token, or is a number that neither JSON nor a training can use."""
    async with FakeVllm() as server:
        sampler = VllmSampler([server.url], eos_ids=[1], deadline_s=120, vocab_size=100)
        server.answer = lambda request: columns
        with pytest.raises(HttpError) as raised:
            await sampler.sample("a", [9], Sampling(9))
        await sampler.close()
    assert told in str(raised.value)
    assert raised.value.status == 503


async def test_gateway_section_with_a_policy_serves_and_exports_chats(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "policy")
    (tmp_path / "policy" / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"vocab_size": len(TOKENIZER) + 2}))
    export = tmp_path / "new" / "rows.jsonl"
    async with FakeVllm() as server, contextlib.AsyncExitStack() as closing:
        server.answer = lambda body: {"token_ids": [*ids("Hi."), EOS], "weight_versions": []}
        section = ServedPolicySection(model=tmp_path / "policy", servers=(server.url,), export=export)
        async with gateway(more=policy_routes(section, closing)) as caller:
            known = "known: /health, /healthz, /metrics, /readyz, /sessions/{name}, "
            assert known in await caller.error("/v1/messages", {"messages": [USER]}, 404)
            assert "no such path" in await caller.error("/v1/rewards", {"inputs": [{"text": "a"}]}, 404)
            assert (await caller.get("/health"))[0] == 200  # without rewards, no server is missing
            assert (await say(caller, "s", [USER]))["content"] == "Hi."
            await caller.post("/sessions/s/end", {})
            server.answer = lambda body: {"finish_reason": "abort"}
            assert "finish_reason 'abort'" in await caller.error(f"/sessions/other{CHAT}", {"messages": [USER]}, 503)
    [row] = read_jsonl(export)
    assert trained(row | {"versions": [None if seen else 0 for seen in row["observed"]]}) == [[*ids("Hi."), EOS]]
    sent = server.requests[0]["sampling_params"]
    assert sent["stop_token_ids"] == [EOS]
    assert {str(len(TOKENIZER) + more) for more in (0, 1)} <= {*sent["logit_bias"]}
