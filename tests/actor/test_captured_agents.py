"""Tests of agents that call the policy over HTTP: the decoder samples every call, every conversation becomes a row."""

import string
from dataclasses import replace
from pathlib import Path

import pytest
from decoded_responses import one_response
from generated_conversations import BANNED, EOS, TOKENIZER, generated_rows, prompts_of, sampled_of

from rlhf_triton.actor.capture.agents import CapturedAgents
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.rollout_rows import Score
from rlhf_triton.actor.environments.pool import Environments
from rlhf_triton.actor.generation.conversations import ConversationRows, ConversationSource
from rlhf_triton.actor.generation.row_sources import ROW_STEP, SamplingJob, uniform_draws
from rlhf_triton.actor.generation.slots import Decoder, SamplingSettings
from rlhf_triton.actor.run.validation import read_texts
from rlhf_triton.actor.scoring.row_metadata import row_metadata
from rlhf_triton.actor.scoring.row_texts import RowText
from rlhf_triton.checkpoints.special_tokens import reply_text
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import RlhfError

AGENTS = Path(__file__).parents[1] / "support" / "agents.py"


@pytest.fixture
def agents():
    begun = []

    def begin(name, **settings):
        names = ("stop_strings", "min_new_tokens", "vocab_size")
        options = {"max_prompt_tokens": 100, "stop_strings": ["\n"]}
        options |= {option: settings.pop(option) for option in names if option in settings}
        section = EnvironmentSection.model_validate({"agent": f"{AGENTS}:{name}", "max_tokens": 300, **settings})
        begun.append(CapturedAgents(section, TOKENIZER, **options))
        return begun[-1]

    yield begin
    for agent in begun:
        agent.close()


def conversations(model, agent, count, *given, **settings):
    found = generated_rows(model, agent, prompts_of(count), *given, **settings)
    assert not agent._sessions._open
    return found


def ends(*arguments, **settings):
    """Return the last row of each of the `conversations`."""
    return [rows[-1] for rows in conversations(*arguments, **settings)]


