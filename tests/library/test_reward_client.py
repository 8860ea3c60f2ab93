"""The reward client for other trainers, with a fake server: forms of rows, scores, failures, trainers."""

import asyncio
import copy
import json
import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
import trl_functions
from fake_reward import FakeReward

from rlhf_triton import ClientSettings, ContractError, RequestFailed, RewardClient, RlhfError, Sample, Scores
from rlhf_triton.client.reward import reward_func
from rlhf_triton.client.reward_source import RowResult
from rlhf_triton.client.served import ServedModel
from rlhf_triton.rewards.function import load_function

QUICK = ClientSettings(max_outage_s=0.0)
CHAT = [{"role": "user", "content": "Hi"}]


def reply(text):
    return [{"role": "assistant", "content": text}]


def play(call, **options):
    """Return what `call` returns in a thread, with a client of a fake server."""

    async def run():
        async with FakeReward(**options) as fake:

            def body():
                with RewardClient(fake.url, settings=QUICK) as reward:
                    return call(reward, fake)

            return await asyncio.to_thread(body)

    return asyncio.run(run())


# ---- rows and scores ----


def test_reward_client_scores_texts_pairs_chats_and_tokens_in_one_call():
    def call(reward, server):
        inputs = ["four", ("ab", "cde"), [*CHAT, *reply("Yes")], (CHAT, "No"), [1, 2, 3], torch.tensor([4, 5])]
        return reward.score(inputs, [{"answer": str(i)} for i in range(6)], prompt_lengths=[0] * 6)

    scores = play(call)
    np.testing.assert_array_equal(scores, np.asarray([4, 5, 3, 2, 6, 9], np.float32))
    assert (scores.dtype, scores.errors, scores.versions) == (np.float32, [""] * 6, [None] * 6)
    assert (scores.components, scores.steps, scores.step_ends) == ({}, [], [])


def test_chat_is_sent_as_messages_response_and_metadata():
    def call(reward, server):
        reward.score([[*CHAT, *reply("Yes")]], [{"answer": 5}])
        (inputs,) = server.received
        assert inputs["sentences"].tolist() == [[b"Yes"]]
        return json.loads(inputs["metadata"][0, 0])

    assert play(call, terms=("length",)) == {"answer": 5, "messages": CHAT, "response": "Yes"}


def test_failed_row_is_nan_with_its_error_and_terms():
    scores = play(lambda reward, _: reward.score(["ab", "refuse", "nan"]), terms=("length", "verifier"))
    assert scores.tolist()[0] == 2
    assert np.isnan(scores).tolist() == [False, True, True]
    assert scores.errors == ["", "text: 'refuse' has no tokens", "the verifier crashed"]
    np.testing.assert_array_equal(scores.components["length"], [2, np.nan, 1])
    np.testing.assert_array_equal(scores.components["verifier"], [2, np.nan, np.nan])


def test_scores_behave_as_an_array_and_slices_are_plain_arrays():
    scores = play(lambda reward, _: reward.score(["a", "abc"]))
    assert isinstance(scores, np.ndarray)
    for part in (scores[:1], scores * 2, scores > 1, np.asarray(scores)):
        assert type(part) is np.ndarray
    assert (scores.mean(), float(scores[1]), len(scores)) == (2, 3, 2)
    assert torch.as_tensor(scores).tolist() == [1, 3]


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, Scores.copy, lambda scores: pickle.loads(pickle.dumps(scores))],  # noqa: S301 -- its own
)
def test_copies_of_scores_have_their_attributes(duplicate):
    scores = play(lambda reward, _: reward.score(["ab", "refuse"]), terms=("length",))
    other = duplicate(scores)
    assert type(other) is Scores
    assert (other.errors, other.components["length"][0]) == (scores.errors, 2)
    other[0] = 5
    assert scores[0] == 2


def test_scores_report_their_version_and_min_version_is_sent():
    def call(reward, server):
        server.version = 4
        with pytest.raises(ContractError, match=r"^min_version: -1, must be an integer"):
            reward.score(["a"], min_version=-1)
        scores = reward.score(["a"], min_version=3)
        assert server.demanded == [3]
        return scores.versions

    assert play(call) == [4]


