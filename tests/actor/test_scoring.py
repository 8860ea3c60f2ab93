"""Tests of `actor.scoring`: which rows share a request, one reward version per group, and process rewards.

Fake clients answer, fail or change their version on demand, which a real server cannot.
"""

import asyncio
import itertools
import json
import re
import string
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_system import make_run
from messages import assistant, user
from run_checkpoints import TEXTS, make_checkpoint, make_tokenizer
from samples import a_sample, rewarded
from tiny_tokenizers import PLAIN_CHAT, make_text_tokenizer
from tokenizers import AddedToken

from rlhf_triton.actor.data.chat import Chat
from rlhf_triton.actor.data.prompt_files import PromptError, PromptRow
from rlhf_triton.actor.data.prompt_reader import Prompt, PromptReader, check_columns
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.actor.data.rollout_rows import (
    Score,
    conversation_of,
    failure_of,
    row_of_response,
)
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.collection import MAX_RESCORES, GroupInFlight
from rlhf_triton.actor.scoring.reference import ServedReference
from rlhf_triton.actor.scoring.row_metadata import row_metadata
from rlhf_triton.actor.scoring.row_texts import BLOCK, RowText, tokens_covering
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.checkpoints.tokenization import encode_text, fingerprint, rendering_fingerprint
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed, RequestRefused
from rlhf_triton.client.reward_source import chat_row, text_row
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.serving.function_reward import FunctionReward
from rlhf_triton.python_backend.serving.requests import RowReader
from rlhf_triton.python_backend.serving.templates import RowTemplate
from rlhf_triton.tools import render_configs
from rlhf_triton.tools.gateway.protocols.rewards import RewardInput
from rlhf_triton.trainer.accuracy_gate import read_pairs
from rlhf_triton.wire.contract import (
    REWARDS,
    VALUES,
    WEIGHTS_VERSION,
    ContractError,
    Limits,
    VersionRange,
    texts_array,
)

PATIENCE_S = 120.0  # far beyond what any of this takes; a broken loop fails after it instead of hanging
NAN = float("nan")
VERSIONS = VersionRange(4)  # versions of the critic that a step demands


def one_row(index):
    return (a_sample([index] * (index + 2), name=str(index)),)


def rows_of(*rows):
    return [(a_sample(row),) for row in rows]


# ---- groups: a row is never held back for others, except for those of its group ----


class Asked:
    """A scorer that rewards a row with its number, and records the rows by request."""

    def __init__(self, *, groupwise):
        self.reward = ServedModel(groupwise=groupwise)
        self.rows = []

    async def score(self, rows, *, versions):
        assert versions == VERSIONS
        self.rows.append([int(row[0].tokens[0]) for row in rows])
        return [(replace(row[0], score=rewarded(float(row[0].tokens[0]))),) for row in rows]


@pytest.mark.parametrize(
    ("order", "group_size", "requests"),
    [  # rows that end in this order
        ([3, 0, 4, 1, 2], 1, [[3], [0], [4], [1], [2]]),
        ([3, 0, 5, 2, 1, 4], 2, [[2, 3], [0, 1], [4, 5]]),
    ],
)
async def test_row_or_group_is_sent_as_soon_as_it_has_ended(order, group_size, requests):
    asked = Asked(groupwise=group_size > 1)
    loop = asyncio.get_running_loop()
    starting = asyncio.Semaphore(16)
    ended = [loop.create_future() for _ in order]
    parts = [ended[i : i + group_size] for i in range(0, len(ended), group_size)]
    groups = [GroupInFlight(asked, None, starting, part) for part in parts]
    for group in groups:
        group.versions.set_result(VERSIONS)
    for index in order:
        ended[index].set_result(one_row(index))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # in this order
    found = [*itertools.chain(*await asyncio.wait_for(asyncio.gather(*(group.scored for group in groups)), PATIENCE_S))]
    assert asked.rows == requests
    assert [row.score.reward for (row,) in found] == list(range(len(ended)))


# ---- Scorer ----


class Client:
    """Answers with these outputs, row by row, and records what it was asked."""

    def __init__(self, answer, **parameters):
        dtypes = {"step_ends": np.int64, "reward_errors": np.object_, WEIGHTS_VERSION: np.int64}
        self.answer = {name: np.asarray(value, dtypes.get(name, np.float32)) for name, value in answer.items()}
        self.parameters = parameters
        self.asked = {}
        self.groups = []
        self.refuses = None
        self.rows = []

    async def describe(self, model):
        return ServedModel.of({"model": "there", "tokenizer_fingerprint": "other", **self.parameters})

    async def rewards(self, rows, outputs, metadata, **more):
        self.asked = {"rows": rows, "outputs": outputs, **more}
        self.groups.append([each.get("group") for each in metadata])
        if any(row[0] == self.refuses for row in rows):
            raise RequestRefused("refused", f"sentences[{self.refuses}]: 200 tokens, must be at most 128")
        indices = [self.rows.index(row.tolist()) for row in rows]  # requests come in any order
        return {name: array[indices] for name, array in self.answer.items()}

    async def score(self, rows, *_, versions):
        self.versions = versions
        return self.answer

    async def score_sentences(self, texts, outputs, metadata, *, pairs):
        self.asked = {"texts": texts, "outputs": outputs, "metadata": metadata}
        return self.answer


