"""Conversations with environments: the tokens of each engine, their ends, their rewards, and what they train."""

import asyncio
import copy
import itertools
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoded_responses import one_response
from generated_conversations import (
    BANNED,
    CHATML,
    EOS,
    TOKENIZER,
    generated_rows,
    prompts_of,
    random_policy,
    sampled_of,
    tokenizer_of,
)
from messages import assistant, user
from samples import a_sample, groups_of, make_batch, tokens_of
from settings import actor_section
from tiny_tokenizers import make_text_tokenizer
from tokenizers import AddedToken

from rlhf_triton.actor.algorithms.batch import describe_failures, score_returns
from rlhf_triton.actor.algorithms.sample_metrics import rollout_metrics, sequence_kl, text_metrics
from rlhf_triton.actor.data.chat import PROBE_MESSAGE, Chat, HistoryChanged, TemplateError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn, SampledTurn
from rlhf_triton.actor.data.rollout_rows import Score, failure_of, row_of_response
from rlhf_triton.actor.generation import conversations
from rlhf_triton.actor.generation.conversations import (
    ConversationRunner,
    ConversationSource,
    seed_of,
)
from rlhf_triton.actor.generation.engine import LocalGeneration
from rlhf_triton.actor.generation.row_sources import ROW_STEP, SamplingJob, uniform_draws
from rlhf_triton.actor.generation.slots import Decoder, SamplingSettings
from rlhf_triton.actor.run.collection import has_spread
from rlhf_triton.actor.run.validation import Validation, read_texts, samples
from rlhf_triton.actor.scoring.environment import add_environment_rewards
from rlhf_triton.actor.scoring.row_metadata import row_metadata
from rlhf_triton.actor.scoring.row_texts import RowText, tokens_at
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.rewards.function import load_function
from rlhf_triton.rewards.sample import Sample

CLASSES = Path(__file__).parents[1] / "support" / "environment_classes.py"


FORGETFUL = tokenizer_of("{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>\n\n')[-1] }}")
REWRITING = tokenizer_of("{{ '-' if m.role == 'assistant' and not loop.last else m.content }}")


def asked(text="Play.", **columns):
    """A chat that begins with this text."""
    return Prompt("7", "", np.zeros(0, np.int64), {"messages": [user(text)], **columns})


PROMPT = asked(turns=2)


def section(name, **settings):
    return EnvironmentSection.model_validate({"class": f"{CLASSES}:{name}", "max_tokens": 200, **settings})


@pytest.fixture
def agents():
    begun = []

    def begin(name, tokenizer=TOKENIZER, vocab_size=None, **settings):
        begun.append(
            ConversationRunner(section(name, **settings), tokenizer, max_prompt_tokens=100, vocab_size=vocab_size)
        )
        return begun[-1]

    yield begin
    for agent in begun:
        agent.close()


def ids(text, tokenizer=TOKENIZER):
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def talk(agent, replies, prompt=PROMPT, **more):
    """Hold a conversation as `talk_in_rows` does; return its last row."""
    found, seen = talk_in_rows(agent, replies, prompt, **more)
    return found[-1], seen


def talk_in_rows(
    agent,
    replies,
    prompt=PROMPT,
    ends=True,
    tokenizer=TOKENIZER,
):
    """Hold a conversation with a policy that says `replies`; return its rows and the tokens before the last turn.

    The clock advances by 10 s with each reading.
    """
    left = [*replies]
    seen = []
    times = itertools.count(0.0, 10.0)

    class Scripted:
        clock = staticmethod(lambda: next(times))

        async def sample_turn(self, tokens):
            seen[:] = tokens
            reply = ids(left.pop(0), tokenizer) + [EOS] * ends
            return PolicyTurn(reply, ends, [-1.0] * len(reply))

        def start_row(self):
            """Nothing: the rows are the agent's."""

    found = asyncio.run_coroutine_threadsafe(agent.run(prompt, 5, Scripted()), agent.loop).result()
    return found, seen


# ---- one conversation, with a scripted policy ----