def test_scores_have_process_reward_steps_and_several_labels():
    steps = (np.asarray([0.25, 0.5], np.float32), np.asarray([3, 7]))
    served = ServedModel(granularity="step")
    scores = Scores.of([RowResult(rewards=(0.5,), steps=steps), RowResult(error="refused")], served)
    assert [row.tolist() for row in scores.steps] == [[0.25, 0.5], []]
    assert [row.tolist() for row in scores.step_ends] == [[3, 7], []]
    several = Scores.of([RowResult(error="refused"), RowResult(rewards=(1.0, 2.0))], ServedModel(num_rewards=2))
    np.testing.assert_array_equal(several, [[np.nan, np.nan], [1, 2]])


class Table(list[str]):
    """A table like a data frame: iterating over it gives the names of its columns."""

    columns = ("a", "b")

    def __repr__(self):
        return "a b\n0 1"


@pytest.mark.parametrize(
    ("inputs", "options", "told"),
    [
        ("one text", {}, r"^inputs: 'one text', must be a list of rows; put brackets around one row"),
        (CHAT, {}, r"^inputs: \[\{'role'.*put brackets"),
        ([5, 6, 7], {}, r"^inputs: \[5, 6, 7\], must be a list of rows"),
        (["a", 5], {}, r"^inputs\[1\]: 5, must be a text, a pair"),
        ([{"prompt": "a"}], {}, r"^inputs: .*put brackets"),
        ([["a", "b", "c"]], {}, r"^inputs\[0\]: shape \[3\] of .*; a row is a text, a pair"),
        ([[0.5]], {}, r"^inputs\[0\]: float64 numbers, must be integers; a row is"),
        ([[2**63]], {}, r"^inputs\[0\]: 9223372036854775808 at 0, must be less than 2\*\*63; a row is"),
        ([[{"role": "user"}]], {}, r"^inputs\[0\]\[0\].content: missing or null"),
        (["a"], {"metadata": []}, r"^metadata: 0 entries for 1 rows"),
        (["a"], {"metadata": [{"response": "b"}]}, r"^metadata\[0\].response: a reserved name"),
        (["a"], {"metadata": [{"image": object()}]}, r"^metadata\[0\]: object cannot be sent as JSON"),
        (["a", "b"], {"metadata": [{}, None]}, r"^metadata\[1\]: None, must be a dictionary"),
        (["a"], {"metadata": {"answer": ["5"]}}, r"^metadata: \{'answer'.*, must be a list of rows"),
        (
            Table("ab"),
            {},
            r"^inputs: a b 0 1, must be a list of rows; put brackets around one row, and turn a table into",
        ),
        (("a", "b"), {}, r"^inputs: \('a', 'b'\), must be a list of rows"),
        (None, {}, r"^inputs: None, must be a list of rows"),
        ([{"a", "b"}], {}, r"^inputs\[0\]: \{'.', '.'\}, must be a text, a pair"),
        ([bytearray(b"ab")], {}, r"^inputs\[0\]: bytearray\(b'ab'\), must be a text, a pair"),
        (["a", "b\ud800"], {}, r"^inputs\[1\]: .*surrogates not allowed"),
        ([[*CHAT, "b", "c"]], {}, r"^inputs\[0\]\[1\]: must be .*, got 'b'"),
        ([[{**CHAT[0], "at": object()}]], {}, r"^inputs\[0\]: object cannot be sent as JSON"),
        (torch.tensor([5, 6]), {}, r"^inputs: tensor\(\[5, 6\]\), must be a list of rows"),
        ([(5, "a")], {}, r"^inputs\[0\]\[0\]: 5, must be a text or messages"),
        ([([1, 2], [3, 4])], {}, r"^inputs\[0\]: shape \[2, 2\] of int64, must be the numbers of one row"),
        ([([1, 2], "a")], {}, r"^inputs\[0\]\[0\]: \[1, 2\], must be a text or messages"),
        ([(CHAT, [])], {}, r"^inputs\[0\]\[1\]: \[\], must have a message"),
        (["a"], {"prompt_lengths": [1]}, r"^prompt_lengths\[0\]: 1, must be 0, as the row is a text"),
        ([[5, 6]], {"prompt_lengths": [1.5]}, r"^prompt_lengths\[0\]: 1.5, must be an integer of at least 0"),
        ([[5, 6]], {"prompt_lengths": [2]}, r"^prompt_lengths\[0\]: 2, must be 0 to 1"),
    ],
)
def test_invalid_inputs_are_refused_by_index_and_not_sent(inputs, options, told):
    def call(reward, server):
        with pytest.raises(ContractError, match=told):
            reward.score(inputs, **options)
        assert server.received == []

    play(call)