def scorer_of(client, tokenizer, *, with_critic=False):
    return Scorer(client, tokenizer, with_critic=with_critic)


def score(client, tokenizer, rows, *, texts=False):
    client.rows = [row.tokens.tolist() for row in rows]
    scorer = scorer_of(client, tokenizer)
    scorer.reward = ServedModel.of(client.parameters)
    scorer.sends_sentences = texts
    return [row for (row,) in asyncio.run(scorer.score([(row,) for row in rows]))]


def failures(rows):
    return [row.score.failure for row in rows]


def are_scored(rows):
    return [not failure for failure in failures(rows)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_text_tokenizer("qwen2")


def scored(tokenizer, groupwise, *, rows=4, refuses=None):
    """Score rows by a function of groups, or of rows."""
    zeros = np.zeros((rows, 1))
    client = Client({"rewards": zeros, "reward_components": zeros, "reward_errors": [[b""]] * rows})
    client.refuses = refuses
    client.rows = [[index] * (index + 2) for index in range(rows)]
    scorer = scorer_of(client, tokenizer)
    scorer.reward = ServedModel(components=("a",), weights=(1.0,), groupwise=groupwise)
    return client, asyncio.run(scorer.score([one_row(index) for index in range(rows)]))


@pytest.mark.parametrize(
    ("groupwise", "groups", "refused"), [(False, [[None]] * 4, [3]), (True, [[0] * 4], [0, 1, 2, 3])]
)
def test_groupwise_rewards_receive_a_group_at_once_and_others_rows(tokenizer, groupwise, groups, refused):
    """A refused row fails only itself, or its group."""
    client, rows = scored(tokenizer, groupwise)
    assert client.groups == groups
    assert not any(map(failure_of, rows))
    _, rows = scored(tokenizer, groupwise, refuses=3)
    assert {i: cause for i, row in enumerate(rows) if (cause := failure_of(row))} == dict.fromkeys(refused, "refused")


@pytest.mark.parametrize(
    ("name", "returned", "failure"),
    [
        (WEIGHTS_VERSION, [[4], [4]], ""),
        (WEIGHTS_VERSION, [[4], [5]], "weights_version [4, 5] for one request, but one version is expected"),
        (WEIGHTS_VERSION, [[4, 4]], "weights_version of shape [1, 2], but [2, 1] is expected"),
        (VALUES, [[0, 0], [0, 0]], "values of shape [2, 2], but [2, 3] is expected"),
        (VALUES, [[0] * 8, [0] * 8], ""),  # padded
        (REWARDS, [0, 0], "rewards of shape [2], but [2, 1] is expected"),
    ],
)
@pytest.mark.parametrize("texts", [False, True])
def test_scorer_demands_a_version_and_masks_the_rows_of_a_reply_that_is_none(tokenizer, name, returned, failure, texts):
    """A server that broke its promise would mix two critics in one advantage; a wrong proxy would end the run."""
    answer = {REWARDS: np.zeros((2, 1)), VALUES: np.zeros((2, 3)), WEIGHTS_VERSION: [[4], [4]], name: returned}
    client = Client(answer)
    scorer = scorer_of(client, tokenizer, with_critic=True)
    scorer.reward = ServedModel(groupwise=True)
    scorer.sends_sentences = texts
    scored = asyncio.run(scorer.score(rows_of([1, 1, 1], [2, 1, 1]), versions=VersionRange(4)))
    for row in scored:
        assert (failure_of(row) == "") == (failure == "")
        assert failure in failure_of(row)
    assert client.versions == VersionRange(4)


class Critic(Client):
    """Gives each token its id as its value; refuses rows that begin with 2."""

    async def score(self, rows, *_, versions):
        if any(row[0] == 2 for row in rows):
            raise RequestRefused("refused", "tokens[0]: too long")
        width = max(map(len, rows))
        values = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(np.float32)
        return {VALUES: values, WEIGHTS_VERSION: np.full((len(rows), 1), 3)}


def test_conversation_fails_if_any_row_lacks_values(tokenizer):
    scorer = Scorer(Critic({}), tokenizer, with_rewards=False)
    one, other = (tuple(a_sample(tokens) for tokens in rows) for rows in (([3, 5], [1, 4, 6]), ([2, 5, 6], [1, 7])))
    whole, failed = asyncio.run(scorer.score([one, other]))
    assert [row.score.values.tolist() for row in whole] == [[3, 5], [1, 4, 6]]
    assert [row.score.version for row in (*whole, *failed)] == [3, 3, -1, 3]
    assert (failure_of(whole), failure_of(failed)) == ("", "refused")


def test_column_is_refused_only_if_the_scorer_would_overwrite_it():
    plain = ServedModel(components=("a",))
    groupwise = ServedModel(components=("a",), groupwise=True)
    prompt = Prompt("1", "a", np.asarray([1]), {"group": "mine"}, where="p.jsonl:7")
    check_columns(plain, [prompt])
    assert row_metadata(plain, RowText(prompt, "b"))["group"] == "mine"
    with pytest.raises(PromptError, match="the column 'reply_messages' has a reserved name"):
        check_columns(plain, [Prompt("1", "a", np.asarray([1]), {"reply_messages": []})])
    with pytest.raises(PromptError, match=r"p\.jsonl:7: the column 'group' has a reserved name"):
        check_columns(groupwise, [prompt])
    with pytest.raises(PromptError, match="the column 'step_ends' has"):
        check_columns(ServedModel.of({"process": "step"}), [Prompt("0", "", np.ones(1), {"step_ends": [3]})])


# ---- process rewards ----


def written(tokenizer, *texts):
    """Responses to the prompt "Open it."."""
    prompt = Prompt("", "Open it.", np.asarray(tokenizer("Open it.")["input_ids"]))
    replies = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    return [row_of_response(prompt, PolicyTurn(reply, ended=True)) for reply in replies]


def test_step_rewards_are_placed_at_the_servers_step_ends(tokenizer):
    rows = written(tokenizer, " A file. A day.", " the")
    first = len(rows[0].prompt.tokens)
    last = len(rows[0].tokens) - 1
    answer = {
        "rewards": [[0.25], [NAN]],
        "step_rewards": [[0.5, 0.25], [0.125, 0]],
        "step_ends": [[first + 1, last], [first, -1]],
        "reward_components": [[0.25, 2.0], [NAN, 1.0]],
        "reward_errors": [[b""], [b"why"]],
    }
    names = {"reward_components": '["model", "length"]', "reward_weights": "[2.0, 3.0]", "process": "step"}
    client = Client(answer, **names)
    one, other = score(client, tokenizer, rows)
    assert are_scored([one, other]) == [True, False]
    assert one.score.steps.nonzero()[0].tolist() == one.score.ends.nonzero()[0].tolist() == [first + 1, last]
    assert one.score.steps[one.score.ends].tolist() == [1.0, 0.5]  # times the model's weight
    assert (one.score.outcome, other.score.failure) == (6.0, "why")
    assert (one.score.components, one.score.weights) == ({"model": 0.25, "length": 2.0}, {"model": 2.0, "length": 3.0})
    assert client.asked["prompt_lengths"] == [first]
    assert client.asked["outputs"][-2:] == ("step_rewards", "step_ends")
    # a sum that is finite, and a step
    client.answer["rewards"][1] = 0.5
    client.answer["step_rewards"][0, 1] = NAN
    assert failures(score(client, tokenizer, rows)) == ["the reward of a step is not finite", ""]
    client.answer["reward_components"][1] = 3e38  # times 3.0, which exceeds float32
    client.answer["reward_errors"][1] = b""
    assert failures(score(client, tokenizer, rows))[1] == "the rewards are too large for float32"
    client.answer["rewards"][1] = NAN
    assert failures(score(client, tokenizer, rows))[1] == "the reward is nan"
    client.answer["step_ends"][1] = -1
    assert failures(score(client, tokenizer, rows))[1] == "the response has no steps to reward"
    client.answer["step_ends"][1] = last + 9
    assert failures(score(client, tokenizer, rows))[1].startswith(f"the server returned step_ends {last + 9} for a row")
    answer |= {"rewards": [[6.0], [3.0]], "step_rewards": [[NAN, 0], [0.125, 0]]}
    charted = score(Client(answer, **{**names, "reward_weights": "[0.0, 3.0]"}), tokenizer, rows)
    assert are_scored(charted) == [True, True], "steps of weight 0 mask a row"
    assert not any(row.score.steps.any() for row in charted)


def test_step_that_ends_in_environment_text_is_credited_to_the_turn_before(tokenizer):
    row = a_sample([5, 6, 7, 8, 9, 10, 11], 2, sampled=np.isin(np.arange(7), [2, 3, 6]))
    answer = {"rewards": [[7.0]], "step_rewards": [[1.0, 2.0, 4.0]], "step_ends": [[0, 4, 5]]}
    answer |= {"reward_components": [[7.0]], "reward_errors": [[b""]]}
    names = {"reward_components": '["model"]', "reward_weights": "[1.0]", "process": "step"}
    (found,) = score(Client(answer, **names), tokenizer, [row])
    assert found.score.steps.tolist() == [0, 0, 1, 6, 0, 0, 0]


@pytest.mark.parametrize(("is_chat", "before"), [(False, ""), (True, ""), (False, "<|im_start|>")])
def test_step_rewards_of_texts_are_placed_on_the_token_with_the_steps_last_character(tokenizer, is_chat, before):
    """The prompt's text may differ from the text of its tokens, because BOS has none."""
    response = " Return a line. a good day"
    (row,) = written(tokenizer, response)
    messages = {"messages": [user("Open it.")]} if is_chat else {}
    row = replace(row, prompt=replace(row.prompt, text=f"{before}Open it.", metadata=messages))
    text = response if is_chat else f"{before}Open it.{response}"
    ends = [text.index("line.") + 5, len(text)]
    client = Client({"rewards": [[0.5]], "step_rewards": [[0.5, 0.75]], "step_ends": [ends]}, process="step")
    (scored,) = score(client, tokenizer, [row], texts=True)
    assert (client.asked["texts"], client.asked["metadata"][0]["response"]) == ([text], response)
    places = scored.score.ends.nonzero()[0].tolist()
    assert places[1] == len(row.tokens) - 1
    assert tokenizer.decode(row.tokens[: places[0] + 1]) == "Open it. Return a line."
    assert scored.score.steps[places].tolist() == [0.5, 0.75]
    assert row.sampled[places].all()


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 2 * BLOCK + 3), family=st.sampled_from(["qwen2", "llama"]))
def test_tokens_with_finds_the_same_ends_as_decoding_every_prefix(seed, count, family):
    tokenizer = make_text_tokenizer(family)
    generator = np.random.default_rng(seed)
    ids = generator.integers(len(tokenizer), size=count).tolist()  # characters of several tokens, and parts of them
    sizes = [len(tokenizer.decode(ids[:n])) for n in range(count + 1)]
    ends = generator.integers(sizes[-1] + 2, size=5).tolist()
    expected = [None if end >= sizes[-1] else next(n for n, size in enumerate(sizes) if size >= end) for end in ends]
    assert tokens_covering(ends, tokenizer, ids) == expected


