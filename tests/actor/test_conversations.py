"""Conversations with environments: the tokens of every engine, what ends them, their rewards, and what they train."""

import asyncio
import copy
import string
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TEXTS
from random_models import random_llama
from tiny_tokenizers import make_text_tokenizer
from tokenizers import AddedToken

from rlhf_triton.actor.algorithms import batch as batches
from rlhf_triton.actor.algorithms.batch import (
    rollout_metrics,
    score_returns,
    sequence_kl,
    text_metrics,
    with_limits,
)
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.chat import ASKED, Chat, HistoryChanged, TemplateError
from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout import PPOBatch, Prompt, Rollout, ScoredRollout, Scores, Trajectory, join_rollouts
from rlhf_triton.actor.generation import conversations
from rlhf_triton.actor.generation.conversations import ROW_STEP, Agent, Talks, seed_of
from rlhf_triton.actor.generation.engine import Generation, uniform_draws
from rlhf_triton.actor.generation.slots import Decoder, Response, Rules
from rlhf_triton.actor.policy.policy import row_of
from rlhf_triton.actor.run.collection import all_rows, by_spread, group_metrics, join_scored, with_others
from rlhf_triton.actor.run.validation import Validation, _measured, read_texts, samples, turn_tokens
from rlhf_triton.actor.scoring.environment import scores_of_others, with_environment
from rlhf_triton.actor.scoring.scorer import Scorer, row_metadata
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.rewards.function import Sample, load_function
from tests.actor.test_generation import one_response
from tests.support.messages import assistant, user
from tests.support.scored_rollout import make_batch, method_of
from tests.support.settings import actor_section

CLASSES = Path(__file__).parents[1] / "support" / "environment_classes.py"
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = make_text_tokenizer(
    "qwen2",
    [*TEXTS, string.printable],
    chat_template=CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>\n\n')[-1] }}"
    ),
    model_max_length=512,
)
TOKENIZER = make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=CHATML, model_max_length=512)
EOS = TOKENIZER.eos_token_id
BANNED = [token for token in TOKENIZER.all_special_ids if token != EOS]


def asked(text: str = "Play.", **columns: Any) -> Prompt:
    """A chat that begins with this text."""
    return Prompt("7", "", np.zeros(0, np.int64), {"messages": [user(text)], **columns})


PROMPT = asked(turns=2)


def section(name: str, **settings: Any) -> EnvironmentSection:
    return EnvironmentSection.model_validate({"class": f"{CLASSES}:{name}", "max_tokens": 200, **settings})


@pytest.fixture
def agents() -> Iterator[Callable[..., Agent]]:
    begun: list[Agent] = []

    def begin(name: str, tokenizer: Any = TOKENIZER, vocab_size: int | None = None, **settings: Any) -> Agent:
        begun.append(Agent(section(name, **settings), tokenizer, max_prompt_tokens=100, vocab_size=vocab_size))
        return begun[-1]

    yield begin
    for agent in begun:
        agent.close()


def ids(text: str, tokenizer: Any = TOKENIZER) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def talk(
    agent: Agent, replies: Sequence[str], prompt: Prompt = PROMPT, ends: bool = True, tokenizer: Any = TOKENIZER
) -> tuple[Response, list[int]]:
    """Lead a conversation with a policy that says `replies`; return it, and the tokens that it has seen before each."""
    left, seen = [*replies], list[Sequence[int]]()

    class Scripted:
        clock = staticmethod(time.monotonic)

        async def sampled(self, before: Sequence[int]) -> Response:
            seen.append(before)
            reply = ids(left.pop(0), tokenizer) + [EOS] * ends
            return Response(reply, ends, [-1.0] * len(reply))

        def renew(self) -> None:
            seen.clear()

    found = asyncio.run_coroutine_threadsafe(agent.talk(prompt, 5, Scripted()), agent.loop).result()
    return found, [token for part in seen for token in part]


def sampled_of(response: Response) -> list[int]:
    return [token for token, is_theirs in zip(response.tokens, response.observed, strict=True) if not is_theirs]


# ---- one conversation, with a scripted policy ----


def test_a_conversation_reads_as_the_template_would_render_it(agents: Callable[..., Agent]):
    found, _ = talk(agents("Countdown"), ["one", "two", "three"])
    text = TOKENIZER.decode([*found.prompt.tokens, *found.tokens])
    messages = [
        user("Play. 2 left, seed 5."),
        assistant("one"),
        user("1 left after one"),
        assistant("two"),
    ]
    assert text + "\n" == TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert sampled_of(found) == [*ids("one"), EOS, *ids("two"), EOS]
    assert [turn.reward for turn in found.trajectory.turns] == [0.5, 2.0]
    for turn, reply in zip(found.trajectory.turns, ("one", "two"), strict=True):
        row = [*found.prompt.tokens, *found.tokens]
        assert row[turn.start : turn.end] == [*ids(reply), EOS]
    assert (found.ended, found.trajectory.truncated, found.trajectory.error) == (True, "", "")
    assert [*found.trajectory.messages] == messages[1:]
    assert found.logprobs == [0.0 if is_theirs else -1.0 for is_theirs in found.observed]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_turns": 2}, "environment.max_turns"),
        ({"max_tokens": 60}, "environment.max_tokens"),
        ({"timeout_s": 1e-9}, "environment.timeout_s"),
    ],
)
def test_limits_end_it_and_say_so(agents: Callable[..., Agent], settings: dict[str, Any], limit: str):
    prompt = asked(turns=50)
    found, _ = talk(agents("Countdown", **settings), ["again"] * 50, prompt)
    assert (found.trajectory.truncated, found.ended, found.trajectory.error) == (limit, False, "")
    assert len(found.prompt.tokens) + len(found.tokens) <= settings.get("max_tokens", 200)
    assert not found.observed[-1]