def test_rows_of_arrays_iterators_and_columns_are_scored():
    """`Column` stands for one of a table: its index has labels, not positions."""

    class Column(list[Any]):
        dtype = np.dtype(object)
        ndim = 1

        def __getitem__(self, label):
            raise KeyError(label)

    parts = [{"role": "user", "content": np.array([{"type": "text", "text": "Hi"}], object)}, *reply("four")]

    def call(reward, server):
        texts = [
            np.array(["a", "bc"]),
            np.array(["a", "bc"], object),
            (text for text in ("a", "bc")),
            Column(["a", "bc"]),
            ("a", "bc", "def"),
        ]
        known = ({"n": np.int64(i), "all": np.arange(2)} for i in range(2))
        ids = [Column([1, 2]), Column(["p", "r"]), np.array(parts, object)]
        return [reward.score(each).tolist() for each in texts] + [
            reward.score(ids).tolist(),
            reward.score([[1, 2], [3, 4]], known, prompt_lengths=torch.tensor([1, 1])).tolist(),
        ]

    assert play(call) == [[1, 2]] * 4 + [[1, 2, 3]] + [[3, 2, 4], [3, 7]]


def test_score_of_no_rows_is_empty():
    scores = play(lambda reward, _: reward.score([]))
    assert (scores.shape, scores.errors) == ((0,), [])


# ---- use ----


def test_unreachable_server_raises():
    with RewardClient("127.0.0.1:1") as reward, pytest.raises(RequestFailed, match="cannot be reached"):
        reward.score(["a"])


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1",
        "h",
        "h:1/",
        "h:1/v2",
        "h:65536",
        "::1:1",
        "h:1,h:2",
        "u@h:1",
        "h:\uff11",
        None,
        1,
        ["h:1", None],
        [],
    ],
)
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ContractError, match=r"^url: .*, must "):
        RewardClient(url)
    for valid in ("h:1", "[::1]:65535", "dns:h.i:1", "dns:[fe80::1]:1"):
        RewardClient(valid).close()


def test_an_unpickled_client_opens_its_own_connections():
    def call(reward, _):
        assert reward.score(["a"]).tolist() == [1]
        with copy.copy(reward) as other:
            assert other.score_future(["ab"]).result().tolist() == [2]

    play(call)


def test_a_callback_that_would_wait_for_its_own_loop_raises():
    def call(reward, _):
        async def callback(_):
            return reward.score(["a"])

        with pytest.raises(RlhfError, match="a future's callback cannot wait for the client; let another thread"):
            reward._submit(callback).result()

    play(call)


# ---- as functions of trainers ----


def test_as_trl_returns_rewards_or_none_and_sends_columns(caplog):
    def call(reward, server):
        function = reward.as_trl()
        logged = {}
        assert function.__name__ == "triton_reward"  # TRL's name of its metrics
        texts = function(["a", "b", "c"], ["bc", "refuse", "nan"], completion_ids=[[1], [2], [3]], trainer_state=None)
        assert texts == [3, None, None]
        server.received.clear()
        columns = {"answer": ["x", "y"], "image": [object(), object()], "step": 3, "completion_ids": [[1], [2]]}
        rewards = function(
            prompts=[CHAT, CHAT], completions=[reply("Yes"), reply("No")], log_metric=logged.__setitem__, **columns
        )
        sent = [item for inputs in server.received for item in inputs["metadata"][:, 0]]
        assert [name in sent[0] for name in (b'"answer": "x"', b"image", b"completion_ids")] == [True, False, False]
        assert logged == {"reward_components/length": 2.5, "reward_components/verifier": 2.5}
        return rewards

    assert play(call, terms=("length", "verifier")) == [3, 2]
    told = [message for message in caplog.messages if "column" in message]
    assert told == ["reward functions do not receive the column image: object cannot be sent as JSON"]