def test_conversation_tokens_equal_the_templates_rendering(agents):
    found, _ = talk(agents("Countdown"), ["one", "two", "three"])
    text = TOKENIZER.decode(found.tokens)
    messages = [
        user("Play. 2 left, seed 5."),
        assistant("one"),
        user("1 left after one"),
        assistant("two"),
    ]
    assert text + "\n" == TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert sampled_of(found) == [*ids("one"), EOS, *ids("two"), EOS]
    assert [turn.reward for turn in found.turns] == [0.5, 2.0]
    for turn, reply in zip(found.turns, ("one", "two"), strict=True):
        assert found.tokens[turn.start : turn.end].tolist() == [*ids(reply), EOS]
    assert (found.ended, found.truncated, found.error) == (True, "", "")
    assert [*found.messages] == messages[1:]
    assert found.logprobs.tolist() == [-float(own) for own in found.sampled]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_turns": 2}, "environment.max_turns"),
        ({"max_tokens": 60}, "environment.max_tokens"),
        ({"timeout_s": 25.0}, "environment.timeout_s"),
    ],
)
def test_conversation_ends_at_a_limit_and_records_which(agents, settings, limit):
    prompt = asked(turns=50)
    found, _ = talk(agents("Countdown", **settings), ["again"] * 50, prompt)
    assert (found.truncated, found.ended, found.error) == (limit, False, "")
    assert len(found.tokens) <= settings.get("max_tokens", 200)
    assert found.sampled[-1]


def test_conversation_ends_after_a_turn_cut_at_max_new_tokens(agents):
    found, _ = talk(agents("Countdown"), ["one", "two"], ends=False)
    assert (found.truncated, len(found.turns)) == ("actor.generation.max_new_tokens", 1)


@pytest.mark.parametrize(("turns", "num_turns"), [(-1, 0), (-2, 1)])
def test_environment_exception_ends_the_conversation_with_its_message(agents, turns, num_turns):
    agent = agents("Countdown")
    found, _ = talk(agent, ["one", "two"], asked(turns=turns))
    assert (len(found.turns), found.ended) == (num_turns, False)
    assert f"ValueError: {turns} turns (environment_classes.py:" in found.error
    assert talk(agent, ["one", "two"])[0].ended


def test_tool_calls_run_and_malformed_calls_are_answered_with_an_error(agents):
    """TRL's own example, and a policy that calls it rightly and wrongly."""
    prompt = asked("")
    call = '<tool_call>{"name": "increment", "arguments": {"step": %s}}</tool_call>'
    replies = [call % 2, call % '"x', "<tool_call>[]</tool_call>", call % 1 + call % 1, "Done."]
    agent = agents("IncrementEnv", max_tokens=2000)
    found, _ = talk(agent, replies, prompt)
    assert row_metadata(ServedModel(), RowText(found.prompt, "Done."))["tools"] == agent._chat.tools
    assert found.prompt.text.startswith("<|im_start|>system\nincrement<|im_end|>")
    said = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert (said[0], said[3:]) == ("2", ["3", "4"])
    assert "not valid JSON" in said[1]
    assert '"name"' in said[2]
    assert found.ended
    assert [turn.reward for turn in found.turns[:-1]] == [0.0] * 4
    assert found.turns[-1].reward == (int(found.prompt.text.split("counter by ")[1][0]) == 4)


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        ("<think>Perhaps {}.</think>{}", ["b"]),
        ("Perhaps {}.\n</think>\n\n{}{}", ["b", "c"]),  # the template begins the thought
        ("<think>I may write <tool_call>.</think>{}", ["a"]),
        ('<tool_call>{{"name": "say", "arguments": {{"text": "</think>"}}}}</tool_call>', ["say"]),
    ],
)
def test_tool_calls_within_a_thought_are_not_executed(reply, names):
    calls = (f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "abc")
    found = Chat(TOKENIZER).parse_calls([], ids(reply.format(*calls)))
    assert [call.name for call in found] == names


@pytest.mark.parametrize("name", ['"\\ud800", "arguments": {}', '"look", "arguments": {"at": NaN}', "[" * 5000])
def test_tool_call_that_cannot_be_encoded_is_answered_with_an_error(agents, name):
    prompt = asked("")
    found, _ = talk(agents("IncrementEnv", max_tokens=9000), [f'<tool_call>{{"name": {name}}}</tool_call>', ""], prompt)
    assert found.messages[1]["content"].startswith("the tool call ")
    assert found.ended


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        ("{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}", True),
        ("{{ m.content.split('</think>\n\n')[-1] if m.role == 'assistant' and not loop.last else m.content }}", False),
    ],
)
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_text_after_a_reply_matches_the_templates_rendering(template, keeps, opening):
    """Qwen3 adds an empty thought to a last reply; Qwen3.5 begins replies with a thought, which R1 forgets."""
    chat = Chat(tokenizer_of(template, CHATML.replace("assistant\n{% endif", f"assistant\n{opening}{{% endif")))
    said = [user("Hi.")]
    more = [user("Go on.")]
    reply = "Hm.\n</think>\n\nYes." if opening else "Yes."
    if opening and not keeps:
        with pytest.raises(HistoryChanged):
            chat.check()
        return
    chat.check()
    row = chat.tokenizer(chat.prompt(said) + reply, add_special_tokens=False)["input_ids"]
    row += [EOS, *chat.after_reply(more, EOS, reply)]
    written = assistant(opening + reply)
    assert chat.tokenizer.decode(row) == chat.prompt([*said, written, *more])