def test_token_rewards_are_refused_if_the_server_renders_texts_differently(tokenizer):
    client = Client({}, process="token", rendering_fingerprint=rendering_fingerprint(tokenizer))
    scorer = scorer_of(client, tokenizer)
    asyncio.run(scorer.compare_tokenizers())
    assert not scorer.sends_sentences
    other = make_text_tokenizer("qwen2", chat_template=PLAIN_CHAT)
    client.parameters["rendering_fingerprint"] = rendering_fingerprint(other)
    with pytest.raises(RlhfError, match=r"granularity is token, but there does not render and tokenise texts as the"):
        asyncio.run(scorer.compare_tokenizers())


# ---- agreement: whatever versions a live reward model serves meanwhile, no group of rows mixes two ----


class Swapping:
    """A scorer whose requests get the next versions; None: no score. Row i has the score 100 v + i under version v."""

    reward = ServedModel(groupwise=True)

    def __init__(self, *answers):
        self.left = [*answers]

    async def score(self, rows, *, versions):
        assert versions == VERSIONS
        return [(replace(row, score=self._score(row, v)),) for (row,), v in zip(rows, self.left.pop(0), strict=True)]

    def _score(self, row, version):
        if version is None:
            return Score(failure="503")
        reward = 100.0 * version + int(row.tokens[0])
        size = len(row.tokens)
        steps = np.eye(size, dtype=np.float32)[-1] * np.float32(reward)
        values = np.full(size, 7, np.float32)
        return Score(
            reward=reward,
            outcome=reward,
            steps=steps,
            ends=steps != 0,
            values=values,
            version=5,
            components={"model": reward},
            reward_version=version,
        )