def test_a_turn_without_an_end_is_the_last(agents: Callable[..., Agent]):
    found, _ = talk(agents("Countdown"), ["one", "two"], ends=False)
    assert (found.trajectory.truncated, len(found.trajectory.turns)) == ("actor.generation.max_new_tokens", 1)


@pytest.mark.parametrize(("turns", "num_turns"), [(-1, 0), (-2, 1)])
def test_a_failure_is_recorded_and_nothing_is_invented(agents: Callable[..., Agent], turns: int, num_turns: int):
    agent = agents("Countdown")
    found, _ = talk(agent, ["one", "two"], asked(turns=turns))
    assert (len(found.trajectory.turns), found.ended) == (num_turns, False)
    assert f"ValueError: {turns} turns (environment_classes.py:" in found.trajectory.error
    assert talk(agent, ["one", "two"])[0].ended


def test_tools_are_called_in_the_templates_format(agents: Callable[..., Agent]):
    """TRL's own example, and a policy that calls it rightly and wrongly."""
    prompt = asked("")
    call = '<tool_call>{"name": "increment", "arguments": {"step": %s}}</tool_call>'
    replies = [call % 2, call % '"x', "<tool_call>[]</tool_call>", call % 1 + call % 1, "Done."]
    agent = agents("IncrementEnv", max_tokens=2000)
    found, _ = talk(agent, replies, prompt)
    assert row_metadata(ServedModel(), found.prompt, "Done.", 0)["tools"] == agent._chat.tools
    assert found.prompt.text.startswith("<|im_start|>system\nincrement<|im_end|>")
    said = [message["content"] for message in found.trajectory.messages if message["role"] == "tool"]
    assert (said[0], said[3:]) == ("2", ["3", "4"])
    assert "not valid JSON" in said[1]
    assert '"name"' in said[2]
    assert found.ended
    assert [turn.reward for turn in found.trajectory.turns[:-1]] == [0.0] * 4
    assert found.trajectory.turns[-1].reward == (int(found.prompt.text.split("counter by ")[1][0]) == 4)


@pytest.mark.parametrize("name", ['"\\ud800", "arguments": {}', '"look", "arguments": {"at": NaN}', "[" * 5000])
def test_a_call_that_has_no_encoding_is_answered(agents: Callable[..., Agent], name: str):
    prompt = asked("")
    found, _ = talk(agents("IncrementEnv", max_tokens=9000), [f'<tool_call>{{"name": {name}}}</tool_call>', ""], prompt)
    assert found.trajectory.messages[1]["content"].startswith("the tool call ")
    assert found.ended


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        ("{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' else '' }}{{ m.content }}", True),
        ("{{ m.content.split('</think>\n\n')[-1] if m.role == 'assistant' and not loop.last else m.content }}", False),
    ],
)
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_what_follows_a_reply_is_the_templates(template: str, keeps: bool, opening: str):
    """Qwen3 adds an empty thought to a last reply; Qwen3.5 begins replies with a thought, which R1 forgets."""
    text = CHATML.replace("{{ m.content }}", template).replace("assistant\n{% endif", f"assistant\n{opening}{{% endif")
    chat = Chat(make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=text, model_max_length=512))
    said, more = [user("Hi.")], [user("Go on.")]
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