@pytest.mark.parametrize("end", ["eos_token", "' ' + eos_token"], ids=["Mistral", "Llama 2"])
def test_template_that_adds_spaces_around_replies_is_accepted(end):
    """The sampled reply stands, with or without them; an end that it has is not repeated."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        f"{{% else %}}{{{{ ' ' + m.content + {end} }}}}{{% endif %}}{{% endfor %}}"
    )
    chat = Chat(tokenizer_of(template=template))
    chat.check()
    rest = f"[INST] {PROBE_MESSAGE['content']} [/INST]"
    assert chat.tokenizer.decode(chat.after_reply([PROBE_MESSAGE], EOS, "Yes.")) == rest
    end_text = " " * ("' '" in end) + chat.tokenizer.eos_token
    assert chat.tokenizer.decode(chat.after_reply([PROBE_MESSAGE], ids("x")[-1], "Yes.")) == end_text + rest


def test_check_prompts_reports_a_template_that_leaves_out_tools(agents, caplog):
    agent = agents("IncrementEnv")
    chats = [replace(PROMPT, metadata={"messages": [{"role": "user"}]})]
    agent.check_prompts(chats)
    assert not caplog.records
    for seen, unseen in (
        ("{% if tools %}", "{% if false %}"),
        ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"),
    ):
        agent._chat = Chat(tokenizer_of(template=CHATML.replace(seen, unseen)), agent._chat.tools)
        if "tool" in unseen:
            with pytest.raises(TemplateError, match="omits messages of the role 'tool'"):
                agent.check_prompts(chats)
        else:
            agent.check_prompts(chats)
            found, _ = talk(agent, ["Done."], replace(PROMPT, metadata={"messages": [PROBE_MESSAGE]}))
            assert "tools" not in found.prompt.metadata, "a reward model would read tools that the policy does not"
    agent.check_prompts([Prompt("0", "Count.", np.array([5]))])
    assert ["chat template" in record.message for record in caplog.records] == [True, False]


def test_tool_calls_are_parsed_by_the_tokenizers_response_template(agents):
    """Qwen3.5's and GLM's kind, which the tokenizer describes to transformers."""
    tokenizer = tokenizer_of()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<call>\s*<function=(?P<name>[^\n>]+)>",
                "close_pattern": r"</call>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    prompt = asked("")
    replies = ["<call><function=increment><step>2</step></call>", "<call><function=fly></call>", "Done."]
    found, _ = talk(agents("IncrementEnv", tokenizer, max_tokens=2000), replies, prompt)
    said = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert said[0] == "2"
    assert "there is no tool fly; the tools: increment" in said[1]
    assert found.ended


def test_plain_text_prompt_is_followed_by_turns_without_roles(agents):
    prompt = Prompt("1", "Play.", np.array(ids("Play.")), {"turns": 2})
    found, _ = talk(agents("Countdown"), ["one", "two"], prompt)
    text = TOKENIZER.decode(found.tokens)
    assert text == "Play. 2 left, seed 5.one<|im_end|>1 left after onetwo<|im_end|>"


def test_check_prompts_refuses_a_template_that_fails_to_render(agents):
    tokenizer = make_text_tokenizer("qwen2", chat_template="{{ raise }}{{ 1 / 0 }}")
    agent = agents("Countdown", tokenizer)
    agent.check_prompts([Prompt("1", "a text", np.array([5]))])
    with pytest.raises(TemplateError, match="chat template"):
        agent.check_prompts([PROMPT])


def test_conversation_starts_another_row_if_the_template_removes_thoughts(agents, caplog):
    agent = agents("Countdown", FORGETFUL)
    prompt = asked(turns=4)
    agent.check_prompts([prompt])
    assert not caplog.records
    thought = "<think>\nHm.\n</think>\n\n"
    (first, found), seen = talk_in_rows(agent, ["one", f"{thought}two", "three", f"{thought}four"], prompt)
    messages = [
        user("Play. 4 left, seed 5."),
        assistant("one"),
        user("3 left after one"),
        assistant(f"{thought}two"),
        user(f"2 left after {thought}two"),
        assistant("three"),
        user("1 left after three"),
        assistant(f"{thought}four"),
    ]
    assert [*found.messages] == messages[1:]
    for row, until, given in ((first, 4, 1), (found, 8, 5)):
        text = FORGETFUL.decode(row.tokens)
        assert text + "\n" == FORGETFUL.apply_chat_template(messages[:until], tokenize=False)
        assert len(row.turns) == 2
        assert row.prompt.metadata["messages"] == messages[:given]
    assert seen == found.tokens[: found.turns[-1].start].tolist()
    assert [turn.number for row in (first, found) for turn in row.turns] == [1, 2, 3, 4]
    left_out, another = caplog.messages
    assert "omits the reasoning in contents" in left_out
    assert "thoughts" in another
    assert "another row of the same group" in another


@pytest.mark.parametrize(("tokenizer", "num_rows"), [(TOKENIZER, 1), (FORGETFUL, 2)])
def test_reward_functions_receive_all_messages_of_a_conversation(agents, tokenizer, num_rows):
    """They receive all messages, even if the template began another row, or the text of a prompt without roles."""
    replies = ["one", "<think>\nHm.\n</think>\n\ntwo", "three"]
    plain = Prompt("1", "Play.", np.array(ids("Play.")), {"turns": 3})
    found = [talk_in_rows(agents("Countdown", tokenizer), replies, each)[0] for each in (asked(turns=3), plain)]
    assert len(found[0]) == num_rows
    ends = [conversation[-1] for conversation in found]
    scorer = Scorer(None, tokenizer)
    scorer.reward = ServedModel(components=("a",), weights=(1.0,))
    scorer.sends_sentences = True
    (chat, text), sentences, _ = scorer.text_inputs(ends)
    completion = [
        assistant("one"),
        user("2 left after one"),
        assistant(replies[1]),
        user(f"1 left after {replies[1]}"),
        assistant("three"),
    ]
    assert chat["reply_messages"] == completion
    assert chat["messages"] == [user("Play. 3 left, seed 5."), *completion[:-1]]
    assert (chat["response"], sentences[0]) == ("three", "three")
    assert Sample("", metadata=chat).prompt == completion[-2]["content"]
    places = tokens_at(ends[0], np.array([3, 5]), tokenizer)
    assert places.tolist() == [ends[0].turns[-1].start + 2, len(ends[0].tokens) - 1]
    echo = load_function(f"{CLASSES.with_name('trl_functions.py')}:echo")
    for metadata, prompt, said in (
        (chat, [user("Play. 3 left, seed 5.")], completion),
        (text, "Play. 3 left, seed 5.", "".join(message["content"] for message in completion)),
    ):
        expected = {"prompts": [prompt], "completions": [said], "turns": [3]}
        assert echo(Sample("", metadata={**metadata, "expected": expected})) == 1


def test_reply_without_the_templates_end_token_gets_it():
    chat = Chat(TOKENIZER)
    answer = [user("b")]
    rest = ids("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert chat.after_reply(answer, EOS) == rest
    assert chat.after_reply(answer, ids("!")[-1]) == [EOS, *rest]
    assert chat.after_reply(answer, ids("<")[-1]) == [EOS, *rest]


@pytest.mark.parametrize(
    ("original", "first", "turns"), [(TOKENIZER, "<|extra|>", 0), (TOKENIZER, "hello", 1), (REWRITING, "hello", 1)]
)
def test_conversation_fails_if_a_text_has_a_token_beyond_the_policys_embeddings(agents, original, first, turns):
    """The token is in the first observation, or in the answer to a turn, in the same row or in a new one."""
    tokenizer = copy.deepcopy(original)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    agent = agents("Doing", tokenizer, vocab_size=len(TOKENIZER), options={"first": first})
    done = {}
    source = ConversationSource(agent)
    source.add(SamplingJob({0: PROMPT}, lambda index, found: done.update({index: found}), seed=1))
    while not done:
        for row in source.next_rows(wait=True):
            reply = [*ids("<|extra|>"), EOS]
            source.deliver(row.id, PolicyTurn(reply, True, [-1.0] * len(reply)))
    (found,) = done[0]
    assert (len(found.turns), found.truncated) == (turns, "")
    assert "token 160 ('<|extra|>') is outside the policy's 160 embeddings" in found.error
    assert found.tokens.max(initial=0) < 160, "a token is outside the policy's vocabulary"


# ---- a model's conversations, by every engine ----


def generated(*given, **settings):
    """Return the last row of each conversation."""
    return [rows[-1] for rows in generated_rows(*given, **settings)]


def unscored(rows):
    """Return the conversations without rewards."""
    return [(replace(row, score=Score()),) for row in rows]


@pytest.mark.parametrize(
    ("tokenizer", "uses_slots", "lockstep", "slots"),
    [
        (TOKENIZER, True, False, 3),
        (TOKENIZER, False, False, 3),
        (REWRITING, True, True, 9),
        (REWRITING, False, True, 3),
    ],
)
def test_each_turn_is_sampled_from_the_whole_row_before_it(agents, model, tokenizer, uses_slots, lockstep, slots):
    """A template that rewrites every reply makes each turn start a row, with its own random draws."""
    agent = agents("Countdown", tokenizer)
    agent.lockstep = lockstep
    found = generated_rows(model, agent, prompts_of(9), uses_slots, generation_batch_size=slots)
    assert max(len(rows[-1].turns if tokenizer is TOKENIZER else rows) for rows in found) > 2
    for i, number, row in ((i, number, row) for i, rows in enumerate(found) for number, row in enumerate(rows)):
        draws = uniform_draws(3, i + number * ROW_STEP)
        inside = np.zeros(len(row.tokens), np.bool_)
        for turn in row.turns:
            decoder = Decoder(model, SamplingSettings(max_new_tokens=8, eos_ids=[EOS], banned_ids=BANNED), slots=1)
            before = row.tokens[: turn.start]
            assert row.tokens[turn.start : turn.end].tolist() == one_response(decoder, before, draws, 8)
            inside[turn.start : turn.end] = True
        assert (row.sampled == inside).all()
        assert not row.logprobs[~inside].any()


def test_time_limit_excludes_the_time_that_the_policy_samples(agents, model, monkeypatch):
    now = [0.0]
    sampled = ConversationSource.sample_turn

    async def slowly(source, row, before):
        turn = await sampled(source, row, before)
        now[0] += 1000
        return turn

    monkeypatch.setattr(ConversationSource, "sample_turn", slowly)
    monkeypatch.setattr(conversations, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    (row,) = generated(model, agents("Countdown", timeout_s=500), prompts_of(4)[2:3], max_new_tokens=50)
    assert (len(row.turns), row.truncated) == (3, "")


@pytest.mark.timeout(120)
def test_conversation_in_step_keeps_its_slot_across_restarts(agents, model, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_INSTANCES", 1)
    agent = agents("Fragile", options={"losses": 2})
    agent.lockstep = True
    assert [row.error for row in generated(model, agent, prompts_of(3))] == [""] * 3


@pytest.mark.timeout(120)
def test_conversations_in_step_do_not_wait_for_ones_without_a_slot(agents, model, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_INSTANCES", 2)
    agent = agents("Countdown")
    agent.lockstep = True
    one = generated(model, agent, prompts_of(5))
    assert all(row.turns for row in one)
    assert torch.equal(tokens_of(one), tokens_of(generated(model, agent, prompts_of(5))))


def test_environment_seed_depends_on_run_seed_and_prompt_id():
    prompts = prompts_of(2)
    assert seed_of(3, prompts[0]) == seed_of(3, replace(prompts[0], text="x")) != seed_of(4, prompts[0])
    assert seed_of(3, prompts[0]) != seed_of(3, prompts[1])


def test_failing_environment_fails_only_its_own_conversation(agents, model):
    prompts = prompts_of(6)
    for i, turns in ((1, -1), (4, -2)):
        prompts[i] = replace(prompts[i], metadata={**prompts[i].metadata, "turns": turns})
    rows = generated(model, agents("Countdown"), prompts)
    assert [bool(row.error) for row in rows] == [i in (1, 4) for i in range(6)]
    assert not rows[1].sampled.any()
    found = [add_environment_rewards(conversation) for conversation in unscored(rows)]
    assert [bool(failure_of(each)) for each in found] == [i in (1, 4) for i in range(6)]
    assert "2 of 6 rewards" in describe_failures(found)
    assert all(np.isnan(found[i][0].score.components["environment"]) for i in (1, 4))


@pytest.mark.parametrize(("losses", "failed"), [(2, 0), (1000, 6)])
def test_conversation_restarts_if_its_environment_is_lost(agents, losses, failed):
    """Each reply ends at once, so that each conversation takes a step."""
    rows = generated(random_policy(1000.0), agents("Fragile", options={"losses": losses}), prompts_of(6))
    assert sum(bool(row.error) for row in rows) == failed
    assert sum(row.restarts for row in rows) == (2 * 6 if failed else losses)
    metrics = text_metrics(unscored(rows))
    assert metrics["restarted_environments"] == (2 if failed else losses / 6)


def test_close_cancels_a_generation_that_waits_for_environments(agents, model):
    agent = agents("Countdown")
    source = ConversationSource(agent)
    source.add(SamplingJob({0: prompts_of(1)[0]}, lambda *_: None, seed=0))
    assert source.next_rows(wait=True)[0].id == (0, 0)
    threading.Timer(0.1, source.close).start()
    with pytest.raises(asyncio.CancelledError):
        source.next_rows(wait=True)


def test_open_call_is_cancelled_when_its_agent_ends(agents):
    """The decoder does not receive it."""
    agent = agents("Countdown")
    calls = []
    found = {}

    async def leave(prompt, seed, rows, **_):
        calls.append(asyncio.create_task(rows.sample_turn([5])))
        await asyncio.sleep(0)
        return (row_of_response(prompt, PolicyTurn([EOS], ended=True)),)

    agent.run = leave
    source = ConversationSource(agent)
    source.add(SamplingJob(dict(enumerate(prompts_of(3))), lambda i, rows: found.update({i: rows}), seed=0))
    for conversation in [*source._tasks.values()]:
        conversation.result(timeout=10)
    assert source.next_rows(wait=True) == []
    assert [*found] == [0, 1, 2]
    asyncio.run_coroutine_threadsafe(asyncio.wait(calls), agent.loop).result(timeout=10)
    assert all(call.cancelled() for call in calls)


def test_jobs_can_be_dropped_after_the_environments_have_ended(agents, model):
    """A run may be abandoned while its decoding gives way to another call."""
    agent = agents("Countdown")
    engine = LocalGeneration(model, TOKENIZER, actor_section().generation, eos_ids=[EOS], pad_id=0, banned_ids=BANNED)
    engine.uses_slots = True
    engine.runner = agent
    engine.add(SamplingJob(dict(enumerate(prompts_of(4))), lambda *_: None, seed=3))
    passes = iter([False, False, True])
    engine.decode(lambda: next(passes))
    engine.close()
    engine.abandon()
    assert not engine.has_jobs


# ---- rewards, limits and what is trained ----


def row(*turns, length, truncated="", error=""):
    """Return a row with a prompt of two tokens and these turns (first token, token after the last, reward)."""
    inside = np.array([any(start <= token < end for start, end, _ in turns) for token in range(length)])
    logprobs = np.where(inside, -1.0, 0.0).astype(np.float32)
    given = tuple(SampledTurn(*turn, number=i) for i, turn in enumerate(turns))
    about = {"truncated": truncated, "error": error, "turns": given}
    known = {"sampled": inside, "logprobs": logprobs, "policy_logprobs": logprobs}
    return a_sample([5, 6, *[9] * (length - 2)], 2, ended=not truncated, **about, **known)


def scored_of(*rows, served=0.0):
    """Return conversations with a served reward and, for each token, the value 0.1 times its position."""
    found = []
    for given in rows:
        conversation = given if isinstance(given, tuple) else (given,)
        valued = [
            replace(each, score=Score(values=np.arange(len(each.tokens), dtype=np.float32) / 10, version=0))
            for each in conversation
        ]
        end = valued[-1].with_score(reward=served, outcome=served)
        found.append(add_environment_rewards((*valued[:-1], end)))
    return found


def batch_of(scored, name, **settings):
    plain = {"responses_per_prompt": 2, "rollout_size": 2, "mask_unfinished": False}
    return make_batch(scored, **{"algorithm_name": name, "kl_coef": 0.0, **plain, **settings})


ROWS = row((2, 4, 1.0), (6, 7, 2.0), length=7), row((2, 3, 0.0), (5, 6, 4.0), length=6)
SECOND = row((2, 5, 3.0), length=5), row((2, 3, 0.0), (5, 6, 4.0), length=6)


def test_turn_reward_is_placed_at_the_turns_last_token():
    ((end,),) = scored_of(ROWS[0], served=0.5)
    assert end.score.reward == 3.5
    assert end.score.steps.tolist() == [0, 0, 0, 1, 0, 0, 2]
    assert end.score.ends.nonzero()[0].tolist() == [3, 6]


@pytest.mark.parametrize(
    ("served", "steps", "turns"),
    [(0.0, 0.0, (3e38, 3e38)), (0.0, 0.0, (1e39, -1e39)), (3e38, 0.0, (0.0, 3e38)), (-1e38, 3e38, (0.0, 1e38))],
)
def test_conversation_fails_if_its_reward_overflows_float32(served, steps, turns):
    """Alone, or in sum with the served rewards: an infinite total would make the advantages of its whole group NaN."""
    score = Score(reward=served, outcome=served, steps=np.array([0, 0, 0, 0, steps], np.float32))
    end = row((2, 3, turns[0]), (4, 5, turns[1]), length=5)
    (end,) = add_environment_rewards((replace(end, score=score),))
    assert "exceed float32" in end.score.failure
    (other,) = scored_of(row((2, 3, 1.0), length=3), served=3e38)[0]
    assert (other.score.reward, other.score.failure) == (3e38, "")


def test_metrics_cover_all_rows_of_the_trained_conversations():
    """The third conversation has met a limit. The KL is 0.5 nats per token of the first, 1 of the second's two rows."""
    limited = row((2, 5, 1.0), length=5, truncated="environment.max_turns")

    def with_kl(each, gap):
        return replace(each, ref_logprobs=np.where(each.sampled, each.policy_logprobs - gap, 0.0).astype(np.float32))

    scored = scored_of(with_kl(ROWS[0], 0.5), tuple(with_kl(each, 1.0) for each in SECOND), with_kl(limited, 9.0))
    batch = batch_of(scored, "ppo", responses_per_prompt=1, truncated="mask")
    distance = (3 * 0.5 + 2 * 1.0 + 3 * 1.0) / 2
    assert sequence_kl(scored[:2]) == pytest.approx(distance)
    assert sequence_kl([]) is None
    metrics = rollout_metrics(groups_of(scored), batch, kl_coef=0.1)
    found = {name: metrics[f"train_rollouts/{name}"] for name in ("generation_length", "init_policy_kl_per_sequence")}
    assert found == pytest.approx({"generation_length": (3 + 2 + 3 + 3) / 3, "init_policy_kl_per_sequence": distance})
    used = batch.mask > 0
    by_hand = 1 - (batch.rewards_to_go - batch.prev_values)[used].var() / batch.rewards_to_go[used].var()
    assert metrics["train_rollouts/explained_variance"] == pytest.approx(float(by_hand), abs=1e-5)
    assert sequence_kl(scored) == pytest.approx((2 * distance + 3 * 9.0) / 3)
    _, returns, mask = score_returns(scored)
    assert returns[mask > 0].tolist() == [3, 3, 2, 7, 7, 7, 4, 4, 1, 1, 1]