@pytest.mark.parametrize(
    ("answers", "versions"),
    [  # versions of the two rows in each reply, and in the result
        pytest.param([[1, 1]], [1, 1], id="one version is left alone"),
        pytest.param([[1, 2], [2, 2]], [2, 2], id="two versions are scored again"),
        pytest.param([[1, 2], [2, 3], [3, 3]], [3, 3], id="a swap meanwhile"),
        pytest.param([[2, 1], [1, 1]], [1, 1], id="a version rolled back is no target"),
        pytest.param([[1, 2], [None, None]], [None, None], id="not scored again: masked"),
        pytest.param([[None, 2]], [None, 2], id="an unavailable row does not count"),
        pytest.param([[1, 2]] * (1 + MAX_RESCORES), [None, 2], id="servers that never agree"),
    ],
)
async def test_group_that_mixes_reward_versions_is_scored_again(answers, versions):
    scorer = Swapping(*answers)
    loop = asyncio.get_running_loop()
    ended = [loop.create_future() for _ in range(2)]
    for i, each in enumerate(ended):
        each.set_result((a_sample([i] * 3),))
    group = GroupInFlight(scorer, None, asyncio.Semaphore(16), ended)
    group.versions.set_result(VERSIONS)
    rows = [row for (row,) in await group.scored]
    assert not scorer.left
    assert [None if row.score.failure else row.score.reward_version for row in rows] == versions
    for i, (row, version) in enumerate(zip(rows, versions, strict=True)):
        if version is None:
            assert row.score.failure == "503" or "changed more than" in row.score.failure
            continue
        found = [row.score.reward, row.score.outcome, row.score.components["model"], float(row.score.steps.sum())]
        assert found == [100 * version + i] * 4, "a reward is of another version or row"
        assert (row.score.values == 7).all()