def test_a_space_before_a_reply_changes_no_history():
    """Llama 2's and Mistral's templates write one."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    chat = Chat(make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=template, model_max_length=512))
    chat.check()
    assert chat.tokenizer.decode(chat.after_reply([ASKED], EOS, "Yes.")) == f"[INST] {ASKED['content']} [/INST]"


def test_tools_that_the_policy_would_not_see_are_named(agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture):
    agent, chats = agents("IncrementEnv"), [replace(PROMPT, metadata={"messages": [{"role": "user"}]})]
    agent.check_prompts(chats)
    assert not caplog.records
    for seen, unseen in (
        ("{% if tools %}", "{% if false %}"),
        ("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"),
    ):
        template = CHATML.replace(seen, unseen)
        made = make_text_tokenizer("qwen2", TEXTS, chat_template=template, model_max_length=512)
        agent._chat = Chat(made, agent._chat.tools)
        if "tool" in unseen:
            with pytest.raises(TemplateError, match="leaves out the role 'tool'"):
                agent.check_prompts(chats)
        else:
            agent.check_prompts(chats)
            found, _ = talk(agent, ["Done."], replace(PROMPT, metadata={"messages": [ASKED]}))
            assert "tools" not in found.prompt.metadata, "a reward model would read what the policy does not"
    agent.check_prompts([Prompt("0", "Count.", np.array([5]))])
    assert ["chat template" in record.message for record in caplog.records] == [True, False]


def test_tools_are_called_in_the_format_of_the_tokenizers_template(agents: Callable[..., Agent]):
    """Qwen3.5's and GLM's kind, which the tokenizer describes to transformers."""
    tokenizer = make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=CHATML, model_max_length=512)
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
    said = [message["content"] for message in found.trajectory.messages if message["role"] == "tool"]
    assert said[0] == "2"
    assert "there is no tool fly; the tools: increment" in said[1]
    assert found.ended


def test_texts_without_roles_are_joined(agents: Callable[..., Agent]):
    prompt = Prompt("1", "Play.", np.array(ids("Play.")), {"turns": 2})
    found, _ = talk(agents("Countdown"), ["one", "two"], prompt)
    text = TOKENIZER.decode([*found.prompt.tokens, *found.tokens])
    assert text == "Play. 2 left, seed 5.one<|im_end|>1 left after onetwo<|im_end|>"


def test_a_template_that_cannot_render_a_conversation_is_refused(agents: Callable[..., Agent]):
    tokenizer = make_text_tokenizer("qwen2", chat_template="{{ raise }}{{ 1 / 0 }}")
    agent = agents("Countdown", tokenizer)
    agent.check_prompts([Prompt("1", "a text", np.array([5]))])
    with pytest.raises(TemplateError, match="chat template"):
        agent.check_prompts([PROMPT])


def test_a_template_that_removes_thoughts_begins_another_row(
    agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture
):
    agent = agents("Countdown", FORGETFUL)
    prompt = asked(turns=4)
    agent.check_prompts([prompt])
    assert not caplog.records
    thought = "<think>\nHm.\n</think>\n\n"
    found, seen = talk(agent, ["one", f"{thought}two", "three", f"{thought}four"], prompt)
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
    assert [*found.trajectory.messages] == messages[1:]
    (first,) = found.others
    for row, until, given in ((first, 4, 1), (found, 8, 5)):
        text = FORGETFUL.decode([*row.prompt.tokens, *row.tokens])
        assert text + "\n" == FORGETFUL.apply_chat_template(messages[:until], tokenize=False)
        assert len(row.trajectory.turns) == 2
        assert row.prompt.metadata["messages"] == messages[:given]
    theirs = [token for token, is_theirs in zip(found.tokens, found.observed, strict=True) if is_theirs]
    assert seen == [*found.prompt.tokens, *theirs]
    assert (first.trajectory.later, found.trajectory.later) == (0.5 + 2.0, 0.0)
    left_out, another = caplog.messages
    assert "leaves out the reasoning in contents" in left_out
    assert "thoughts" in another
    assert "another sample of the same group" in another


@pytest.mark.parametrize(("tokenizer", "num_rows"), [(TOKENIZER, 1), (FORGETFUL, 2)])
def test_functions_receive_the_messages_of_a_conversation(agents: Callable[..., Agent], tokenizer: Any, num_rows: int):
    """From the first reply on, also where the template has begun another row; of prompts without roles, the text."""
    replies = ["one", "<think>\nHm.\n</think>\n\ntwo", "three"]
    plain = Prompt("1", "Play.", np.array(ids("Play.")), {"turns": 3})
    found = [talk(agents("Countdown", tokenizer), replies, each)[0] for each in (asked(turns=3), plain)]
    assert len(found[0].others) == num_rows - 1
    rollout = join_rollouts([row_of(each.prompt, each) for each in found], 0)
    scorer = Scorer(None, tokenizer, rows_per_request=1)
    scorer.reward = ServedModel(components=("a",))
    scorer.sends_sentences = True
    (chat, text), sentences, _ = scorer._texts(rollout, range(2), 1)
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
    ends = scorer._on_tokens(rollout, range(1), {"step_ends": np.array([[3, 5]])})["step_ends"][0]
    assert ends.tolist() == [rollout.trajectories[0].turns[-1].start + 2, int(rollout.lengths[0]) - 1]
    echo = load_function(f"{CLASSES.with_name('trl_functions.py')}:echo")
    for metadata, prompt, said in (
        (chat, [user("Play. 3 left, seed 5.")], completion),
        (text, "Play. 3 left, seed 5.", "".join(message["content"] for message in completion)),
    ):
        expected = {"prompts": [prompt], "completions": [said], "turns": [3]}
        assert echo(Sample("", metadata={**metadata, "expected": expected})) == 1


def test_another_end_than_the_templates_is_completed():
    chat = Chat(TOKENIZER)
    answer = [user("b")]
    rest = ids("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert chat.after_reply(answer, EOS) == rest
    assert chat.after_reply(answer, ids("!")[-1]) == [EOS, *rest]
    assert chat.after_reply(answer, ids("<")[-1]) == [EOS, *rest]


@pytest.mark.parametrize(("first", "turns"), [("<|extra|>", 0), ("hello", 1)])
def test_a_token_without_embedding_fails_its_conversation(agents: Callable[..., Agent], first: str, turns: int):
    """In the first observation, or in the answer to a turn, which is its text."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    agent = agents("Doing", tokenizer, vocab_size=len(TOKENIZER), options={"first": first})
    done: dict[int, Response] = {}
    talks = agent.begin({0: PROMPT}, lambda index, found: done.update({index: found}), seed=1)
    while not done:
        for row, before in talks.next(wait=True):
            if before is not None:
                reply = [*ids("<|extra|>"), EOS]
                talks.take(row, Response(reply, True, [-1.0] * len(reply)))
    found = done[0].trajectory
    assert (len(found.turns), found.truncated) == (turns, "")
    assert "token 160 ('<|extra|>') is outside the policy's 160 embeddings" in found.error


