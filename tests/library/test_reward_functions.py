"""Reward functions in their worker processes, groups, TRL's functions, the weighted sum, and the Triton model."""

import ctypes
import importlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openai
import psutil
import pytest
import reward_functions
import trl_functions
from chat_server import ChatServer
from tiny_tokenizers import make_text_tokenizer
from triton_python_backend_utils import Request

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import BadScore, FunctionError
from rlhf_triton.python_backend.serving.reward_mixture import weighted_sum
from rlhf_triton.rewards import count
from rlhf_triton.rewards.counters import take_counts
from rlhf_triton.rewards.function import load_function
from rlhf_triton.rewards.groups import group_key
from rlhf_triton.rewards.judge import Judge
from rlhf_triton.rewards.pool import FunctionCall, ScoreOutcome, WorkerPool
from rlhf_triton.rewards.sample import Sample
from rlhf_triton.rewards.scores import NOT_APPLICABLE, checked
from rlhf_triton.tools.render_configs import parse_pbtxt, render_configs
from rlhf_triton.wire.contract import PROBE_HEADER, REWARD_COMPONENT, REWARD_ERROR, ContractError
from rlhf_triton.workers import pool as workers_module

FILE = Path(reward_functions.__file__)
TRL_FILE = Path(trl_functions.__file__)
ROOT = FILE.parent.parent
LIMIT_S = 60.0
SPEC = "rlhf_triton.rewards.judge:Judge"
KEY = "sk-very-secret-0123456789"
WRONG_URLS = (
    "host:8000/v1",
    f"http://user:{KEY}@h/v1",
)


@pytest.fixture
def make_pool():
    """Starts pools, and closes them."""
    made = []
    before = workers()

    def make(
        spec="by_row",
        *,
        num_workers=1,
        timeout_s=60.0,
        max_waiting=math.inf,
        **call,
    ):
        spec = spec if ":" in spec else f"{FILE}:{spec}"
        settings = FunctionCall(spec=spec, timeout_s=timeout_s, **call)
        made.append(WorkerPool(settings, num_workers=num_workers, max_waiting=max_waiting))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    assert workers() == before


@pytest.fixture(scope="module")
def pool():
    """Return two workers, for samples that do not kill them."""
    pool = WorkerPool(FunctionCall(spec=f"{FILE}:by_row", timeout_s=60.0), num_workers=2)
    yield pool
    pool.close()


def limit_passes_when_these_hang(monkeypatch, files):
    """Advance the pools' clock by LIMIT_S whenever one of these files is written, by a function that then hangs."""

    def monotonic():
        return LIMIT_S * sum(file.is_file() and file.stat().st_size > 0 for file in files)

    monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=monotonic))


def workers():
    """Return the worker processes of this process."""
    return [child for child in psutil.Process().children() if "rlhf_triton.rewards.worker" in child.cmdline()]


def doing(*actions, **metadata):
    """Return one sample per action; sample i has i tokens."""
    return [Sample("text", [0] * i, {**({"do": a} if a else {}), **metadata}) for i, a in enumerate(actions)]


def responses(*texts, **metadata):
    """Return one sample per response, with as many tokens as it has letters."""
    return [Sample(each, [0] * len(each), {"response": each, "prompt": "p", **metadata}) for each in texts]


def scored(pool, *groups):
    """The outcomes of each group of one request."""
    return pool.submit([[*group] for group in groups]).result(timeout=120)


def outcomes(pool, samples):
    """The outcome of each sample, alone in its group."""
    return [outcome for (outcome,) in scored(pool, *([sample] for sample in samples))]


def errors_of(found):
    """Return the errors without line numbers; a sample has a score only if it has no error."""
    assert all(math.isnan(outcome.score) == bool(outcome.error) for outcome in found)
    return [re.sub(r" \(reward_functions.py:\d+\)$", "", outcome.error) for outcome in found]


# ---- worker processes: a failure costs its own sample ----


def test_worker_pool_returns_each_samples_own_score(pool):
    assert outcomes(pool, doing(*[None] * 500)) == [ScoreOutcome(float(i)) for i in range(500)]
    huge = Sample("é" * 10**6, [], {"do": "huge", "blob": "x" * 10**7})  # larger than any buffer
    assert outcomes(pool, [huge]) == [ScoreOutcome(1e7)]