# ---- one rendering: a reward model reads its own, whichever way a prompt and a reply come in ----

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}").replace("<|im_end|>\n", "<|im_end|>")
THINK = "<think>"  # a special token that means something
LETTERS = [*TEXTS, string.printable]


def with_thoughts(family, **settings):
    made = make_text_tokenizer(family, LETTERS, **settings)
    made.add_tokens([AddedToken(THINK, special=True)])
    return made


POLICY = with_thoughts("qwen2", chat_template=CHATML)
REWARDS_OF = {  # tokenizers of reward models, by what differs from the policy's
    "nothing": POLICY,
    "template": with_thoughts("qwen2", chat_template=TRIMMED),
    "bos": with_thoughts("qwen2", chat_template=CHATML, added=("<|im_start|>", "")),
    "vocabulary": with_thoughts("llama"),
}
QUESTION = user("Open it.")
ASKED = [QUESTION, assistant("Good day."), user("Read it.")]
REPLIES = {  # text, its tokens, and whether the policy has ended it
    "finished": (" A day.", None, True),
    "cut": (" A day.", None, False),
    "empty": ("", None, True),
    "nothing": ("", None, False),
    "white space": (" \n A day. \n", None, True),
    "special tokens": (f"{THINK}A{THINK} day.", None, True),
    "another tokenisation": (" A day.", [*" A day."], True),
}


def sampled(reply):
    """Return the policy's tokens for a key of `REPLIES`."""
    text, pieces, ended = REPLIES[reply]
    parts = [POLICY(piece, add_special_tokens=False)["input_ids"] for piece in pieces or [text]]
    return [token for part in parts for token in part] + [POLICY.eos_token_id] * ended


def answered(prompt, reply):
    return row_of_response(prompt, PolicyTurn(sampled(reply), REPLIES[reply][2]))


def test_tool_calls_of_the_last_reply_are_rendered(tmp_path):
    """An agent's last message may have tool calls beside its content, as clients of the OpenAI API write them."""
    calls = "{% for c in m.tool_calls or [] %}({{ c.name }}){% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{calls}<|im_end|>{{% endfor %}}"
    theirs = with_thoughts("qwen2", chat_template=template)
    row = with_a_tool(row_of(SHAPES["chat"][0]), "finished")
    messages = (*row.messages[:-1], {**row.messages[-1], "tool_calls": [{"name": "look"}]})
    row = replace(row, messages=messages)
    whole = theirs.apply_chat_template([QUESTION, *messages], tokenize=False)
    assert whole.endswith(" A day.(look)<|im_end|>")
    assert scored_ids(Reader(tmp_path, theirs), row) == encode_text(theirs, whole)


def with_a_tool(prompt, reply):
    """Return a conversation in one row: the policy calls a tool and answers the result with the reply."""
    chat = Chat(POLICY)
    row = RecordedRow()
    row.observe(prompt.tokens.tolist())
    row.add_turn(PolicyTurn(sampled("finished"), ended=True))
    result = {"role": "tool", "name": "look", "content": "A file."}
    row.observe(chat.after_reply([result], POLICY.eos_token_id))
    row.add_turn(PolicyTurn(sampled(reply), REPLIES[reply][2]))
    row.messages = [assistant(REPLIES["finished"][0]), result, assistant(REPLIES[reply][0])]
    return conversation_of([(prompt, row)])[0]


def row_of(columns):
    return PromptReader(tokenizer=POLICY, max_tokens=200).prompt(PromptRow(1, "row 1", columns))


SHAPES = {  # prompt, and the messages before the reply
    "text": ({"text": "Open it."}, None),
    "text with special tokens": ({"text": "<|im_start|>user\nOpen it.<|im_end|>\n<|im_start|>assistant\n"}, None),
    "chat": ({"messages": [QUESTION]}, [QUESTION]),
    "several turns": ({"messages": ASKED}, ASKED),
}


class Reader:
    """Reads texts as the server does, and keeps the ids."""

    def __init__(self, folder, tokenizer, **settings):
        tokenizer.save_pretrained(folder)
        self.parameters = {"model": "there", "tokenizer_fingerprint": fingerprint(tokenizer), **settings}
        adds = {"add_special_tokens": True, "append_eos": "append_eos" in settings}
        limits = Limits(vocab_size=1 << 20, max_length=500)
        self._reader = RowReader(folder, limits, takes_pairs="text" in settings, **adds)
        self.ids = []

    async def describe(self, model):
        return ServedModel.of(self.parameters)

    async def score_sentences(self, texts, outputs, metadata, *, pairs):
        rows = zip(texts, metadata, pairs or [""] * len(texts), strict=True)
        self.ids = [self._reader.row_of_text(0, *row).tokens.tolist() for row in rows]
        return {REWARDS: np.zeros((len(texts), 1), np.float32)}