# ---- a model's conversations, by every engine ----


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights whose replies end by themselves now and then."""
    made = random_llama("policy", seed=1, vocab_size=160, max_position_embeddings=512, initializer_range=0.3).eval()
    bias = 6.0 * torch.nn.functional.one_hot(torch.tensor(EOS), 160)
    made.lm_head.register_forward_hook(lambda _, __, logits: logits + bias)
    return made


def prompts_of(count: int) -> list[Prompt]:
    said = [user("Play." * (i % 3)) for i in range(count)]
    return [Prompt(str(i), "", np.array([5]), {"messages": [said[i]], "turns": 1 + i % 4}) for i in range(count)]


def generated(model: Any, agent: Agent | None, prompts: list[Prompt], **settings: Any) -> Rollout:
    given = {"max_new_tokens": 8, "generation_batch_size": 3, **settings}
    engine = Generation(model, TOKENIZER, actor_section(**given).generation, eos_ids=[EOS], pad_id=0, banned_ids=BANNED)
    engine.agent = agent
    rows: dict[int, Rollout] = {}
    engine.run(
        prompts,
        lambda i, response: rows.update({i: row_of(response.prompt or prompts[i], response)}),
        seed=3,
        greedy=bool(settings.get("greedy")),
    )
    return join_rollouts([rows[i] for i in range(len(prompts))], 0)


def unscored(whole: Rollout) -> Scores:
    nothing = torch.zeros(whole.tokens.shape)
    return Scores(nothing[:, 0], nothing, torch.full((len(nothing),), -1), torch.ones(len(nothing)).bool(), [])


@pytest.mark.parametrize("engine", ["slots", "transformers"])
def test_every_engine_samples_each_turn_from_the_whole_row(agents: Callable[..., Agent], model: Any, engine: str):
    whole = generated(model, agents("Countdown"), prompts_of(9), engine=engine)
    assert {trajectory.truncated for trajectory in whole.trajectories} == {"", "actor.generation.max_new_tokens"}
    assert max(len(trajectory.turns) for trajectory in whole.trajectories) > 2
    for i, (row, trajectory) in enumerate(zip(whole.rows(), whole.trajectories, strict=True)):
        draws = uniform_draws(3, i)
        for turn in trajectory.turns:
            decoder = Decoder(model, Rules(8, [EOS], BANNED), slots=1)
            assert row[turn.start : turn.end].tolist() == one_response(decoder, row[: turn.start], draws, 8)
        inside = torch.zeros(len(row), dtype=torch.bool)
        for turn in trajectory.turns:
            inside[turn.start : turn.end] = True
        assert torch.equal(whole.mask[i, : len(row) - 1] > 0, inside[1:])
    if engine == "slots":
        assert not whole.logprobs[whole.mask == 0].any()
    else:
        assert whole.logprobs is None


@pytest.mark.parametrize(
    ("engine", "in_step", "slots"),
    [("slots", False, 3), ("slots", True, 2), ("slots", True, 9), ("transformers", True, 3)],
)
def test_every_row_of_a_conversation_is_sampled_by_itself(
    agents: Callable[..., Agent], model: Any, engine: str, in_step: bool, slots: int
):
    """A template that writes every reply anew, so that each turn begins a row, with draws of its own."""
    said = "{{ '-' if m.role == 'assistant' and not loop.last else m.content }}"
    tokenizer = make_text_tokenizer(
        "qwen2", [*TEXTS, string.printable], chat_template=CHATML.replace("{{ m.content }}", said), model_max_length=512
    )
    agent, prompts, found = agents("Countdown", tokenizer), prompts_of(9), dict[int, Response]()
    agent.in_step = in_step
    actor = actor_section(max_new_tokens=8, generation_batch_size=slots, engine=engine)
    generation = Generation(model, tokenizer, actor.generation, eos_ids=[EOS], pad_id=0, banned_ids=BANNED)
    generation.agent = agent
    generation.run(prompts, lambda i, response: found.update({i: response}), seed=3)
    assert sorted(found) == [*range(9)]
    assert max(len(response.others) for response in found.values()) > 1
    for i, response in found.items():
        for number, row in enumerate((*response.others, response)):
            decoder = Decoder(model, Rules(8, [EOS], BANNED), slots=1)
            draws = uniform_draws(3, i + number * ROW_STEP)
            assert row.tokens == one_response(decoder, row.prompt.tokens, draws, 8)
            assert (row.logprobs is None) == (engine == "transformers")


def test_a_conversation_has_no_time_limit_while_the_policy_is_busy(
    agents: Callable[..., Agent], model: Any, monkeypatch: pytest.MonkeyPatch
):
    now, sampled = [0.0], Talks.sampled

    async def slowly(talks: Talks, row: int, before: Sequence[int]) -> Response:
        turn = await sampled(talks, row, before)
        now[0] += 1000
        return turn

    monkeypatch.setattr(Talks, "sampled", slowly)
    monkeypatch.setattr(conversations, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    whole = generated(model, agents("Countdown", timeout_s=500), prompts_of(4)[2:3], max_new_tokens=50)
    assert (len(whole.trajectories[0].turns), whole.trajectories[0].truncated) == (3, "")


@pytest.mark.timeout(120)
def test_conversations_in_step_keep_their_place_when_they_begin_again(agents: Callable[..., Agent], model: Any):
    agent = agents("Fragile", options={"losses": 2}, concurrent=1)
    agent.in_step = True
    whole = generated(model, agent, prompts_of(3))
    assert [trajectory.error for trajectory in whole.trajectories] == [""] * 3


@pytest.mark.timeout(120)
def test_conversations_in_step_do_not_await_those_that_have_no_room(agents: Callable[..., Agent], model: Any):
    agent = agents("Countdown", concurrent=2)
    agent.in_step = True
    one = generated(model, agent, prompts_of(5))
    assert all(trajectory.turns for trajectory in one.trajectories)
    assert torch.equal(one.tokens, generated(model, agent, prompts_of(5)).tokens)


def test_the_same_seed_gives_the_same_conversations(agents: Callable[..., Agent], model: Any):
    agent, prompts = agents("Countdown", workers=2), prompts_of(9)
    one, two = generated(model, agent, prompts), generated(model, agent, prompts, generation_batch_size=9)
    assert torch.equal(one.tokens, two.tokens)
    assert seed_of(3, prompts[0]) == seed_of(3, replace(prompts[0], text="x")) != seed_of(4, prompts[0])
    assert seed_of(3, prompts[0]) != seed_of(3, prompts[1])


def test_a_failing_environment_costs_its_own_rows(agents: Callable[..., Agent], model: Any):
    prompts = prompts_of(6)
    for i, turns in ((1, -1), (4, -2)):
        prompts[i] = replace(prompts[i], metadata={**prompts[i].metadata, "turns": turns})
    whole = generated(model, agents("Countdown"), prompts)
    assert [bool(trajectory.error) for trajectory in whole.trajectories] == [i in (1, 4) for i in range(6)]
    assert int(whole.mask[1].sum()) == 0
    found = with_environment(whole, unscored(whole), 1.0)
    assert found.scored.tolist() == [i not in (1, 4) for i in range(6)]
    assert len(found.failures) == 2
    assert torch.isnan(found.components["environment"][[1, 4]]).all()


@pytest.mark.parametrize(("losses", "failed"), [(4, 0), (1000, 6)])
def test_a_conversation_whose_environment_is_lost_begins_again(
    agents: Callable[..., Agent], model: Any, losses: int, failed: int
):
    whole = generated(model, agents("Fragile", options={"losses": losses}, restarts=4), prompts_of(6))
    assert sum(bool(each.error) for each in whole.trajectories) == failed
    assert sum(each.restarts for each in whole.trajectories) == (4 * 6 if failed else losses)
    assert whole.exact_turns == 1.0
    assert text_metrics(whole, unscored(whole))["restarted_environments"] == (4 if failed else losses / 6)


def test_closing_ends_a_generation_that_waits(agents: Callable[..., Agent], model: Any):
    agent = agents("Countdown")
    talks = agent.begin({0: prompts_of(1)[0]}, lambda *_: None, seed=0)
    assert talks.next(wait=True)[0][0] == 0
    threading.Timer(0.1, talks.close).start()
    with pytest.raises(asyncio.CancelledError):
        talks.next(wait=True)


# ---- rewards, limits and what is trained ----


def row(*turns: tuple[int, int, float], length: int, truncated: str = "", error: str = "") -> Rollout:
    """A prompt of two tokens, and these turns (first token, token after the last, reward)."""
    inside = [any(start <= token < end for start, end, _ in turns) for token in range(length)]
    response = Response(
        [9] * (length - 2),
        not truncated,
        [-1.0] * (length - 2),
        observed=[not each for each in inside[2:]],
        trajectory=Trajectory(tuple(SampledTurn(*turn) for turn in turns), (), truncated, error),
    )
    return row_of(Prompt("1", "", np.array([5, 6])), response)


def scored_of(*rows: Rollout, served: float = 0.0, weight: float = 1.0) -> ScoredRollout:
    rollout = join_rollouts(rows, 0)
    count, width = rollout.tokens.shape
    values = torch.arange(count * width).view(count, width) / 10
    versions, yes = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool)
    scores = Scores(torch.full((count,), served), values, versions, yes, [])
    logprobs = -torch.rand(count, width - 1, generator=torch.Generator().manual_seed(0))
    return ScoredRollout(rollout, with_environment(rollout, scores, weight), logprobs, None)


def batch_of(scored: ScoredRollout, name: str, **settings: Any) -> PPOBatch:
    plain = {"responses_per_prompt": 2, "rollout_size": 2, "whiten_advantages": False, "mask_unfinished": False}
    return make_batch(scored, **{"algorithm_name": name, "kl_coef": 0.0, **plain, **settings})


ROWS = row((2, 4, 1.0), (6, 7, 2.0), length=7), row((2, 3, 0.0), (5, 6, 4.0), length=6)


def test_a_turns_reward_stands_at_its_last_token():
    scored = scored_of(*ROWS, served=0.5, weight=2.0)
    assert scored.scores.rewards.tolist() == [6.5, 8.5]
    batch = batch_of(scored, "reinforce++")
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0]]
    assert batch.returns.tolist() == [[0, 6.5, 6.5, 0, 0, 4.5], [0, 8.5, 0, 0, 8.5, 0]]
    compared = batch_of(scored, "rloo")
    assert compared.advantages.tolist() == [[0, -2, -2, 0, 0, -2], [0, 2, 0, 0, 2, 0]]


@pytest.mark.parametrize(("reward", "weight"), [(3e38, 1.0), (1e39, 1.0), (1e30, 1e10)])
def test_rewards_beyond_float32_fail_their_conversation(reward: float, weight: float):
    """Alone or in sum: an infinite total would make the advantages of its whole group NaN."""
    scored = scored_of(row((2, 3, reward), (4, 5, reward), length=5), row((2, 3, 1.0), length=3), weight=weight)
    assert scored.scores.scored.tolist() == [False, True]
    assert scored.scores.rewards.tolist() == [0, weight]
    assert "beyond float32" in scored.scores.failures[0]


def with_other() -> ScoredRollout:
    """Two conversations; the second has another row, which came first: a turn with the reward 3, and 4 after it."""
    other = replace(row((2, 5, 3.0), length=5), owners=torch.tensor([1]))
    other = replace(other, trajectories=[replace(other.trajectories[0], later=4.0)])
    scored = scored_of(*ROWS, served=0.5, weight=2.0)
    values = scored_of(other).scores
    values = replace(values, values=torch.full((1, 5), 0.25), rewards=torch.zeros(1))
    main, theirs = scores_of_others(other, scored.scores, values, 2.0)
    logprobs = torch.full((1, 4), -1.0)
    return replace(scored, scores=main, others=ScoredRollout(other, theirs, logprobs, None))


def test_another_row_has_what_came_after_it():
    scored = with_other()
    assert scored.scores.rewards.tolist() == [6.5, 8.5 + 6.0]
    assert scored.scores.components["environment"].tolist() == [6.0, 14.0]
    process = scored.others.scores.process
    assert (process.rewards.tolist(), process.outcome.tolist()) == ([[0, 0, 0, 0, 14.0]], [0.5])
    lost = replace(scored.scores, scored=torch.tensor([True, False]))
    assert not scores_of_others(scored.others.rollout, lost, None, 1.0)[1].scored.any()
    chosen = join_scored([scored, scored], 0).select(torch.tensor([3, 0]))
    assert chosen.others.rollout.owners.tolist() == [0]
    assert scored.select(torch.tensor([0])).others is None


async def test_a_conversation_is_scored_whole_or_not_at_all():
    """The critic refuses the second one's first row, of two others; the first conversation has another, too."""
    rows = [replace(ROWS[1], owners=torch.tensor([owner])) for owner in (1, 1, 0)]
    scored = scored_of(*ROWS, served=0.5)
    whole = replace(scored.rollout, others=tuple(rows))

    async def values(rollout: Rollout, _: object) -> Scores:
        return replace(scored_of(*rows).scores, scored=torch.tensor([False, True, True]), failures=["no"])

    found = await with_others(
        types.SimpleNamespace(pad_id=0),  # type: ignore[arg-type]
        types.SimpleNamespace(has_critic=True, environment_weight=1.0, values=values),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        replace(scored, rollout=whole, logprobs=None),
        versions=None,
        in_thread=asyncio.to_thread,  # type: ignore[arg-type]
    )
    assert found.scores.scored.tolist() == [True, False]
    assert found.others.scores.scored.tolist() == [False, False, True]


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_all_rows_of_a_conversation_train(name: str):
    """Groups compare conversations, not rows, and their advantages are those of all of its turns."""
    scored = with_other()
    dropped = scored_of(*ROWS, served=0.5)
    batch = batch_of(all_rows(scored, [dropped], 0), name, num_dropped=2)
    alone = batch_of(scored, name)
    assert batch.groups[:3].tolist() == [0, 0, 0]
    assert not (batch.groups[3:] == 0).any()
    assert torch.equal(batch.advantages[:2], alone.advantages)
    if name == "grpo":
        assert batch.policy_weights[:3].sum(-1).tolist() == pytest.approx([1, 2 / 5, 3 / 5])
    assert torch.equal(batch.policy_weights.any(-1), torch.tensor([True, True, True, False, False]))
    mine = batch.advantages[2, 1:4]
    if name == "ppo":
        assert batch.returns[2, 3] == 14.5
        assert mine[2] == 14.25
    else:
        assert mine.tolist() == [float(batch.advantages[1].max())] * 3
        assert mine[0] > 0
    cut = batch.first(1, 6)
    assert (cut.tokens.shape, cut.mask.shape, cut.lengths.shape) == ((1, 6), (1, 5), (1,))


