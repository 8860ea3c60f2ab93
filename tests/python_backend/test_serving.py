"""Requests and forward passes of a served model: answers, scheduling, swaps under load, deadlines, slow texts.

The server's module is a stand-in: which forward pass runs with which version is not visible from outside.
"""

import contextlib
import importlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import reward_functions
import triton_python_backend_utils as stub
from hypothesis import given
from hypothesis import strategies as st
from live_system import make_run
from loaders import load_language_model
from model_inputs import random_rows, scoring_inputs, training_inputs
from safetensors.numpy import load_file, save_file
from scoring_rig import started
from served_model import served_model
from triton_python_backend_utils import Request
from versions import flip

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE, CheckpointError
from rlhf_triton.python_backend.serving import round_robin
from rlhf_triton.python_backend.serving.round_robin import RoundRobin
from rlhf_triton.python_backend.serving.scheduling import LONG_REQUEST_SHARE, PRESSING_FORWARDS, RowPool
from rlhf_triton.store.journal_entry import Result
from rlhf_triton.store.weights import WeightsError
from rlhf_triton.tools.render_configs import render_configs
from rlhf_triton.trainer.publish import initialise_store
from rlhf_triton.wire.contract import (
    AFTER_CRITIC,
    PROBE_HEADER,
    TRAINING_KEY_HEADER,
    UNNAMED,
    VALUES,
    WHOLE,
    ContractError,
    ScoringRows,
    TokenRow,
    outputs_of,
    texts_array,
)
from rlhf_triton.wire.texts import printable

LONE = "\ud800"
PATIENCE_S = 120.0

# ---- answers: text that Triton and terminals can take, one answer for each request, no exception ----


@pytest.fixture
def serving():
    """Return rlhf_triton.python_backend.serving.triton with the stand-in for Triton's module."""
    return importlib.import_module("rlhf_triton.python_backend.serving.triton")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, äöü 漢字 😀", "plain, äöü 漢字 😀"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        (f"a {LONE} b", "a \\ud800 b"),
        ("right \u202e left", "right \\u202e left"),
        ("x" * 61, "x" * 60 + " …"),
    ],
)
def test_printable_escapes_control_characters_and_truncates(text, shown):
    assert printable(text, limit=60) == shown
    assert shown.encode()


@pytest.mark.parametrize("error", [ContractError(f"messages: {LONE}"), KeyError(LONE), RuntimeError("x" * 100_000)])
def test_errors_with_any_text_are_sent_as_responses(serving, error):
    def handle(call):
        raise error

    requests = [Request({}, ()), Request({}, ())]
    serving.answer_each([*map(serving.Call, requests)], handle)
    for request in requests:
        sent = request.responses.get_nowait().error
        assert len(sent.encode()) < 5000
        assert "\\ud800" in sent or "xxx" in sent


def test_request_is_answered_once_with_escaped_texts(serving):
    request = Request({}, ("reward_errors",))

    def handle(call):
        call.answer({"reward_errors": texts_array(["\x1b[31mred", "", f"{LONE}"])})
        raise RuntimeError("after the answer")

    serving.answer_each([serving.Call(request)], handle)
    sent = request.responses.get_nowait().outputs["reward_errors"]
    assert sent.tolist() == [[b"\\x1b[31mred"], [b""], [b"?"]]
    assert request.responses.empty()


@pytest.mark.parametrize("failures", [1, 9])
def test_response_that_cannot_be_sent_becomes_an_error_response(serving, monkeypatch, failures):
    send = Request.send
    tried = []

    def refuse(self, *arguments, **named):
        tried.append(1)
        if len(tried) <= failures:
            raise MemoryError("/dev/shm is full")
        send(self, *arguments, **named)

    monkeypatch.setattr(Request, "send", refuse)
    request = Request({}, ())
    serving.answer_each([serving.Call(request)], lambda call: call.answer({}))
    errors = [] if request.responses.empty() else [request.responses.get_nowait().error]
    assert errors == ([] if failures > 1 else ["INTERNAL: MemoryError: /dev/shm is full"])
    assert request.responses.empty()


def test_training_key_header_must_be_text(serving):
    """A client may send parameters of any JSON type in the body, under the header's name."""
    for value in (5, True, None, 1.5):
        call = serving.Call(Request({}, (), json.dumps({TRAINING_KEY_HEADER: value})))
        assert call.header(TRAINING_KEY_HEADER) is None
    call = serving.Call(Request({}, (), json.dumps({TRAINING_KEY_HEADER.title(): "secret"})))
    assert call.header(TRAINING_KEY_HEADER) == "secret"