def scored_ids(reader, row):
    """Return the token ids by which a run's row is scored."""
    scorer = scorer_of(reader, POLICY)
    asyncio.run(scorer.compare_tokenizers())
    asyncio.run(scorer.score([(row,)]))
    return reader.ids[0]


@pytest.mark.parametrize("shape", [*SHAPES, "tools"])
@pytest.mark.parametrize("other", REWARDS_OF)
def test_rows_are_scored_in_the_reward_models_own_rendering(tmp_path, other, shape):
    theirs = REWARDS_OF[other]
    (columns, before) = SHAPES["chat" if shape == "tools" else shape]
    joined, ended, pairs = (Reader(tmp_path, theirs, **each) for each in ({}, {"append_eos": "true"}, {"text": "pair"}))
    for reply, (text, *_) in REPLIES.items():
        row = (with_a_tool if shape == "tools" else answered)(row_of(columns), reply)
        if before is None:
            first = columns["text"]
            whole = columns["text"] + text
            assert scored_ids(ended, row) == encode_text(theirs, whole + theirs.eos_token), reply
        else:
            said = [*before, *row.messages[:-1]]
            first = theirs.apply_chat_template(said, tokenize=False)
            whole = theirs.apply_chat_template([*said, assistant(text)], tokenize=False)
        assert scored_ids(joined, row) == encode_text(theirs, whole), reply
        assert scored_ids(pairs, row) == (theirs(first, text)["input_ids"] if text else encode_text(theirs, first))


def gate_ids(folder, prompt, reply, max_length=None, **settings):
    """Return the token ids of a pair of `reward.gate`."""
    message = assistant(reply) if isinstance(reply, str) else reply
    said = reply if isinstance(prompt, str) else [message]
    return ids_of_line(folder, {"prompt": prompt, "chosen": said, "rejected": said}, max_length, **settings)


def ids_of_line(folder, line, max_length=None, **settings):
    (folder / "pairs.jsonl").write_text(json.dumps(line))
    gate = folder / "pairs.jsonl"
    section = RunConfig.model_validate({"reward": {"model": folder, "store": True, "gate": gate, **settings}}).reward
    limits = Limits(vocab_size=1 << 20, max_length=max_length)
    model = types.SimpleNamespace(num_outputs=1, limits=limits, skipped_pad_id=None)
    return read_pairs(section, model).chosen[0].tokens.tolist()


def test_reward_model_receives_the_response_of_a_text_as_metadata():
    assert row_metadata(ServedModel(), RowText(row_of({"text": "Open it."}), " A day.")) == {"response": " A day."}