def test_failing_function_fails_only_its_own_sample(make_pool):
    causes = {
        "raise": "RuntimeError: no verdict on None",
        "exit": "SystemExit: enough",
        "die": "the worker process ended with exit code 3",
        "crash": "the worker process was killed by SIGSEGV",
        "memory": "MemoryError",
        "nan": "the function returned nan, but it must return a finite number",
        "infinity": "the function returned inf, but it must return a finite number",
        "text": "the function returned '1.0', but it must return a number",
        "none": "the function returned None, but it must return a number",
        "print": "",
    }
    before, *found, after = outcomes(make_pool(num_workers=2), doing(None, *causes, None))
    assert errors_of(found) == [*causes.values()]
    assert (before.score, after.score) == (0, len(causes) + 1)


def test_child_forked_by_a_reward_function_returns_no_score(make_pool):
    found = outcomes(make_pool(), doing(*["fork"] * 3, "pid", *[None] * 16, "pid"))
    assert [outcome.score for outcome in (*found[:3], *found[4:-1])] == [0, 1, 2, *range(4, 20)]
    assert found[3] == found[-1], "the worker process was replaced"


def test_timeout_kills_the_worker_and_all_its_child_processes(make_pool, monkeypatch, tmp_path):
    """No zombie is left: this process inherits orphans, as process 1 of a container does.

    Waiting for a worker does not count: the last sample waits for three time limits.
    """
    prctl = ctypes.CDLL(None).prctl
    subreaper = 36
    others = psutil.Process().children()
    files = [tmp_path / action for action in ("loop", "program", "daemon")]
    limit_passes_when_these_hang(monkeypatch, files)
    assert prctl(subreaper, 1) == 0
    try:
        pool = make_pool(timeout_s=LIMIT_S)
        hanging = [doing(path.name, pid_file=str(path))[0] for path in files]
        first, *killed, second, last = outcomes(pool, [*doing("pid"), *hanging, *doing("pid", None)])
        pool.close()
        assert psutil.Process().children() == others
    finally:
        prctl(subreaper, 0)
    assert errors_of(killed) == ["took longer than 60 s and was killed"] * 3
    assert first.score != second.score
    assert last == ScoreOutcome(1.0)
    pids = [int(first.score), *(int(path.read_text()) for path in files)]
    assert [psutil.pid_exists(pid) for pid in pids] == [False] * 4