@pytest.mark.parametrize(
    ("parameters", "counted"),
    [("{}", [400]), (json.dumps({PROBE_HEADER: "1"}), []), (None, [400])],
    ids=["request", "probe", "header that is not UTF-8"],
)
def test_errors_of_requests_are_counted_but_not_of_probes(serving, monkeypatch, parameters, counted):
    """critic_train and critic_save must refuse a probe: the alert on refused requests fired at each start."""

    def undecodable(self):
        return b"\xff".decode()

    request = Request({}, (), parameters or "")
    if parameters is None:
        monkeypatch.setattr(Request, "parameters", undecodable)
    statuses = []
    call = serving.Call(request, statuses.append)
    call.fail(ContractError("returns[1, 2]: nan, must be finite"))
    assert statuses == counted
    assert request.responses.get_nowait().error is not None


HIDE = """
import mmap, sys, tempfile
from pathlib import Path
from rlhf_triton.python_backend.serving.triton import _hide_requests

library = Path(sys.argv[1]).open("r+b")
with tempfile.NamedTemporaryFile(dir="/dev/shm") as region:
    region.write(bytes(10))
    region.flush()
    Path(region.name).chmod(0o644)
    mapped = [mmap.mmap(file.fileno(), 0) for file in (library, region)]
    _hide_requests()
    print(oct(Path(region.name).stat().st_mode & 0o777))
"""


def test_shared_memory_files_are_private_even_with_a_non_ascii_library_path(tmp_path):
    """A stub decodes as ASCII, also the names of its libraries' folders."""
    (tmp_path / "übung").write_bytes(b"a library")
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "support" / "stub"), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", HIDE, str(tmp_path / "übung")]
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout == "0o600\n"


# ---- scheduling: oldest first, mates of its length, no starvation ----


def pool(*, budget=100, overhead=10):
    return RowPool(token_budget=budget, overhead_tokens=overhead)


@pytest.mark.parametrize(
    ("settings", "rows", "expected"),
    [
        ({"overhead": 0}, {"a": 50, "b": 3, "c": 90, "d": 20}, ["a", "b", "c", "d"]),  # in order of arrival
        ({}, {"a": 20, "b": 60, "c": 25, "d": 15, "e": 21}, ["daec", "b"]),  # 4 x 25 tokens; "b" would pad 3 x 35 more
        ({}, {"a": 30, "b": 19}, ["a", "b"]),  # 11 of padding cost more than a forward pass
        ({}, {"a": 30, "b": 20}, ["ba"]),
        ({}, {"a": 20, "b": 20, "c": 20, "d": 24}, ["abc", "d"]),  # a longer row pads each: 3 x 4 tokens
        ({"budget": 30}, dict.fromkeys("abcdefg", 10), ["abc", "def", "g"]),
        ({"budget": 40}, dict.fromkeys("abc", 20), ["ab", "c"]),
        ({"budget": 40}, dict.fromkeys("ab", 500), ["a", "b"]),  # longer than the budget
    ],
)
def test_row_pool_batches_rows_of_similar_length_with_the_oldest(settings, rows, expected):
    waiting = pool(**settings)
    for name, length in rows.items():
        waiting.add(name, [length])
    taken = []
    while batch := waiting.take():
        taken.append("".join(name for name, _ in batch))
    assert taken == expected


def test_row_pool_interleaves_short_requests_with_a_long_one():
    waiting = pool(budget=10, overhead=0)
    waiting.add("long", [10] * 100)
    assert [waiting.take()[0][0] for _ in range(5)] == ["long"] * 5
    waiting.add("short", [9])
    assert [waiting.take()[0][0] for _ in range(3)] == ["short", "long", "long"]
    waiting.discard("long")
    waiting.add("long", [10] * 20)
    served = []
    for number in range(200):
        waiting.add(f"short {number}", [9])
        served.append(waiting.take()[0][0])
    assert served.count("long") == 20
    assert served[: 20 * LONG_REQUEST_SHARE].count("long") < 20