def test_as_trl_sends_a_completion_of_several_messages_whole():
    """TRL's functions on the server receive the split into prompt and completion that TRL itself would pass."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    used = [call, {"role": "tool", "content": "42"}, *reply("It is 42.")]
    unanswered = used[:2]
    completions = [reply("Yes"), used, unanswered, [*reply("One."), *CHAT, *reply("Two.")]]

    def ask(reward, server):
        reward.as_trl()(prompts=[CHAT] * len(completions), completions=completions)
        return [
            Sample(text.decode(), None, json.loads(metadata))
            for inputs in server.received
            for text, metadata in zip(inputs["sentences"][:, 0], inputs["metadata"][:, 0], strict=True)
        ]

    samples = play(ask)
    assert [sample.response for sample in samples] == ["Yes", "It is 42.", None, "Two."]
    assert "reply_messages" not in samples[0].metadata
    echo = load_function(f"{trl_functions.__file__}:echo")
    for sample, completion in zip(samples, completions, strict=True):
        sample.metadata["expected"] = {"prompts": [CHAT], "completions": [completion]}
        assert echo(sample) == 1


def test_functions_of_trainers_travel_to_other_processes():
    """TRL's asynchronous trainer pickles them, and a column of the data set may have any name."""

    def call(reward, server):
        trl, verl, openrlhf = (
            pickle.loads(pickle.dumps(function))  # noqa: S301 -- its own
            for function in (reward.as_trl(), reward.as_verl("q"), reward.as_openrlhf())
        )
        assert trl.__name__ == trl.func.__name__ == "triton_reward"
        return [
            trl(prompts=["a"], completions=["b"], client=["x"], self=["y"]),
            verl("sums", "5", "5", {"q": "2+3=", "at": np.ones(2)}),
            openrlhf(["ab"], ["a"], [np.int64(1)])["rewards"],
        ]

    assert play(call) == [[2], 5, [2]]


def test_as_verl_returns_a_number_or_raises():
    def call(reward, server):
        function = reward.as_verl()
        info = {"question": "2+3=", "num_turns": np.int64(1)}
        with pytest.raises(RlhfError, match=r"row 0: .*has no tokens"):
            function("sums", "refuse", "5", info)
        chat = reward.as_verl("turns")("sums", "five", None, {"turns": np.asarray(CHAT, object)})
        assert chat == 4
        return function(data_source="sums", solution_str="5", ground_truth="5", extra_info=info, router="unused")

    assert play(call) == 5


def test_as_openrlhf_returns_rewards_scores_and_terms_or_raises():
    def call(reward, server):
        function = reward.as_openrlhf()
        with pytest.raises(RlhfError, match=r"row 1: .*has no tokens"):
            function(["ab", "refuse"], ["a", "r"], ["x", "y"])
        server.received.clear()
        found = function(["ab", "changed"], ["a", "other"], ["x", "y"], role="unused")
        sent = [json.loads(item) for inputs in server.received for item in inputs["metadata"][:, 0]]
        assert sent == [{"label": "x", "prompt": "a", "response": "b"}, {"label": "y"}]
        return found

    rewards = [2.0, 7.0]
    terms = {"length": rewards}
    assert play(call, terms=("length",)) == {"rewards": rewards, "scores": rewards, "extra_logs": terms}