def test_gate_refuses_a_reply_that_is_too_long(tmp_path):
    POLICY.save_pretrained(tmp_path)
    size = len(gate_ids(tmp_path, "Open it.", " A day."))
    with pytest.raises(ConfigError, match=rf"pairs.jsonl, line 1: chosen: {size} tokens, the model takes {size - 1} "):
        gate_ids(tmp_path, "Open it.", " A day.", size - 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", REWARDS_OF)
def test_client_gateway_gate_and_run_give_the_same_token_ids(tmp_path, other, shape):
    """Sentences of any client, with and without messages; rows of the gateway; pairs of the gate; rows of a run."""
    theirs = REWARDS_OF[other]
    (columns, before) = SHAPES[shape]
    prompt = columns["text"] if before is None else before
    reader = Reader(tmp_path, theirs)
    pairs = Reader(tmp_path, theirs, text="pair")
    for reply, (text, *_) in REPLIES.items():
        chat = [] if before is None else [*before, assistant(text)]
        gateway = text_row(prompt, text, {}) if before is None else chat_row(chat, {})
        ways = [
            (gateway.text, gateway.metadata),
            (prompt + text, {"response": text}) if before is None else ("", {"messages": chat}),
            (prompt + text, {"response": text}) if before is None else (text, {"messages": before, "response": text}),
        ]
        sentences, metadata = zip(*ways, strict=True)
        asyncio.run(reader.score_sentences(sentences, (), metadata, pairs=None))
        found = {*map(tuple, reader.ids), tuple(gate_ids(tmp_path, prompt, text))}
        assert found == {tuple(scored_ids(reader, answered(row_of(columns), reply)))}, reply
        if before is not None:  # a text comes as two for a model of pairs
            assert {*map(tuple, pairs_ids(pairs, ways)), tuple(gate_ids(tmp_path, prompt, text, text="pair"))} == {
                tuple(scored_ids(pairs, answered(row_of(columns), reply)))
            }
        run = row_metadata(FUNCTIONS, RowText(row_of(columns), text))
        for sentence, known in [*ways, (text if before else prompt + text, run)]:
            (sample,) = samples_of(sentence, known)
            assert sample.text == (prompt + text if before is None else text)
            assert sample.response == text
            assert sample.prompt == (before[-1]["content"] if before else known.get("prompt"))
            assert sample.metadata.get("messages") == before
            assert before is None or "prompt" not in sample.metadata
            assert "reply_messages" not in sample.metadata


def pairs_ids(reader, ways):
    sentences, metadata = zip(*ways, strict=True)
    asyncio.run(reader.score_sentences(sentences, (), metadata, pairs=None))
    return reader.ids


FUNCTIONS = ServedModel(components=("verdict",))


def samples_of(sentence, metadata):
    """Return the samples that a reward function receives."""
    tensors = {"sentences": texts_array([sentence]), "metadata": texts_array([json.dumps(metadata)])}
    model = FunctionReward.__new__(FunctionReward)
    model._tokenizer = None
    model._limits = Limits(vocab_size=1)
    return [*model._samples(types.SimpleNamespace(array=tensors.get))]


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "Hm."},
        {"name": "Ada"},
        {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"content": "", "name": "Ada"},
    ],
)
def test_last_message_with_extra_fields_is_read_as_the_reply(tmp_path, more):
    """The same ids as of the whole conversation; functions receive its text, and the message as `reply_messages`."""
    template = "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"
    theirs = with_thoughts("qwen2", chat_template=template)
    reply = {**assistant(" A day."), **more}
    text = reply["content"] or ""
    reader = Reader(tmp_path, theirs)
    whole = [QUESTION, reply]
    gateway = RewardInput.model_validate({"messages": whole}).row()
    ways = [(gateway.text, gateway.metadata), ("", {"messages": whole})]
    ways.append((text, {"messages": [QUESTION], "response": text, "reply_messages": [reply]}))
    expected = encode_text(theirs, theirs.apply_chat_template(whole, tokenize=False))
    assert pairs_ids(reader, ways) == [expected] * 3
    assert gate_ids(tmp_path, [QUESTION], reply) == expected
    # The reply comes twice in a request, the question twice in UltraFeedback's columns; each is read once.
    assert not text or pairs_ids(reader, [(text, {"messages": whole})]) == [expected]
    lines = [{"prompt": prompt} for prompt in ([QUESTION], QUESTION["content"])]
    for line in lines:
        for said in ([reply], whole):
            assert ids_of_line(tmp_path, {**line, "chosen": said, "rejected": said, "response": "B"}) == expected
    for sentence, known in ways:
        (sample,) = samples_of(sentence, known)
        assert (sample.text, sample.response) == (text, text)
        assert sample.metadata == {"messages": [QUESTION], "response": text, "reply_messages": [reply]}
    pairs = Reader(tmp_path, theirs, text="pair")
    field = [*more][-1]
    for sentence, known in ways:
        with pytest.raises(
            ContractError, match=rf"metadata\[0\]: the reply has {field}, but this model reads only its con"
        ):
            pairs_ids(pairs, [(sentence, known)])