def test_row_pool_bounds_the_pressing_tokens_of_a_long_request():
    waiting = pool(budget=10, overhead=0)
    waiting.add("long", [10] * 100)
    waiting.add("short", [7])
    assert (waiting.tokens, waiting.pressing_tokens) == (1007, PRESSING_FORWARDS * 10 + 7)
    for _ in range(98):
        waiting.take()
    assert (waiting.tokens, waiting.pressing_tokens) == (30, 30)
    waiting = pool()
    for name in ("old a", "new b", "old c"):
        waiting.add(name, [10])
    assert waiting.take(lambda name: name.startswith("old")) == [("old a", 0), ("old c", 0)]
    assert waiting.take() == [("new b", 0)]


@given(
    requests=st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=9), max_size=12),
    budget=st.integers(1, 400),
    overhead=st.integers(0, 200),
    discarded=st.sets(st.integers(0, 11)),
)
def test_row_pool_returns_each_row_once_within_the_token_budget(requests, budget, overhead, discarded):
    waiting = RowPool(token_budget=budget, overhead_tokens=overhead)
    for owner, lengths in enumerate(requests):
        waiting.add(owner, lengths)
    for owner in discarded:
        waiting.discard(owner)
    kept = {owner: lengths for owner, lengths in enumerate(requests) if owner not in discarded}
    assert waiting.tokens == sum(map(sum, kept.values()))
    left = []
    while (oldest := waiting.oldest()) is not None:
        batch = waiting.take()
        assert any(owner == oldest for owner, _ in batch)
        lengths = [requests[owner][index] for owner, index in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= budget
        left += batch
    assert sorted(left) == [(owner, index) for owner, lengths in kept.items() for index in range(len(lengths))]
    assert (len(waiting), waiting.tokens, waiting.pressing_tokens, waiting.take()) == (0, 0, 0, [])


def test_round_robin_finishes_short_jobs_first_and_all_at_close(monkeypatch):
    monkeypatch.setattr(round_robin, "SLICE_S", 0.0)  # a step is a slice
    log = []
    begin = threading.Event()

    def job(name, steps):
        begin.wait(PATIENCE_S)  # until all are there
        for _ in range(steps):
            yield
        log.append(name)

    jobs = RoundRobin("test")
    for name, steps in (("long", 50), ("short", 2), ("shorter", 1)):
        jobs.submit(job(name, steps))
    begin.set()
    jobs.close()
    assert log == ["shorter", "short", "long"]


# ---- forward passes ----


class Model:
    """A model whose forward passes run when the test allows, each for two seconds of a manual clock.

    `ran` records version and number of rows of each pass; the values are the version. Sentences are read once
    `may_read` is set.
    """

    version = 1

    def __init__(self, scoring, patch, **settings):
        self.now = 100.0
        self.begun = 0
        self.ran = queue.Queue()
        self.go = threading.Semaphore(0)
        self.may_read = threading.Event()
        self.reply = {VALUES: lambda done: np.full((len(done.rows), 1), self.number(done.model))}
        patch.setattr(scoring, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.loaded = started(self, **settings)

    def number(self, version):
        return version

    def read(self, call):
        sentences = call.array("sentences")
        if sentences is not None:
            return ScoringRows(self.tokenized(sentences), unread_bytes=10)
        return ScoringRows([TokenRow(row) for row in call.array("tokens")])

    def tokenized(self, sentences):
        assert self.may_read.wait(PATIENCE_S)
        if b"bad" in sentences[0, 0]:
            raise ValueError("a bad sentence")
        yield TokenRow(np.zeros(1, np.int64))

    def forward(self, model, rows, width):
        self.begun += 1
        assert self.go.acquire(timeout=PATIENCE_S)
        self.now += 2.0
        self.ran.put((model, len(rows)))
        return lambda: [np.zeros(1)] * len(rows)

    def run(self, forwards):
        self.go.release(forwards)
        return [self.ran.get(timeout=PATIENCE_S) for _ in range(forwards)]

    def end(self):
        """Let all received requests be answered, and end the threads."""
        self.go.release(10_000)
        self.may_read.set()
        self.loaded.finalize()

    def swap_during(self, forward):
        """Serve version 2 once this forward pass is in progress, as the follower's single assignment does."""
        deadline = time.monotonic() + PATIENCE_S
        while self.begun < forward:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.version = 2


@pytest.fixture
def make_model(scoring, monkeypatch):
    made = []

    def make(**settings):
        made.append(Model(scoring, monkeypatch, **settings))
        return made[-1]

    yield make
    for model in made:
        model.end()


def rows_of(num, width, *outputs):
    return Request({"tokens": np.zeros((num, width), np.int64)}, (VALUES, *outputs))


def answers(*requests):
    return [request.responses.get(timeout=PATIENCE_S) for request in requests]


def test_swap_under_a_backlog_takes_effect_within_two_micro_batches(make_model):
    # ten rows a forward pass
    model = make_model(token_budget=200)
    requests = [rows_of(1, 20) for _ in range(600)]
    threading.Thread(target=model.loaded.execute, args=[requests], daemon=True).start()  # until the backlog is short
    assert model.run(3) == [(1, 10)] * 3
    model.swap_during(4)
    assert model.run(2) == [(1, 10), (2, 10)]
    assert set(model.run(55)) == {(2, 10)}
    versions = [answer.outputs[VALUES].item() for answer in answers(*requests)]
    assert versions == [1] * 40 + [2] * 560


def test_a_started_request_keeps_its_version_without_blocking_others(make_model):
    model = make_model(token_budget=200)
    long = rows_of(40, 20)
    short = [rows_of(1, 20) for _ in range(60)]
    model.loaded.execute([long])
    assert model.run(1) == [(1, 10)]
    model.loaded.execute(short)
    model.swap_during(2)
    ran = model.run(9)
    assert (2, 10) in ran[1:3], "requests that have not started wait for the long one"
    assert sum(rows for version, rows in ran if version == 1) == 30, (
        "the old version scored other rows than the long request's"
    )
    assert answers(long)[0].outputs[VALUES].tolist() == [[1]] * 40
    assert {answer.outputs[VALUES].item() for answer in answers(*short)} == {2}


def test_request_not_started_by_its_deadline_is_refused(make_model):
    model = make_model(token_budget=10, queue_timeout_s=1)
    requests = [rows_of(3, 10) for _ in range(2)]
    model.loaded.execute(requests)
    model.run(3)
    (refused,) = [answer.error for answer in answers(*requests) if answer.error is not None]
    assert "deadline passed" in refused


def demanding(**parameters):
    return Request({"tokens": np.zeros((2, 10), np.int64)}, (VALUES,), json.dumps(parameters))


class Numbered(Model):
    """A model with numbered versions, one of which may be about to be swapped in."""

    def __init__(self, *arguments, **settings):
        self.coming = 0
        self.version = types.SimpleNamespace(number=1)
        super().__init__(*arguments, **settings)

    def number(self, version):
        return version.number

    def is_arriving(self, demanded):
        return demanded.includes(self.coming)

    def swap(self, number):
        self.version = types.SimpleNamespace(number=number)
        self.changed()


@pytest.fixture
def numbered(scoring, monkeypatch):
    model = Numbered(scoring, monkeypatch, token_budget=100)
    yield model
    model.end()


def test_request_for_a_version_not_served_is_refused_alone(numbered):
    good = [rows_of(1, 10), demanding(min_version=0), demanding(min_version=1), demanding(exact_version=1)]
    bad = [demanding(min_version=2), demanding(exact_version=0), demanding(min_version=-1)]
    inside = demanding(min_version=2)
    inside.inputs = {**inside.inputs, AFTER_CRITIC: np.zeros((2, 1), np.int64)}  # the reward, within critic_infer
    requests = [*good, *bad, inside]
    numbered.loaded.execute(requests)
    numbered.run(1)
    found = answers(*requests)
    assert [answer.outputs[VALUES][0, 0] for answer in (*found[:4], found[-1])] == [1] * 5
    assert [answer.error for answer in found[4:-1]] == [
        "UNAVAILABLE: m serves version 1, but the request demands version 2 or newer",
        "UNAVAILABLE: m serves version 1, but the request demands version 0",
        "INVALID_ARG: min_version: -1, must be an integer of at least 0",
    ]


def test_request_waits_briefly_for_a_swap_to_its_demanded_version(numbered):
    """The version may be rejected. The wait is short, because another server may be faster."""
    numbered.coming = 2
    numbered.loaded.execute([waiting := demanding(min_version=2)])
    assert waiting.responses.empty()
    numbered.swap(2)
    numbered.run(1)
    assert answers(waiting)[0].outputs[VALUES].tolist() == [[2], [2]]
    numbered.coming = 3
    numbered.loaded.execute([rejected := demanding(exact_version=3)])
    assert rejected.responses.empty()
    numbered.coming = 0
    numbered.changed()
    assert "m serves version 2, but the request demands version 3" in str(answers(rejected)[0].error)
    numbered.coming = 3
    numbered.loaded.execute([late := demanding(exact_version=3)])
    numbered.now += 1.0
    assert "m serves version 2" in str(answers(late)[0].error)
    numbered.loaded.execute([last := demanding(exact_version=3)])
    numbered.loaded.finalize()
    assert "m serves version 2" in str(answers(last)[0].error)


def test_request_for_an_exact_version_fails_if_it_is_swapped_out_first(numbered):
    first = rows_of(1, 64)
    exact = demanding(exact_version=1)
    least = demanding(min_version=1)
    numbered.loaded.execute([first])
    numbered.loaded.execute([exact, least])
    while not numbered.begun:  # the first pass is under way, with version 1
        time.sleep(0.001)
    numbered.swap(2)
    numbered.run(2)
    assert "m serves version 2, but the request demands version 1" in str(answers(exact)[0].error)
    assert answers(least)[0].outputs[VALUES].tolist() == [[2], [2]]


def test_requests_are_answered_while_triton_refuses_counters(make_model, serving, monkeypatch):
    model = make_model(token_budget=10)
    sent = []
    named = serving.NamedCounters("m", "f", "", "counter")

    def refuse(*_, **__):
        raise RuntimeError("Failed to allocate shared memory")

    with monkeypatch.context() as patch:
        patch.setattr(stub.MetricFamily, "Metric", refuse)
        named.add({"a": 1.0})
    monkeypatch.setattr(stub.MetricFamily, "increment", refuse)
    named.add({"a": 1.0})
    for i in range(3):  # the clock advances by more than the interval between two updates of the counters
        if i == 2:
            monkeypatch.setattr(stub.MetricFamily, "increment", lambda metric, amount: sent.append(amount))
        model.loaded.execute([request := rows_of(3, 10)])
        model.run(3)
        assert answers(request)[0].error is None
    assert sum(sent) == 9 + 9 + 90, "forward passes are missing from the counters"


def sentence(text=b"A list"):
    return Request({"sentences": np.asarray([[text]], dtype=np.object_)}, (VALUES,))


def test_token_requests_do_not_wait_for_sentences_being_tokenised(make_model):
    model = make_model(token_budget=100)
    slow = sentence()
    bad = sentence(b"bad")
    tokens = rows_of(2, 3)
    model.go.release(2)
    model.loaded.execute([slow, bad, tokens])
    assert answers(tokens)[0].outputs[VALUES].shape == (2, 1)
    assert slow.responses.empty()
    model.may_read.set()
    model.loaded.finalize()  # what was received is still answered
    assert slow.responses.get_nowait().outputs[VALUES].shape == (1, 1)
    assert bad.responses.get_nowait().error == "INTERNAL: ValueError: a bad sentence"


def test_execute_blocks_above_the_limit_of_unread_sentence_bytes(make_model, scoring, monkeypatch):
    monkeypatch.setattr(scoring, "MAX_UNREAD_BYTES", 15)
    model = make_model(token_budget=100)
    model.go.release(2)
    thread = threading.Thread(target=model.loaded.execute, args=[[sentence(), sentence()]], daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    model.may_read.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


# ---- no model ever sends an output that its caller did not request: in Triton's stub, that is memory corruption ----
# `Call.answer` tells why. The empty request stands for any that leaves out the one output of a model.

KINDS = {
    "reward_checkpoint": "reward",
    "reward_function_length": "function",
    "reward_mixture": "mixture",
    **{name: name for name in ("critic", "critic_train", "critic_save", "reference")},
}
OUTPUTS = {
    model: tuple(output.name for output in outputs_of(kind, traits=(WHOLE,)) if output.name != UNNAMED)
    for model, kind in KINDS.items()
}
ENSEMBLES = {"critic_infer", "reward_model"}
REQUESTED = [
    pytest.param(model, requested, id=f"{model}-{'+'.join(requested) or 'none'}")
    for model, outputs in OUTPUTS.items()
    for count in range(len(outputs) + 1)
    for requested in itertools.combinations(outputs, count)
]
ROWS = random_rows([3, 7], seed=1)
COLUMN = np.asarray([[0.5], [1.5]], np.float32)
SCORING = {**scoring_inputs(ROWS), "prompt_lengths": np.asarray([[1], [2]])}
INPUTS = {
    "critic_train": training_inputs(seed=2),
    "critic_save": {"dummy_var": np.zeros(1, np.int64)},
    "reward_mixture": {
        "component_model": COLUMN,
        "component_length": COLUMN,
        "error_length": texts_array(["", "no score"]),
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoints):
    """Return a run whose repository has every model."""
    rewards = {
        "model": {"weight": 1.0},
        "length": {"function": f"{reward_functions.__file__}:num_tokens"},
    }
    run = make_run(tmp_path_factory.mktemp("run"), checkpoints, actor={"kl_reference": "triton"}, rewards=rewards)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    return run


def test_training_payloads_are_not_checked_against_a_damaged_config(run):
    path = run.store.folder(0) / "config.json"
    flip(path)
    try:
        with (
            pytest.raises(WeightsError, match=r"version 0: config\.json has digest"),
            served_model(run.config, "critic_train"),
        ):
            pass
    finally:
        flip(path)


@pytest.mark.parametrize("model", ["reward_model", "reference"])
def test_a_process_that_replaces_another_does_not_load_another_model(tmp_path, checkpoints, model):
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.reward if model == "reward_model" else checkpoints.policy, folder)
    section = {model.removesuffix("_model"): {"model": str(folder)}}
    config = make_run(tmp_path / "run", checkpoints, actor={"kl_reference": "triton"}, **section).config

    def train_again():
        tensors = {name: tensor + 1 for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
        save_file(tensors, folder / WEIGHTS_FILE)

    with (
        pytest.raises(CheckpointError, match=r"has another model, config\.json or tokenizer than"),
        served_model(config, model, before_load=train_again),
    ):
        pass


@pytest.fixture(scope="module")
def models(run):
    """Each model, loaded from its rendered configuration into this process."""
    assert render_configs(run.config).keys() - ENSEMBLES == OUTPUTS.keys()
    with contextlib.ExitStack() as stack:
        yield {model: stack.enter_context(served_model(run.config, model)) for model in OUTPUTS}


def answer_to(model, request, run):
    """Return the model's answer; finish at once what it journals."""
    assert model.execute([request]) is None
    for entry in run.journal.entries():
        if run.journal.result(entry) is None:
            digest = run.journal.load(entry)[1] if entry.kind == "train" else None
            run.journal.finish(entry, Result(entry=entry.name, weights_version=1, loss_mean=0.25, digest=digest))
    return request.responses.get(timeout=PATIENCE_S)


def test_reference_sends_the_log_probs_of_each_row(models, run):
    found = answer_to(models["reference"], Request(SCORING, ("logprobs",)), run).outputs["logprobs"]
    model = load_language_model(run.config.reference.model, banned_token_ids=[0, 2])
    for ours, row, expected in zip(found, ROWS, model.launch(ROWS)(), strict=True):
        np.testing.assert_allclose(ours[: row.size], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("model", "requested"), REQUESTED)
def test_exactly_the_requested_outputs_are_sent(models, run, model, requested):
    request = Request(INPUTS.get(model, SCORING), requested)
    response = answer_to(models[model], request, run)
    assert response.error is None
    assert set(response.outputs) == set(requested)
    assert request.num_looks_at_outputs <= 1  # each builds a new set of strings


def test_optional_outputs_are_not_sent_if_the_request_names_none(models, run):
    """Triton then names all that the configuration declares."""
    model = "reward_checkpoint"
    response = answer_to(models[model], Request(SCORING, (*OUTPUTS[model], UNNAMED)), run)
    assert set(response.outputs) == set(OUTPUTS[model]) - {"probabilities"}


@pytest.mark.parametrize("requested", [["after_critic"], ["weights_version"]])  # the first: `rewards` of critic_infer
def test_critic_runs_a_forward_only_if_values_are_requested(models, run, monkeypatch, requested):
    def fail(*_):
        raise AssertionError("no forward is needed")

    monkeypatch.setattr(models["critic"].served, "forward", fail)
    response = answer_to(models["critic"], Request(SCORING, requested), run)
    assert {name: array.tolist() for name, array in response.outputs.items()} == {requested[0]: [[0], [0]]}
    refused = answer_to(models["critic"], Request(SCORING, ["values"]), run)
    assert refused.error == "INTERNAL: AssertionError: no forward is needed"