def test_the_divergence_of_another_row_counts_for_its_conversation():
    """The KL penalty of all rows is part of a total; normalised are the scores of conversations alone."""
    scored = with_other()
    theirs = replace(scored.others, ref_logprobs=torch.full((1, 4), -1.5))
    whole = all_rows(replace(scored, others=theirs, ref_logprobs=scored.logprobs), [], 0)
    found, plain = (batch_of(whole, "rloo", kl_coef=coef) for coef in (0.1, 0.0))
    lost = plain.advantages[1].max() - found.advantages[1].max()
    assert lost == pytest.approx(0.1 * float((found.kl * found.mask).sum()), abs=1e-5)
    assert lost > 0
    shaper = RewardShaper(actor_section(rewards={"normalization": "running"}).rewards, max_new_tokens=8)
    method = method_of(algorithm_name="rloo", responses_per_prompt=2, rollout_size=2)
    batches.make_batch(whole, method, shaper, kl_coef=0.0, responses_per_prompt=2)
    assert shaper.moments.count == 2


def test_metrics_count_all_rows_of_the_conversations_in_the_update():
    """The third conversation has met a limit. The KL is 0.5 nats per token of the first, 1 of the second's two rows."""
    parts, limited = with_other(), row((2, 5, 1.0), length=5, truncated="environment.max_turns")
    scored = join_scored([parts, scored_of(limited)], 0)
    own = replace(scored, ref_logprobs=scored.logprobs - torch.tensor([[0.5], [1.0], [9.0]]))
    theirs = replace(scored.others, ref_logprobs=scored.others.logprobs - 1.0)
    own = replace(own, others=theirs)
    whole = all_rows(own, (), 0)
    batch = batch_of(with_limits(whole, "mask", 1.0), "ppo")
    distance = (3 * 0.5 + 2 * 1.0 + 3 * 1.0) / 2
    assert sequence_kl(whole, batch.mask) == pytest.approx(distance)
    assert sequence_kl(whole, torch.zeros_like(batch.mask)) is None
    metrics = rollout_metrics(own, whole, batch, kl_coef=0.1)
    found = {name: metrics[f"train_rollouts/{name}"] for name in ("generation_length", "init_policy_kl_per_sequence")}
    assert found == pytest.approx({"generation_length": (3 + 2 + 3 + 3) / 3, "init_policy_kl_per_sequence": distance})
    rewards = float(own.scores.rewards.mean())
    assert metrics["train_rollouts/rewards_with_kl"] == pytest.approx(rewards - 0.1 * distance, abs=1e-5)
    used = batch.mask > 0
    by_hand = 1 - (batch.rewards_to_go - batch.prev_values)[used].var() / batch.rewards_to_go[used].var()
    assert metrics["train_rollouts/explained_variance"] == pytest.approx(float(by_hand), abs=1e-5)
    assert used.sum(-1).tolist() == [3, 2, 0, 3]
    validation = _measured(own)
    assert validation.kl == pytest.approx((2 * distance + 3 * 9.0) / 3)
    returns, mask = score_returns(whole.scores, whole.rollout)
    by_hand = 1 - (whole.scores.values[:, :-1] - returns)[mask > 0].var() / returns[mask > 0].var()
    assert validation.explained_variance == pytest.approx(float(by_hand), abs=1e-5)