def test_as_openrlhf_leaves_out_terms_that_do_not_apply_to_all_rows():
    served = ServedModel(components=("length", "verdict"))
    scores = Scores.of([RowResult(rewards=(1.0,), components=(2.0, verdict)) for verdict in (1.0, None)], served)
    client = types.SimpleNamespace(score=lambda rows, metadata: scores)
    assert reward_func(client, ["ab", "cd"], ["a", "c"], ["x", "y"])["extra_logs"] == {"length": [2.0, 2.0]}


def trl(prompts, completions, **columns):
    return lambda reward: reward.as_trl()(prompts=prompts, completions=completions, **columns)


def verl(solution, info):
    return lambda reward: reward.as_verl()("sums", solution, "5", info)


def openrlhf(queries, prompts, labels):
    return lambda reward: reward.as_openrlhf()(queries, prompts, labels)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (trl(["a"], ["b", "c"]), r"^completions: 2 entries for 1 rows"),
        (trl([CHAT], [[]]), r"^inputs\[0\]\[1\]: \[\], must have a message"),
        (trl(["a"], None), r"^completions: None, must be a list of rows"),
        (trl("a", "b"), r"^prompts: 'a', must be a list of rows; put brackets"),
        (trl([CHAT, CHAT], [reply("b"), None]), r"^completions\[1\]: None, must be a text or messages"),
        (trl(["a"], [reply("b")]), r"^prompts\[0\]: 'a', must be messages, as completions\[0\] is"),
        (trl(["a"], ["b"], messages=[CHAT]), r"^the column 'messages' has a reserved name; rename it in the data set"),
        (verl("5", None), r"^extra_info: it has no 'question'; name the key of the prompt: as_verl\(prompt_key=…\)"),
        (verl("5", {"q": "2+3="}), r"^extra_info: it has no 'question'; name the key of the prompt"),
        (verl("5", ["q"]), r"^extra_info: \['q'\], must be a dictionary"),
        (verl("5", {"question": None}), r"^extra_info.question: None, must be a text or messages"),
        (verl("5", {"question": "2+3=", "image": object()}), r"^extra_info: object cannot be sent as JSON"),
        (verl(None, {"question": "2+3="}), r"^solution_str: None, must be a text or messages"),
        (openrlhf(["ab"], ["a", "b"], ["x"]), r"^queries: 1 entries for 2 rows"),
        (openrlhf(["ab"], ["a"], []), r"^labels: 0 entries for 1 rows"),
        (openrlhf(["ab"], [[1]], ["x"]), r"^prompts\[0\]: \[1\], must be a text or messages"),
    ],
)
def test_malformed_input_from_a_trainer_is_refused_by_name(call, told):
    def ask(reward, server):
        with pytest.raises(ContractError, match=told):
            call(reward)
        assert server.received == []

    play(ask)


def test_functions_of_trainers_score_all_forms_of_valid_input():
    """Batches without rows, columns of arrays, chats as arrays, and labels that a data set lacks."""
    chats = np.array([*CHAT, *reply("four")], object)

    def call(reward, server):
        return [
            trl([], [])(reward),
            trl(np.array(["a", "b"]), ["b", ""])(reward),
            trl([CHAT, CHAT], [[*reply("x"), *CHAT, *reply("five")], "ab"])(reward),
            verl(np.str_("5"), {"question": np.array("2+3="), 3: np.int64(4)})(reward),
            verl("5", {"question": chats})(reward),
            openrlhf([], [], [])(reward)["rewards"],
            openrlhf(("ab",), np.array(["a"]), None)(reward)["rewards"],
            openrlhf(["abcd"], [CHAT], torch.tensor([3]))(reward)["rewards"],
        ]

    assert play(call) == [[], [2, 1], [4, 2], 5, 1, [], [2], [4]]


def test_reward_functions_raise_while_the_server_is_busy():
    def call(reward, server):
        function = reward.as_trl()
        server.behaviour = lambda model, number: "failed"  # the server's last word on this row
        assert function(["a"], ["b"]) == [None]
        server.behaviour = lambda model, number: "busy"
        for ask in (function, lambda *_: reward.as_verl()("sums", "5", "5", {"question": "2+3="})):
            with pytest.raises(RequestFailed, match="no room"):
                ask(["a"], ["b"])

    play(call)