def test_functions_of_the_working_directory_are_found_and_replace_no_other_modules(make_pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.py").write_text("raise AssertionError('not the standard library')")
    (tmp_path / "verdicts.py").write_text("import inspect\n\n\ndef one(sample):\n    return 1.0\n")
    assert outcomes(make_pool("verdicts:one"), responses("a")) == [ScoreOutcome(1.0)]


def test_worker_that_breaks_the_protocol_is_replaced(make_pool):
    pool = make_pool()
    for bad in doing("two results", "foreign result", "no results", "garbled frame", "foreign frame"):
        before, failed, after = outcomes(pool, [*doing("pid"), bad, *doing("pid")])
        assert failed.error
        assert (before.error, after.error) == ("", "")
        assert before.score != after.score, "the worker has not been killed"
    deep = []
    for _ in range(5000):
        deep = [deep]
    failed, after = outcomes(pool, [Sample("", [], {"deep": deep}), *doing(None)])
    assert (failed.error != "", after.error) == (True, "")


def test_a_worker_that_is_killed_while_idle_costs_at_most_one_sample(make_pool):
    pool = make_pool()
    (worker,) = outcomes(pool, doing("pid"))
    os.kill(int(worker.score), signal.SIGKILL)
    found = outcomes(pool, doing(*[None] * 20))
    assert sum(bool(outcome.error) for outcome in found) <= 1
    assert {outcome.error for outcome in found} <= {"", "the worker process was killed by SIGKILL"}


def test_workers_inherit_only_their_own_secret(make_pool, monkeypatch):
    hidden = ["KEY_OF_ANOTHER", "WANDB_API_KEY"]
    inherited = ["HF_TOKEN", "OPENAI_API_KEY"]
    for name in (*hidden, *inherited):
        monkeypatch.setenv(name, "secret")
    pool = make_pool("Keyed", options={"api_key_env": "HF_TOKEN"}, hidden_variables=["KEY_OF_ANOTHER"])
    asked = [Sample("", [], {"do": "inherited", "names": names}) for names in (hidden, inherited)]
    assert outcomes(pool, asked) == [ScoreOutcome(0.0), ScoreOutcome(2.0)]


def test_small_requests_overtake_large_ones_in_the_worker_pool(make_pool):
    pool = make_pool(max_waiting=202)
    long, short = (pool.submit([[sample] for sample in doing(*[None] * number)]) for number in (200, 2))
    with pytest.raises(RuntimeError, match=r"samples are waiting, 200 more exceed the limit of 202; send fewer rows"):
        pool.submit([doing(*[None] * 200)]).result(120)
    assert short.result(120) == [[ScoreOutcome(0.0)], [ScoreOutcome(1.0)]]
    assert not long.done()
    assert len(long.result(120)) == 200


def test_close_kills_a_running_function_and_fails_pending_samples(make_pool):
    pool = make_pool()
    pending = pool.submit([[sample] for sample in doing("loop", None)])
    pool.close()
    assert [bool(outcome.error) for (outcome,) in pending.result(0)] == [True, True]


def test_workers_end_if_their_parent_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    script = (
        "import sys, time\n"
        "from rlhf_triton.rewards.pool import FunctionCall, WorkerPool\n"
        "from rlhf_triton.rewards.sample import Sample\n"
        "pool = WorkerPool(FunctionCall(spec=sys.argv[1], timeout_s=600.0), num_workers=2)\n"
        "for action in ({'do': 'daemon', 'pid_file': sys.argv[2]}, {'do': 'loop'}):\n"
        "    pool.submit([[Sample('', [], action)]])\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, f"{FILE}:by_row", str(pid_file)], cwd=ROOT) as parent:
        children = []  # two workers, what watches each, the daemon, perhaps what began it
        while not pid_file.is_file() or pid_file.read_text() not in [f"{child.pid}\n" for child in children]:
            assert parent.poll() is None
            children = psutil.Process(parent.pid).children(recursive=True)
        os.kill(parent.pid, signal.SIGKILL)
    assert len(children) >= 5
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, gone


@pytest.mark.parametrize(
    ("spec", "text", "cause"),
    [
        ("missing.py:score", "", "missing.py:score cannot be imported: FileNotFoundError: missing.py does not exist"),
        ("no.such_module:score", "", "cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (f"{FILE}:nothing", "", f"cannot be imported: {FILE} has no 'nothing'"),
        (f"{FILE}:_ACTIONS", "", "defines '_ACTIONS' as dict, not a function"),
        ("broken.py:score", "import time\ntime.sleep(3600)", "cannot be imported: took longer than 1 s"),
    ],
)
def test_unimportable_reward_function_raises_one_sentence(tmp_path, monkeypatch, spec, text, cause):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(text)
    before = workers()
    monkeypatch.setattr(workers_module, "START_LIMIT_S", 1.0 if "sleep" in text else 60.0)
    with pytest.raises(FunctionError, match=re.escape(cause)):
        WorkerPool(FunctionCall(spec=spec, timeout_s=1.0), num_workers=2)
    assert workers() == before


# ---- functions, samples and options ----


def test_a_worker_that_replaces_another_runs_the_same_code(make_pool, tmp_path):
    """Whoever edits the file during a run gets scores of one function all the same."""
    file = tmp_path / "edited.py"
    text = "import os\n\ndef score(sample):\n    return {} if sample.text else os._exit(1)\n"
    file.write_text(text.format(1.5))
    pool = make_pool(f"{file}:score", num_workers=1)
    file.write_text(text.format(2.5))
    outcomes = [pool.submit([[Sample(sent, [], {})]]).result()[0][0] for sent in ("a", "", "a")]
    assert [outcome.score for outcome in outcomes[::2]] == [1.5, 1.5]
    assert "ended with exit code 1" in outcomes[1].error


def test_reward_file_can_import_modules_beside_it(make_pool, tmp_path):
    (tmp_path / "neighbour_of_a_reward.py").write_text("OFFSET = 2\n")
    path = tmp_path / "with neighbour.py"
    path.write_text("from neighbour_of_a_reward import OFFSET\ndef f(sample): return len(sample.text) + OFFSET\n")
    assert outcomes(make_pool(f"{path}:f"), [Sample("abc")]) == [ScoreOutcome(5.0)]


def test_sample_gives_prompt_and_response_and_checked_accepts_numbers():
    found = [Sample("a b"), Sample("a b", [], {"prompt": "a", "response": " b"}), chat("42"), Sample("", [], NO_TURN)]
    expected = [(None, None), ("a", " b"), ("6 times 7?", "42"), ("", None)]
    assert [(sample.prompt, sample.response) for sample in found] == expected
    assert [checked(value) for value in (True, 3, 0.5)] == [1.0, 3.0, 0.5]


@pytest.mark.parametrize("spec", ["", "name", "file.py", "a b:c", "file.txt/x:name", "file.py:1"])
def test_invalid_function_spec_is_refused(spec):
    with pytest.raises(ValueError, match=re.escape("write path/to/file.py:name or package.module:name")):
        load_function(spec)


@pytest.mark.parametrize(
    ("spec", "options", "cause"),
    [
        (f"{FILE}:Scaled", {"factr": 1}, "unexpected keyword argument 'factr'"),
        (f"{FILE}:Scaled", {"factor": -1}, "cannot be used with its options: ValueError: factor: -1, must be above 0"),
        (f"{FILE}:num_tokens", {"x": 1}, "unexpected keyword argument 'x'"),
        (f"{TRL_FILE}:needs_ids", {}, "only TRL's trainer can pass completion_ids"),
        (f"{TRL_FILE}:contains", {"limit": 1}, "unexpected keyword argument 'limit'"),
        (SPEC, {"modle": "m"}, "options.modle: 'm': Extra inputs are not permitted"),
        *((SPEC, {"base_url": url}, "options.base_url: must be http://host/v1 or https://") for url in WRONG_URLS),
        (SPEC, {"scale": [5, 1]}, "options.scale: [5, 1], must be the lowest score, then the highest"),
        (SPEC, {"pattern": "("}, "options.pattern: '(': missing )"),
        (SPEC, {"pattern": "a"}, "options.pattern: 'a', must have exactly one group"),
        (SPEC, {"rubric": "a\n{% if %}"}, "options.rubric: line 2: "),
        (SPEC, {"api_key_env": "NO_SUCH_VARIABLE"}, "the environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_wrong_function_option_raises_one_sentence(spec, options, cause):
    given = {**({"model": "m", "base_url": "http://h/v1"} if spec == SPEC else {}), **options}
    with pytest.raises(FunctionError, match=f"^{re.escape(spec)}.*{re.escape(cause)}") as caught:
        load_function(spec, given, timeout_s=1.0)
    assert KEY not in str(caught.value)


def test_reward_class_is_created_once_with_its_options_and_reports_counts():
    counted = []
    call = FunctionCall(spec=f"{FILE}:Scaled", timeout_s=2.0, options={"factor": 10})
    pool = WorkerPool(call, num_workers=1, counted=counted.append)
    *found, failed = outcomes(pool, [*responses("a", "bbb"), *responses("c", do="raise")])
    pool.close()
    assert [outcome.score for outcome in found] == [12, 32]  # 2: the time limit
    assert "no verdict" in failed.error
    assert counted == [{"calls": 1, "tokens": 1}, {"calls": 1, "tokens": 3}, {"calls": 1, "tokens": 1}]


@pytest.mark.parametrize(("name", "amount"), [("A", 1), ("a b", 1), ("", 1), ("a", -1), ("a", math.inf)])
def test_count_refuses_invalid_names_and_amounts(name, amount):
    take_counts()  # drop the counts of other tests in this process
    with pytest.raises(ValueError, match="counter"):
        count(name, amount)
    assert take_counts() == {}


# ---- groups ----


def test_a_groupwise_function_may_have_options_and_return_an_array():
    group = [Sample("", [], {"score": score}) for score in (3, 1, 2.5)]
    for margin, expected in ((0.0, [2, 0, 1]), (1.0, [1, 0, 1])):
        assert load_function(f"{FILE}:wins", {"margin": margin})(group).tolist() == expected


def test_groupwise_failure_fails_its_group_and_a_bad_score_only_its_row(make_pool):
    must = "but it must return 3 numbers, one per response"
    causes = {
        "die": "the worker process ended with exit code 3",
        "few": "the function returned 2 scores for a group of 3",
        "many": "the function returned 4 scores for a group of 3",
        "number": f"the function returned 1.0, {must}",
        "text": f"the function returned '1.0', {must}",
        "dict": f"the function returned {{0: 1.0, 1: 1.0, 2: 1.0}}, {must}",
        "set": f"the function returned {{0.5}}, {must}",  # in no order
    }
    pool = make_pool("by_group", groupwise=True)
    groups = [responses("a", "b", "c", do=action) for action in causes]
    *failed, gaps, good = scored(pool, *groups, responses(*"abcde", do="gaps"), responses("d", "e"))
    assert [errors_of(found) for found in failed] == [[cause] * 3 for cause in causes.values()]
    assert good == [ScoreOutcome(2.0), ScoreOutcome(2.0)]
    assert (gaps[0], gaps[4]) == (ScoreOutcome(1.0), ScoreOutcome(0.0))
    assert errors_of(gaps[1:4]) == [
        "the function returned None, but it must return a number",
        "the function returned nan, but it must return a finite number",
        "the function returned 'x', but it must return a number",
    ]


def test_group_key_is_equal_for_rows_with_the_same_group_or_prompt():
    chat = [{"role": "user", "content": "?"}]
    reply = {"role": "assistant", "content": ""}
    alike = [
        [{"group": 1}, {"group": 1, "prompt": "x"}],
        [{"group": "1"}],
        [{"prompt": "1"}, {"prompt": "1", "group": None}],
        [{"messages": chat}, {"messages": [*chat, reply]}],
        [{"messages": [*chat, reply, *chat]}],
    ]
    keys = [{group_key(metadata) for metadata in group} for group in alike]
    assert [len(each) for each in keys] == [1] * len(alike)
    assert len(set.union(*keys)) == len(alike)


def test_group_key_raises_only_contract_errors():
    prompt = []
    for _ in range(10_000):
        prompt = [prompt]
    causes = {f"metadata.group: {bad!r}, must be": {"group": bad, "prompt": "p"} for bad in (True, 1.5, [1], {})}
    causes |= {"metadata has neither group nor prompt": {"messages": []}, "nested too deeply": {"prompt": prompt}}
    for cause, metadata in causes.items():
        with pytest.raises(ContractError, match=re.escape(cause)):
            group_key(metadata)


# ---- TRL's reward functions run unchanged: called with lists; None is no score and no error ----

QUESTION = [{"role": "user", "content": "6 times 7?"}]
NO_TURN = {"messages": []}


def chat(reply, **columns):
    """Return a sample as the actor sends a chat."""
    return Sample(reply, [1], {"response": reply, "messages": QUESTION, **columns})


def message(content):
    return [{"role": "assistant", "content": content}]


@pytest.mark.parametrize("groupwise", [False, True])
def test_trl_function_scores_single_rows_and_groups(make_pool, groupwise):
    group = [chat(rf"\boxed{{{n}}}", solution=text) for n, text in ((42, "42"), (41, "42"), (42, "many"))]
    pool = make_pool(f"{TRL_FILE}:accuracy", groupwise=groupwise)
    found = scored(pool, group)[0] if groupwise else outcomes(pool, group)
    assert found[:2] == [ScoreOutcome(1.0), ScoreOutcome(0.0)]
    assert (math.isnan(found[2].score), found[2].error) == (True, ""), "a function that returned None failed"


@pytest.mark.parametrize(
    ("sample", "prompts", "completions"),
    [
        (responses(" r")[0], ["p"], [" r"]),
        (chat("r"), [QUESTION], [message("r")]),
        (Sample("whole text"), [None], ["whole text"]),  # a client that sends nothing else
        (Sample("", [], {"messages": [*QUESTION, *message("")]}), [QUESTION], [message("")]),  # the gateway
        (Sample("", [], {"messages": QUESTION}), [QUESTION], [message("")]),
    ],
)
def test_trl_function_receives_prompts_completions_and_columns(sample, prompts, completions):
    expected = {"prompts": prompts, "completions": completions, "answer": ["a"], "level": [3]}
    sample.metadata.update({"answer": "a", "level": 3, "expected": expected})
    assert load_function(f"{TRL_FILE}:echo")(sample) == 1


def test_trl_functions_classes_and_coroutines_take_options():
    one, two = (responses(text, answer="a")[0] for text in ("a", "bb"))
    for name, options, scores in (
        ("contains", {}, [1, 0]),
        ("shorter_than", {"limit": 2}, [1, 0]),
        ("Prefers", {"word": "b"}, [0, 1]),
        ("awaits", {}, [1, 0]),
        ("Awaits", {"word": "b"}, [0, 1]),
        ("awaits_too", {}, [1, 0]),
    ):
        function = load_function(f"{TRL_FILE}:{name}", options)
        assert (function([one, two]), function(one)) == (scores, scores[0])
    with pytest.raises(
        FunctionError, match=r"solution is not a column of the prompts \(columns: answer, task\); rename the"
    ):
        load_function(f"{TRL_FILE}:accuracy", columns=["answer", "task"])
    with pytest.raises(ValueError, match="returned 2 scores for a group of 1"):
        load_function(f"{TRL_FILE}:one_too_many")(one)


def test_a_coroutine_is_awaited_within_its_time_limit(make_pool):
    group = responses("a", "bb", answer="a")
    assert scored(make_pool(f"{TRL_FILE}:each_length", groupwise=True), group)[0] == [
        ScoreOutcome(1.0),
        ScoreOutcome(2.0),
    ]
    (hanging,) = outcomes(make_pool(f"{TRL_FILE}:hangs", timeout_s=1.0), group[:1])
    assert "took longer than 1 s and was killed" in hanging.error


def test_trl_functions_get_none_for_missing_columns():
    """Rows of `datasets` have the union of all columns, too."""
    function = load_function(f"{TRL_FILE}:by_task", columns=["answer", "task", "tests"])
    math_, code = responses("ax", answer="x", task="math") + responses("y", task="code", tests=["t"])
    assert function(math_) == 1
    assert function(code) is NOT_APPLICABLE
    assert function([math_, code]) == [1, NOT_APPLICABLE]
    with pytest.raises(FunctionError, match="only TRL's trainer can pass trainer_state; give the parameter a default"):
        load_function(f"{TRL_FILE}:needs_trainer")


# ---- the weighted sum ----


@pytest.mark.parametrize(
    ("weights", "row", "causes", "reward", "error"),
    [
        ([1, 2], [1, 2], ["", ""], 5, ""),
        ([1, 2], [np.nan, 2], ["KeyError: 'x'", ""], np.nan, "a: KeyError: 'x'"),
        ([1, 2], [1, np.inf], ["", ""], np.nan, "b: scored inf, must be finite"),
        ([1, 2], [3e38, 3e38], ["", ""], np.nan, "the weighted sum is inf, must be finite"),
        # A function that does not apply is left out, as in TRL; but where none applies there is no reward, not 0.
        ([1, 2], [np.nan, 2], ["", ""], 4, ""),
        ([1, 2], [np.nan, np.nan], ["", ""], np.nan, "no reward function applies to this row"),
        # A term of weight 0 never touches a row.
        ([1, 0], [3, np.nan], ["", "ValueError: x"], 3, ""),
        ([1, 0], [np.nan, 2], ["ValueError: x", ""], np.nan, "a: ValueError: x"),
        ([0, 0], [np.nan, 2], ["ValueError: x", ""], 0, ""),  # beside an environment's own rewards
    ],
)
def test_weighted_sum_is_nan_with_a_cause_unless_finite(weights, row, causes, reward, error):
    by_name = {name: [cause, ""] for name, cause in zip("ab", causes, strict=True)}
    components = np.asarray([row, [1, 1]], np.float32)
    rewards, errors = weighted_sum(["a", "b"], np.asarray(weights, float), components, by_name)
    np.testing.assert_array_equal(rewards, np.asarray([reward, sum(weights)], np.float32))
    assert errors == [error, ""]


# ---- the Triton model of a function ----


def test_function_model_skips_probes_and_reports_failed_replies(monkeypatch, tmp_path):
    make_text_tokenizer("qwen2").save_pretrained(tmp_path)
    bounds = ("max_waiting_rows", "max_request_tokens")
    given = {"function": f"{FILE}:num_tokens", "timeout_s": "60", "workers": "1"}
    given |= {"tokenizer": str(tmp_path), **dict.fromkeys(bounds, "100")}
    parameters = {name: {"string_value": value} for name, value in given.items()}
    model = importlib.import_module("rlhf_triton.python_backend.serving.function_reward").TritonPythonModel()
    model.initialize({"model_config": json.dumps({"name": "m", "parameters": parameters})})

    rows = {"tokens": np.ones((2, 3), np.int64), "sequence_lengths": np.full((2, 1), 3)}

    def ask(inputs=rows, **headers):
        request = Request(inputs, (REWARD_COMPONENT, REWARD_ERROR), json.dumps(headers))
        model.execute([request])
        outputs = request.responses.get(timeout=120).outputs
        assert request.responses.empty()
        return str(outputs[REWARD_COMPONENT].tolist()), outputs[REWARD_ERROR].tolist()

    assert ask(**{PROBE_HEADER: "1"}) == ("[[nan], [nan]]", [[b""], [b""]])
    assert ask() == ("[[3.0], [3.0]]", [[b""], [b""]])
    send = Request.send

    def once(*_, **__):
        monkeypatch.setattr(Request, "send", send)
        raise MemoryError("/dev/shm is full")

    monkeypatch.setattr(Request, "send", once)
    assert ask() == ("[[nan], [nan]]", [[b"/dev/shm is full"]] * 2)
    model.finalize()
    without = {"tokenizer": {"string_value": ""}, "function": {"string_value": f"{FILE}:length"}}
    model.initialize({"model_config": json.dumps({"name": "m", "parameters": {**parameters, **without}})})
    assert b"no tokenizer to decode them for reward functions; send sentences" in ask()[1][0][0]
    assert ask({"sentences": np.array([[b"a"], [b"bc"]], object)}) == ("[[1.0], [2.0]]", [[b""], [b""]])
    model.finalize()


def test_a_function_whose_file_has_changed_does_not_replace_the_one_that_was_rendered(tmp_path):
    """Clients would take the scores of two functions for one's."""
    file = tmp_path / "mine.py"
    file.write_text("def score(sample):\n    return 1.0\n")
    run = {"dir": str(tmp_path / "run")}
    config = RunConfig.model_validate({"run": run, "rewards": {"mine": {"function": f"{file}:score"}}})
    rendered = parse_pbtxt("m", render_configs(config)["reward_function_mine"])
    parameters = {name: {"string_value": value.string_value} for name, value in rendered.parameters.items()}
    args = {"model_config": json.dumps({"name": "reward_function_mine", "parameters": parameters})}
    model = importlib.import_module("rlhf_triton.python_backend.serving.function_reward").TritonPythonModel()
    model.initialize(args)
    model.finalize()
    file.write_text("def score(sample):\n    return 2.0\n")
    with pytest.raises(FunctionError, match=r"^.*mine.py:score has changed since the server was started; restore"):
        model.initialize(args)


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"prompt": "a", "response": "b"}, "ab"),
        ({"messages": [], "prompt": "<|im_start|>a", "response": "b"}, "b"),
        ({"prompt": "a", "response": ""}, "a"),
        ({"response": "b"}, None),
        ({"prompt": "a", "response": 3}, None),
        ({}, None),
    ],
)
def test_function_model_prefers_the_sent_text_over_decoding_tokens(metadata, text):
    """The same as of sentences, whose tokens may be others; None: it is decoded."""
    assert importlib.import_module("rlhf_triton.python_backend.serving.function_reward").given_text(metadata) == text


# ---- the LLM judge against a scripted endpoint: a failure is no score, never 0 ----


@pytest.fixture(scope="module")
def endpoint():
    with ChatServer() as server:
        yield server


@pytest.fixture
def server(endpoint, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # not what `api_key_env` names
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    take_counts()
    return endpoint


def judge(server, *, timeout_s=30.0, **options):
    """Return a judge whose prompt is only the response."""
    options = {"model": "m", "base_url": server.url, "rubric": "{{ response }}", **options}
    return load_function(SPEC, options, timeout_s=timeout_s)


def shipped_judge(server):
    """Return a judge with the shipped rubric."""
    return load_function(SPEC, {"model": "m", "base_url": server.url}, timeout_s=30.0)


def reader(**options):
    """Return a judge that only parses answers."""
    return Judge(model="m", base_url="http://h/v1", timeout_s=1.0, **options)


def row(response, prompt="Why?", **metadata):
    texts = {"response": response, **({} if prompt is None else {"prompt": prompt})}
    return Sample(f"{prompt}{response}", [], {**metadata, **texts})


PATTERN = {"pattern": r"VERDICT: (\w+)"}


@pytest.mark.parametrize(
    ("settings", "answer", "score"),
    [
        ({}, "7", 7),
        ({}, "**Score: 8**/10", 8),
        ({}, "8 points (out of 10)", 8),
        ({}, "1. Good. 2. Bad.\nGrade: 3", 3),
        ({}, "$\\boxed{9}$", 9),
        ({"scale": [0, 10]}, "**Grade: .5**", 0.5),
        ({"scale": [0, 1]}, "0.7 out of 1.0", 0.7),
        ({"scale": [0, 1.5]}, "0.7/1x5", "does not end with one score"),
        ({}, "Grade...5", 5),
        ({}, "no score", "does not end with one score"),
        ({}, "3\nis the grade", "does not end with one score"),
        ({}, "11", "score 11 is outside 1 to 10"),
        *(
            ({}, text, "does not end with one score")
            for text in ("4/5", "7-8", "7 to 8", "1 (worst) to 10 (best)", "8,5", "8/10 (80%)")
        ),
        ({}, "9" * 400, "score inf"),
        ({}, "8 " + "/" * 100_000, "does not end with one score"),  # a cubic pattern would not end here
        (PATTERN, "VERDICT: 9 or rather VERDICT: 2 3", 2),
        (PATTERN, "VERDICT: yes", "does not end with one score"),
    ],
)
def test_judge_reads_the_score_from_the_last_line(settings, answer, score):
    if not isinstance(score, str):
        assert reader(**settings).read(answer) == score
    else:
        with pytest.raises(BadScore, match=re.escape(score)) as caught:
            reader(**settings).read(answer)
        assert settings or " ".join(answer.split())[-50:] in str(caught.value), (
            "the message lacks the excerpt of the answer"
        )


def test_the_judges_request_has_rubric_model_and_options(server):
    options = {
        "temperature": 0.5,
        "max_tokens": 7,
        "body": {"top_p": 0.9, "max_tokens": None, "max_completion_tokens": 7},
    }
    rubric = "{{ metadata.answer }}|{{ prompt }}|{{ low }}-{{ high }}\n{{ response }}"
    assert judge(server, rubric=rubric, scale=[0, 5], **options)(row("{{ 'a' }} Score: 5", answer="é")) == 5
    sent = server.requests[-1]
    message = "é|Why?|0-5\n{{ 'a' }} Score: 5"
    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": message}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 7,
    }
    assert "Authorization" not in server.headers


def test_shipped_rubric_contains_prompt_and_response(server):
    with pytest.raises(BadScore, match="with one score"):  # the server repeats the rubric's last line
        shipped_judge(server)(row("Because.", "Why not?"))
    message = server.requests[-1]["messages"][0]["content"]
    assert "# Prompt\nWhy not?\n\n# Response\nBecause.\n" in message
    assert message.endswith("a number from 1 to 10.")


@pytest.mark.parametrize("what", ["busy once", "half once"])
def test_judge_retries_a_transient_fault(server, what):
    assert judge(server)(row(what)) == 7
    counts = take_counts()
    assert (counts["requests"], counts["retries"]) == (2, 1)
    assert "failures" not in counts


@pytest.mark.parametrize(
    ("what", "requests", "cause"),
    [
        ("broken", 5, "Error code: 503 - overloaded"),
        ("no choices", 1, "not a chat completion"),
        ("wrong", 1, "Error code: 400 - max_tokens is too large"),
        ("redirect", 1, "302"),  # not followed: the key would go along
        ("no text", 1, "the reply has no text"),
        ("cut", 1, "the judge's answer reached max_tokens (512): 'Score: 1'"),
        ("no grade at all", 1, "the judge's answer does not end with one score: 'no grade at all'"),
    ],
)
def test_judge_raises_if_a_fault_persists(server, what, requests, cause):
    before = len(server.requests)
    with pytest.raises(BadScore, match=re.escape(cause)):
        judge(server)(row(what))
    counts = take_counts()
    assert (counts["requests"], counts["failures"]) == (requests, 1)
    assert len(server.requests) == before + requests


def test_judge_gives_up_at_its_deadline(server):
    server.retry_after = "30"
    for what in ("broken", "hang"):
        with pytest.raises(BadScore, match=r"/v1: no answer within 0\.45 s"):
            judge(server, timeout_s=0.5)(row(what))
    assert take_counts()["failures"] == 2
    server.retry_after = "0"


def test_judge_key_is_sent_and_never_shown(server, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    asked = judge(server, api_key_env="JUDGE_KEY")
    assert asked(row("Score: 3")) == 3
    assert server.headers["Authorization"] == f"Bearer {KEY}"
    with pytest.raises(BadScore, match=re.escape("Error code: 401 - Incorrect API key: Bearer ***")) as caught:
        asked(row("echo the key"))
    with pytest.raises(BadScore, match=r"x Bearer \*\*\*") as cut:  # before the message is truncated
        asked(row("echo the key late"))
    assert KEY[:3] not in str(cut.value)
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    with pytest.raises(FunctionError, match="JUDGE_KEY contains spaces or characters") as refused:
        judge(server, api_key_env="JUDGE_KEY")
    shown = "".join([repr(asked), str(asked), str(caught.value), str(refused.value), *capfd.readouterr()])
    assert KEY not in shown


def test_judge_sends_no_request_if_the_rubric_cannot_be_rendered(server):
    before = len(server.requests)
    with pytest.raises(BadScore, match="'prompt' is undefined"):
        shipped_judge(server)(Sample("x"))
    with pytest.raises(BadScore, match="unsafe"):
        judge(server, rubric="{{ response.__class__.__mro__ }}")(row("x"))
    assert len(server.requests) == before


@pytest.mark.parametrize(("code", "kind"), [("raise KeyboardInterrupt", KeyboardInterrupt), ("exit(1)", FunctionError)])
def test_keyboard_interrupt_during_an_import_is_not_a_function_error(tmp_path, code, kind):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(kind):
        load_function(f"{file}:score")


def test_judge_key_is_not_sent_through_proxies(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{elsewhere.getsockname()[1]}")
        assert judge(server, api_key_env="JUDGE_KEY")(row("Score: 3")) == 3
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