def test_lines_and_metrics_say_how_conversations_ended():
    limited = row((2, 4, 1.0), (6, 7, 2.0), length=9, truncated="environment.max_turns")
    scored = scored_of(limited, limited, row(length=2, error="died"), ROWS[1], weight=2.0)
    metrics = text_metrics(scored.rollout, scored.scores)
    by_hand = {"turns": 1.5, "truncated": 0.5, "failed_environments": 0.25, "reward_environment": 20 / 3}
    assert {name: metrics[name] for name in by_hand} == pytest.approx(by_hand)
    lines = read_texts(scored.rollout, scored.scores, TOKENIZER)
    assert (lines[0]["turn_rewards"], lines[0]["turn_values"]) == ([1.0, 2.0], pytest.approx([0.15, 0.5]))
    assert (lines[0]["truncated"], lines[2]["error"], lines[2]["reward"]) == ("environment.max_turns", "died", None)


def test_lines_have_the_turns_of_all_rows():
    """The first row's prompt, and the turns of both; the other conversation has its own alone."""
    whole = all_rows(with_other(), (), 0)
    trajectories = [*whole.rollout.trajectories]
    for i, text in ((0, "alone"), (1, "later"), (2, "first")):
        message = assistant(text)
        trajectories[i] = replace(trajectories[i], messages=(message,))
    prompts = [replace(prompt, text=str(i)) for i, prompt in enumerate(whole.rollout.prompts)]
    rollout = replace(whole.rollout, trajectories=trajectories, prompts=prompts)
    alone, both = read_texts(rollout, whole.scores, TOKENIZER, 2)
    assert (alone["prompt"], alone["turn_rewards"], len(alone["turns"])) == ("0", [1.0, 2.0], 1)
    assert (both["prompt"], both["turn_rewards"]) == ("2", [3.0, 0.0, 4.0])
    assert [message["content"] for message in both["turns"]] == ["first", "later"]
    values = whole.scores.values[1]
    assert both["turn_values"] == pytest.approx([0.25, float(values[1]), float(values[4])])
    batch = batch_of(replace(whole, rollout=rollout), "ppo")
    found = turn_tokens(rollout, batch, TOKENIZER, 1)
    assert [len(turn) for turn in found] == [3, 1, 1]
    assert [value for _, value, _ in found[0]] == [0.25] * 3
    assert [advantage for *_, advantage in found[0]] == batch.advantages[2, 1:4].tolist()
    validation = Validation(with_other().rollout, with_other().scores, None, None, replace(whole, rollout=rollout))
    assert [line["turn_rewards"] for line in samples(validation, "after", TOKENIZER)] == [[1.0, 2.0], [3.0, 0.0, 4.0]]