@pytest.mark.parametrize("uses_slots", [True, False])
def test_each_call_is_sampled_from_the_conversations_tokens_so_far(agents, model, uses_slots):
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = conversations(model, agents("converse", options={"turns": 3, "tools": tools}), 5, uses_slots)
    for i, rows in enumerate(found):
        row = rows[-1]
        assert row.error == ""
        assert row_metadata(ServedModel(), RowText(row.prompt, ""))["tools"] == tools
        said = [message["content"] for message in row.messages]
        assert said[1::2] == [f"More {i}." for i in range(len(said) // 2)]
        for number, turn in enumerate(row.turns, 1):
            decoder = Decoder(model, SamplingSettings(max_new_tokens=8, eos_ids=[EOS], banned_ids=BANNED), slots=1)
            draws = uniform_draws(3, i + number * ROW_STEP)
            given = one_response(decoder, row.tokens[: turn.start], draws, 8)
            assert row.tokens[turn.start : turn.end].tolist() == given
        last = row.turns[-1]
        assert last.reward == len(said[-1]) or len(rows) > 1
    assert {len(rows[-1].turns) for rows in found} == {3}


def test_calls_with_an_edited_context_become_further_rows_of_the_conversation(agents, model):
    """Three rows: the plan, and two that share a reply, which is trained once; more rows than slots at once."""
    for i, rows in enumerate(conversations(model, agents("in_two_contexts"), 6)):
        assert len(rows) == 3
        assert rows[-1].messages[-2]["content"] == "right"
        assert rows[-1].turns[-1].reward == 1.5
        assert sorted(turn.number for row in rows for turn in row.turns) == [0, 1, 2, 3]
        assert max(turn.number for turn in rows[-1].turns) == 3, "the last call is not the conversation's last turn"
        for row in rows:
            assert sampled_of(row) == [token for turn in row.turns for token in row.tokens[turn.start : turn.end]]
        turns = read_texts([tuple(replace(row, score=Score()) for row in rows)], TOKENIZER)[0]["turns"]
        assert sum(message["role"] == "assistant" for message in turns) == 4
        users = [message["content"] for message in turns if message["role"] == "user"]
        assert users == ["Play." * (i % 3), "left", "right"]  # behind the plan's prompt and reply


@pytest.mark.parametrize(
    ("name", "settings", "error", "truncated"),
    [
        ("failing", {"max_new_tokens": 1}, "ValueError: lost the way (agents.py:", ""),
        ("failing", {}, "ValueError: lost the way (agents.py:", ""),
        ("wrong", {}, "the reward is 'good'; return a finite number or None", ""),
        ("idle", {}, "ended without a reply from the policy", ""),
        ("converse", {"max_turns": 1}, "", "environment.max_turns"),
        ("converse", {"max_tokens": 40}, "", "environment.max_tokens"),
        ("lingering", {"timeout_s": 3}, "", "environment.timeout_s"),
        ("asleep", {"timeout_s": 1}, "took longer than 1 s", ""),
        ("stopping", {"options": {"stop": "\n"}}, "", ""),
        ("stopping", {"options": {"stop": "\n"}, "vocab_size": 10}, "outside the policy's 10 embeddings", ""),
        ("stopping", {"options": {"stop": "x"}}, "stop: ['x'] must be in actor.generation.stop_strings", ""),
    ],
)
def test_agent_failures_and_limits_end_the_conversation_with_the_cause(agents, model, name, settings, error, truncated):
    generation = {key: settings[key] for key in settings if key == "max_new_tokens"}
    agent = agents(name, **{key: value for key, value in settings.items() if key not in generation})
    (found,) = ends(model, agent, 1, **generation)
    assert (found.truncated, bool(found.error), found.restarts) == (truncated, bool(error), 0)
    assert error in found.error
    assert found.ended == (not error and not truncated)


def test_agent_gets_no_further_reply_after_a_reply_fails_to_sample(agents, model, monkeypatch):
    """Its conversation is a failure, although the agent returns a reward; a retry would hold up the step again."""
    calls = []

    async def late(source, row, tokens):
        calls.append(row)
        return PolicyTurn([], ended=False, error="vLLM did not respond")

    monkeypatch.setattr(ConversationSource, "sample_turn", late)
    (found,) = ends(model, agents("stubborn"), 1)
    assert found.error == "vLLM did not respond"
    assert len(calls) == 1


@pytest.mark.timeout(120)
def test_closing_a_generation_frees_the_slots_of_its_agents(agents, model, monkeypatch):
    """The pool has a single slot, as when memory is short; the other agents restart in it."""
    monkeypatch.setattr("rlhf_triton.actor.generation.conversations.MAX_INSTANCES", 1)
    agent = agents("converse")
    source = ConversationSource(agent)
    source.add(SamplingJob({0: prompts_of(1)[0]}, lambda *_: None, seed=0))
    assert source.next_rows(wait=True)
    source.close()
    (found,) = ends(model, agent, 1)
    assert (len(found.turns), found.error) == (2, "")


@pytest.mark.timeout(120)
def test_conversation_continues_after_the_agent_closes_a_connection(agents, model):
    for response in ends(model, agents("impatient"), 2, generation_batch_size=2):
        assert (len(response.turns), response.error) == (2, "")


def test_time_limit_begins_once_a_worker_has_taken_the_agent(agents, model, monkeypatch):
    """A worker that has to be started takes seconds, which are not the agent's."""
    begin = Environments.open
    clock = ConversationRows.clock
    started = []

    async def slowly(environments, row):
        instance = await begin(environments, row)
        started.append(row)
        return instance

    monkeypatch.setattr(Environments, "open", slowly)
    monkeypatch.setattr(ConversationRows, "clock", lambda rows: clock(rows) + 1000 * len(started))
    (found,) = ends(model, agents("converse"), 1)
    assert (len(found.turns), found.truncated, found.error) == (2, "", "")


def test_stop_strings_within_the_first_tokens_do_not_shorten_a_reply(agents, model):
    letters = [*string.ascii_letters]
    agent = agents("stopping", options={"stop": letters}, stop_strings=letters, min_new_tokens=8)
    for row in ends(model, agent, 3, min_new_tokens=8):
        said = row.messages[-1]["content"]
        assert said == reply_text(TOKENIZER, sampled_of(row))
        assert any(letter in said for letter in letters)


def test_reward_posted_for_a_call_is_assigned_to_its_turn(agents, model):
    (found,) = ends(model, agents("rewarding"), 1)
    assert [turn.reward for turn in found.turns] == [0.25, 0.0]


def test_an_agent_that_cannot_be_imported_or_called_is_refused(agents):
    with pytest.raises(RlhfError, match=r"environment.agent .*agents.py:absent"):
        agents("absent")
    with pytest.raises(RlhfError, match="unexpected keyword argument 'colour'"):
        agents("converse", options={"colour": 1})