def test_rollout_lines_and_metrics_report_how_conversations_ended():
    limited = row((2, 4, 1.0), (6, 7, 2.0), length=9, truncated="environment.max_turns")
    scored = scored_of(limited, limited, row(length=2, error="died"), ROWS[1])
    metrics = text_metrics(scored)
    by_hand = {"turns": 1.5, "truncated": 0.5, "failed_environments": 0.25, "reward_environment": 10 / 3}
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand)
    batch = batch_of(scored, "grpo")
    dropped = scored_of(row(length=2, error="died"), replace(ROWS[0], restarts=3), row(length=2, error="died"), ROWS[1])
    metrics = rollout_metrics(groups_of(scored), batch, dropped=groups_of(dropped), kl_coef=0.0)
    by_hand |= {"failed_environments": 3 / 8, "restarted_environments": 3 / 8, "masked_samples": 3}
    by_hand["reward_environment_missing"] = 3
    assert {name: metrics[f"train_rollouts/{name}"] for name in by_hand} == pytest.approx(by_hand)
    lines = read_texts(scored, TOKENIZER)
    assert (lines[0]["turn_rewards"], lines[0]["turn_values"]) == ([1.0, 2.0], pytest.approx([0.15, 0.5]))
    assert (lines[0]["truncated"], lines[2]["error"], lines[2]["reward"]) == ("environment.max_turns", "died", None)