def test_limits_mask_bootstrap_or_score():
    limited = row((2, 4, 1.0), (6, 7, 2.0), length=9, truncated="environment.max_turns")
    scored = scored_of(limited, ROWS[1])
    assert with_limits(scored_of(*ROWS), "mask", 0.5).scores.scored.all()
    masked = with_limits(scored, "mask", 0.5)
    assert masked.scores.scored.tolist() == [False, True]
    kept = with_limits(scored, "score", 0.5)
    assert kept.scores.rewards.tolist() == [3.0, 4.0]
    assert kept.rollout.is_end.tolist() == [True, True]
    process = with_limits(scored, "bootstrap", 0.5).scores.process
    assert process.rewards[0].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 2 + 0.5 * 0.8, 0, 0])  # V of token 8: 0.8
    other = row((2, 4, 0.5), length=4, truncated="environment.max_turns")
    joined_rows = scored_of(ROWS[1], limited, other)
    owned = replace(joined_rows.rollout, owners=torch.tensor([0, 1, 1]))
    process = with_limits(replace(joined_rows, rollout=owned), "bootstrap", 0.5).scores.process
    tail = 0.5 * float(joined_rows.scores.values[1, 8])
    found = process.rewards[[1, 2], [6, 3]].tolist()
    assert found == pytest.approx([2 + tail, 0.5 + tail]), "of its conversation's end, not of its own"
    assert not with_limits(scored_of(limited), "mask", 0.5).scores.scored.any()