@pytest.mark.parametrize("more", [{}, {"content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}])
def test_reply_equal_to_the_message_before_it_is_scored(tmp_path, more):
    """Otherwise a server would take the message before it for the reply that comes twice."""
    theirs = with_thoughts("qwen2", chat_template="{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}")
    reply = {**assistant(" A day."), **more}
    before = [QUESTION, reply]
    reader = Reader(tmp_path, theirs)
    row = chat_row([*before, reply], {})
    expected = encode_text(theirs, theirs.apply_chat_template([*before, reply], tokenize=False))
    assert pairs_ids(reader, [(row.text, row.metadata)]) == [expected]
    assert gate_ids(tmp_path, before, reply) == expected
    (sample,) = samples_of(row.text, row.metadata)
    assert (sample.response, sample.metadata["messages"]) == (reply["content"], before)


def test_functions_receive_messages_as_in_a_row_of_a_run():
    """As reward models do, however a client of Triton's own API sends the reply."""
    answer = assistant("42")
    question, reply = ({**said, "content": [{"type": "text", "text": said["content"]}]} for said in (QUESTION, answer))
    ways = [
        ("", {"messages": [question, reply]}),
        (answer["content"], {"messages": [question], "response": answer["content"], "reply_messages": [reply]}),
    ]
    for sentence, metadata in ways:
        (sample,) = samples_of(sentence, metadata)
        assert (sample.text, sample.response) == (answer["content"], answer["content"])
        assert sample.prompt == QUESTION["content"]
        assert sample.metadata.get("reply_messages", [answer]) == [answer]
    called, plain = (
        {"role": "assistant", **content, "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}
        for content, arguments in (({"content": None, "refusal": None}, '{"at": 1}'), ({"content": None}, {"at": 1}))
    )
    (sample,) = samples_of("", {"messages": [{**QUESTION, "tool_calls": None}, called, answer]})  # OpenAI's format
    assert sample.metadata["messages"] == [QUESTION, plain]
    image = {**QUESTION, "content": [{"type": "image_url"}]}
    with pytest.raises(ContractError, match=r"metadata\[0\]\.messages\[1\]\.content: has a part of type 'image_url'"):
        samples_of("", {"messages": [question, image]})


def test_tools_unknown_to_the_reward_models_template_need_reward_template(tmp_path):
    POLICY.save_pretrained(tmp_path)
    metadata = {"messages": [QUESTION], "tools": [{"name": "look"}], "response": " A day."}
    known = {"limits": Limits(vocab_size=1 << 20), "add_special_tokens": True}
    with pytest.raises(ContractError, match=r"omits the tools; score a text without them \(reward\.template\), or"):
        RowReader(tmp_path, **known).row_of_text(0, "", metadata, "")
    documented = (Path(__file__).parents[2] / "docs" / "your-models.md").read_text().replace("\\|", "|")
    (recipe,) = re.findall(r"`template: \"({% for m .*)\"`", documented)
    reader = RowReader(tmp_path, **known, template=RowTemplate(recipe.replace("\\n", "\n")))
    whole = POLICY.apply_chat_template([QUESTION, assistant(" A day.")], tokenize=False)
    found = [reader.row_of_text(0, *row, "").tokens.tolist() for row in ((" A day.", metadata), ("", metadata))]
    assert found == [encode_text(POLICY, whole.removesuffix("\n"))] * 2


def test_tools_and_template_kwargs_of_a_row_reach_policy_and_reward_model(tmp_path):
    template = "{{ tools | tojson }}{{ effort }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    theirs = with_thoughts("qwen2", chat_template=template)
    options = {"tools": [{"name": "look"}], "effort": "low"}
    columns = {"prompt": [QUESTION], "tools": options["tools"], "chat_template_kwargs": {"effort": "low"}}
    prompt = PromptReader(tokenizer=theirs, max_tokens=200).prompt(PromptRow(1, "row 1", columns))
    assert prompt.text == theirs.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, **options)
    whole = theirs.apply_chat_template([QUESTION, assistant(" A day.")], tokenize=False, **options)
    assert scored_ids(Reader(tmp_path, theirs), answered(prompt, "finished")) == encode_text(theirs, whole)
    with pytest.raises(PromptError, match="row 1: tools: not available with an environment, which defines the tools"):
        PromptReader(tokenizer=theirs, max_tokens=200, has_environment=True).prompt(PromptRow(1, "row 1", columns))


def test_ppo_on_a_server_without_a_critic_is_refused(checkpoints):
    async def describe(model):
        if model == "critic":
            raise RequestFailed("critic refused", "Request for unknown model: 'critic' is not found")
        return ServedModel.of({"tokenizer_fingerprint": "known"})

    client = types.SimpleNamespace(describe=describe)
    ppo, other = (
        Scorer(client, load_tokenizer(checkpoints.policy), with_critic=with_critic) for with_critic in (True, False)
    )
    asyncio.run(other.compare_tokenizers())
    with pytest.raises(RlhfError, match=r"the server has no critic, which actor\.algorithm\.name needs"):
        asyncio.run(ppo.compare_tokenizers())


def test_reference_on_a_server_with_other_settings_is_refused(tmp_path, checkpoints):
    """Banned tokens may differ under the same vocabulary and weights if a token has another role."""
    run = make_run(tmp_path / "run", checkpoints, actor={"kl_reference": "triton"})
    rendered = render_configs.parse_pbtxt("reference", render_configs.render_configs(run.config)["reference"])
    served = ServedModel.of({name: value.string_value for name, value in rendered.parameters.items()})
    client = types.SimpleNamespace(describe=mock.AsyncMock(return_value=served))

    def compare(*overrides):
        config = load_config(run.path, overrides)
        policy = Policy(config.actor)
        assert policy.reference is None, "the actor holds a reference although it is served"
        asyncio.run(ServedReference(client, policy, config.reference.model).compare())

    other_roles = make_tokenizer()
    other_roles.bos_token = "</s>"
    roles = make_checkpoint(tmp_path / "roles", "policy", other_roles, seed=3)
    weights = make_checkpoint(tmp_path / "weights", "policy", make_tokenizer(), seed=33)
    compare()
    compare(f"reference.model={tmp_path / 'on the server only'}")  # cannot be seen from here
    for override, message in {
        "generation.temperature=0.7": r"rendered with temperature 1\.0, the actor has 0\.7",
        "policy.precision=bfloat16": r"computes in float32, the actor in bfloat16.*set reference\.dtype and",
        f"policy.model={checkpoints.other_policy}": r"the reference's tokenizer differs from the policy's \(",
        f"policy.model={roles}": r"rendered with banned_token_ids \[0, 2\], the actor has \[2\]",
        f"policy.model={weights}": r"whose weights, config\.json or tokenizer differ from reference\.model \(",
    }.items():
        with pytest.raises(RlhfError, match=message):
            compare(f"actor.{override}")
    client.describe.side_effect = RequestFailed("refused", UNKNOWN_MODEL)
    with pytest.raises(RlhfError, match=r"the server has no model reference \(.*actor\.kl\.reference to"):
        compare()