def test_rollout_line_has_the_turns_of_all_rows_of_its_conversation():
    """The first row's prompt, and the turns of both; the other conversation has its own alone."""

    def named(each, text):
        return replace(each, messages=(assistant(text),), prompt=replace(each.prompt, text=text))

    scored = scored_of(named(ROWS[0], "alone"), (named(SECOND[0], "first"), named(SECOND[1], "later")))
    alone, both = read_texts(scored, TOKENIZER)
    assert (alone["prompt"], alone["turn_rewards"], len(alone["turns"])) == ("alone", [1.0, 2.0], 1)
    assert (both["prompt"], both["turn_rewards"]) == ("first", [3.0, 0.0, 4.0])
    assert [message["content"] for message in both["turns"]] == ["first", "later"]
    assert both["turn_values"] == pytest.approx([0.2, 0.1, 0.4])
    lines = samples(Validation(scored, None, None), "after", TOKENIZER)
    assert [line["turn_rewards"] for line in lines] == [[1.0, 2.0], [3.0, 0.0, 4.0]]


def test_truncated_conversations_are_masked_bootstrapped_or_scored_as_configured():
    limited = row((2, 4, 1.0), (6, 7, 2.0), length=9, truncated="environment.max_turns")
    other = row((2, 4, 0.5), length=4, truncated="environment.max_turns")
    scored = scored_of((other, limited), ROWS[1])
    settings = {"responses_per_prompt": 1, "mask_unfinished": True, "gamma": 0.5, "lam": 1.0}
    masked, kept, more = (
        batch_of(scored, "ppo", truncated=each, **settings) for each in ("mask", "score", "bootstrap")
    )
    assert masked.mask.any(-1).tolist() == [False, False, True]
    assert kept.policy_weights.any(-1).tolist() == [True] * 3
    gain = more.returns - kept.returns  # 0.5 times V of token 8, 0.8, at the last turn; halved with each token before
    assert gain[1, [5, 2, 1]].tolist() == pytest.approx([0.4, 0.2, 0.1], abs=1e-6)
    assert gain[0, [2, 1]].tolist() == pytest.approx([0.05, 0.025], abs=1e-6)
    assert not gain[2].any()
    assert not batch_of(scored_of(limited), "ppo", truncated="mask", **settings).mask.any()