@pytest.mark.parametrize(
    ("truncated", "mask_unfinished", "differs"), [("score", True, True), ("mask", True, False), ("mask", False, False)]
)
def test_a_group_differs_in_the_scores_that_are_learned(truncated: str, mask_unfinished: bool, differs: bool):
    """Two conversations have come to their end with 1, two have met a limit at 0."""
    limited = row((2, 4, 0.0), length=6, truncated="environment.max_turns")
    scored = scored_of(*[row((2, 4, 1.0), length=6)] * 2, limited, limited)
    given = {"name": "grpo", "responses_per_prompt": 4, "mask_unfinished": mask_unfinished}
    settings = actor_section(algorithm=given, rollout_size=4).algorithm
    assert [len(part.scores.scored) for part in by_spread(scored, settings, truncated)] == [
        4 * differs,
        4 - 4 * differs,
    ]
    assert group_metrics([scored], settings, truncated, None) == {"train_rollouts/useful_prompts": float(differs)}
    more = {"responses_per_prompt": 4, "rollout_size": 4, "mask_unfinished": mask_unfinished}
    batch = batch_of(with_limits(scored, truncated, 1.0), "grpo", **more)
    assert bool(batch.advantages.any()) == differs


# ---- what is read of a reply: its special tokens mean something ----

THOUGHTS = make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=CHATML, model_max_length=512)
THOUGHTS.add_tokens([AddedToken(f"<{name}>", special=True) for name in ("think", "/think", "tool_call", "/tool_call")])


def test_every_reader_of_a_reply_gets_its_special_tokens(agents: Callable[..., Agent]):
    """Functions, environments, parsers of tool calls and reports; none gets the end of the turn."""
    call = '{"name": "look", "arguments": {"at": "it"}}'
    text = f"<think>Hm.</think>a<tool_call>{call}</tool_call>"
    tokens = [*THOUGHTS(text, add_special_tokens=False)["input_ids"], EOS]
    assert len({*tokens} & {*THOUGHTS.added_tokens_decoder}) == 5
    (found,) = Chat(THOUGHTS).calls([], tokens)
    assert (found.name, found.arguments) == ("look", {"at": "it"})
    prompt = Prompt("1", "Play.", np.array(THOUGHTS("Play.")["input_ids"]))
    rollout = join_rollouts([row_of(prompt, Response(tokens, True, None))], 0)
    assert read_texts(rollout, unscored(rollout), THOUGHTS)[0]["response"] == text
    scorer = Scorer(None, THOUGHTS, rows_per_request=1)
    scorer.reward = ServedModel(components=("a",))
    assert scorer._texts(rollout, range(1), 1)[0] == [{"prompt": "Play.", "response": text}]
    said = talk(agents("Countdown", THOUGHTS), [text, text], tokenizer=THOUGHTS)[0].trajectory
    assert [message["content"] for message in said.messages] == [text, f"1 left after {text}", text]