@pytest.mark.parametrize(
    ("truncated", "mask_unfinished", "differs"), [("score", True, True), ("mask", True, False), ("mask", False, False)]
)
def test_group_spread_uses_only_trained_scores(truncated, mask_unfinished, differs):
    """Two conversations ended with a score of 1, two reached a limit with a score of 0."""
    limited = row((2, 4, 0.0), length=6, truncated="environment.max_turns")
    scored = scored_of(*[row((2, 4, 1.0), length=6)] * 2, limited, limited)
    given = {"name": "grpo", "responses_per_prompt": 4, "mask_unfinished": mask_unfinished}
    settings = actor_section(algorithm=given, rollout_size=4).algorithm
    (group,) = groups_of(scored, 4)
    assert has_spread(group, settings, truncated) == differs


@pytest.mark.parametrize(
    ("steps", "differs"),
    [([(1.0, 0.0), (0.0, 1.0)], True), ([(0.2, 0.9), (0.2, 0.3)], True), ([(0.5, 0.5), (0.5, 0.5)], False)],
)
def test_group_spread_compares_process_rewards(steps, differs):
    """A response's score is the smallest reward of a step."""
    ends = np.array([False, True, True])
    scores = [Score(reward=min(each), steps=np.array([0.0, *each], np.float32), ends=ends) for each in steps]
    (group,) = groups_of([(a_sample([1, 1], score=score),) for score in scores], 2)
    settings = actor_section(algorithm={"name": "grpo", "responses_per_prompt": 2}, rollout_size=2).algorithm
    assert has_spread(group, settings, "score") == differs


# ---- what is read of a reply: its special tokens mean something ----

THOUGHTS = tokenizer_of()
THOUGHTS.add_tokens([AddedToken(f"<{name}>", special=True) for name in ("think", "/think", "tool_call", "/tool_call")])


def test_reply_keeps_its_special_tokens_for_rewards_environments_and_reports(agents):
    """Functions, environments, parsers of tool calls and reports; none gets the end of the turn."""
    call = '{"name": "look", "arguments": {"at": "it"}}'
    text = f"<think>Hm.</think>a<tool_call>{call}</tool_call>"
    tokens = [*THOUGHTS(text, add_special_tokens=False)["input_ids"], EOS]
    assert len({*tokens} & {*THOUGHTS.added_tokens_decoder}) == 5
    (found,) = Chat(THOUGHTS).parse_calls([], tokens)
    assert (found.name, found.arguments) == ("look", {"at": "it"})
    prompt = Prompt("1", "Play.", np.array(THOUGHTS("Play.")["input_ids"]))
    sample = row_of_response(prompt, PolicyTurn(tokens, ended=True))
    assert read_texts([(sample,)], THOUGHTS)[0]["response"] == text
    scorer = Scorer(None, THOUGHTS)
    scorer.reward = ServedModel(components=("a",), weights=(1.0,))
    assert scorer.text_inputs([sample])[0] == [{"prompt": "Play.", "response": text}]
    said = talk(agents("Countdown", THOUGHTS), [text, text], tokenizer=THOUGHTS)[0]
    assert [message["content"] for message in said.messages] == [text, f"1 left after {text}", text]
