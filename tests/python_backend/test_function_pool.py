"""Worker processes of reward functions: whatever one does, it costs its own sample and nothing else."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import reward_functions

from python_backend.rewards import pool as pool_module
from python_backend.rewards.function import FunctionError, Sample, checked, load_function
from python_backend.rewards.pool import FairQueue, FunctionCall, ScoreOutcome, WorkerPool

FILE = Path(reward_functions.__file__)
ROOT = FILE.parent.parent
LIMIT_S = 1.0
PATIENT_S = 60.0


MakePool = Callable[..., WorkerPool]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Starts pools, and closes them."""
    made: list[WorkerPool] = []

    def make(spec: str = "by_row", *, num_workers: int = 1, timeout_s: float = PATIENT_S, **call: Any) -> WorkerPool:
        spec = spec if ":" in spec else f"{FILE}:{spec}"
        made.append(WorkerPool(FunctionCall(spec, timeout_s, **call), num_workers=num_workers))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    assert not workers()


def doing(*actions: str | None, **metadata: object) -> list[Sample]:
    """One sample for each action; the i-th has i tokens."""
    return [Sample("text", [0] * i, {**({"do": a} if a else {}), **metadata}) for i, a in enumerate(actions)]


def outcomes(pool: WorkerPool, samples: Sequence[Sample]) -> list[ScoreOutcome]:
    """What became of each."""
    results: list[ScoreOutcome | None] = [None] * len(samples)
    left = threading.Semaphore(0)
    for i, sample in enumerate(samples):

        def done(outcome: list[ScoreOutcome], i: int = i) -> None:
            assert results[i] is None
            (results[i],) = outcome
            left.release()

        pool.submit([([sample], done)])
    for _ in samples:
        assert left.acquire(timeout=120)
    return [result for result in results if result is not None]


def workers() -> list[psutil.Process]:
    """Worker processes of this process."""
    return [child for child in psutil.Process().children() if "python_backend.rewards.worker" in child.cmdline()]


@pytest.fixture
def pool(make_pool: MakePool) -> WorkerPool:
    return make_pool(num_workers=2)


@pytest.fixture
def hasty(make_pool: MakePool) -> WorkerPool:
    """One worker with a short limit."""
    return make_pool(timeout_s=LIMIT_S)


def test_many_samples_each_get_their_own_score(pool: WorkerPool) -> None:
    found = outcomes(pool, doing(*[None] * 500))
    assert [outcome.score for outcome in found] == list(range(500))
    assert not any(outcome.error for outcome in found)


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("raise", "RuntimeError: no verdict on None"),
        ("exit", "SystemExit: enough"),
        ("die", "the worker process ended with exit code 3"),
        ("crash", "the worker process was killed by SIGSEGV"),
        ("memory", "MemoryError"),
        ("nan", "returned nan, must be finite"),
        ("infinity", "returned inf, must be finite"),
        ("text", "the function returned '1.0', but it must return a number"),
        ("none", "the function returned None, but it must return a number"),
    ],
)
def test_what_goes_wrong_costs_its_own_sample(pool: WorkerPool, action: str, cause: str) -> None:
    before, failed, after, last = outcomes(pool, doing(None, action, None, "print"))
    assert math.isnan(failed.score)
    assert re.sub(r" \(reward_functions.py:\d+\)$", "", failed.error) == cause
    assert [before, after, last] == [ScoreOutcome(0.0), ScoreOutcome(2.0), ScoreOutcome(1.0)]


def test_a_forked_child_never_answers(make_pool: MakePool) -> None:
    found = outcomes(make_pool(), doing(*["fork"] * 3, "pid", *[None] * 16, "pid"))
    assert [outcome.score for outcome in (*found[:3], *found[4:-1])] == [0, 1, 2, *range(4, 20)]
    assert found[3] == found[-1], "the worker itself goes on"


@pytest.mark.parametrize("action", ["sleep", "loop"])
def test_an_endless_sample_is_killed_and_the_next_is_scored_by_a_new_worker(hasty: WorkerPool, action: str) -> None:
    first, endless, second, last = outcomes(hasty, doing("pid", action, "pid", None))
    assert endless.error == "took longer than 1 s and was killed"
    assert math.isnan(endless.score)
    assert first.score != second.score
    assert last == ScoreOutcome(3.0)
    assert not psutil.pid_exists(int(first.score))


def test_waiting_for_a_worker_does_not_count_against_the_limit(hasty: WorkerPool) -> None:
    found = outcomes(hasty, doing("sleep", "sleep", None))  # the last waits for two limits
    assert [bool(outcome.error) for outcome in found] == [True, True, False]


@pytest.mark.parametrize("action", ["program", "daemon"])
def test_what_a_killed_function_has_started_is_killed_too(hasty: WorkerPool, tmp_path: Path, action: str) -> None:
    pid_file = tmp_path / "pid"
    (outcome,) = outcomes(hasty, doing(action, pid_file=str(pid_file)))
    assert outcome.error == "took longer than 1 s and was killed"
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_killed_workers_leave_no_zombies(hasty: WorkerPool, tmp_path: Path) -> None:
    """This process inherits what is left, as process 1 of a container does."""
    prctl, subreaper = ctypes.CDLL(None).prctl, 36
    others = [child for child in psutil.Process().children() if child not in workers()]  # of other tests
    assert prctl(subreaper, 1) == 0
    try:
        outcomes(hasty, doing("daemon", "die", "crash", pid_file=str(tmp_path / "pid")))
        hasty.close()
        assert psutil.Process().children() == others
    finally:
        prctl(subreaper, 0)


@pytest.mark.parametrize("place", ["send_frame", "receive_frame"])
def test_after_any_exception_the_next_sample_is_scored(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    pool = make_pool()
    real = getattr(pool_module, place)
    for error in (RecursionError, MemoryError, OSError, EOFError, TimeoutError, ValueError, KeyError, TypeError):

        def once(*arguments: Any, error: type[Exception] = error) -> Any:
            monkeypatch.setattr(pool_module, place, real)
            raise error("injected")

        monkeypatch.setattr(pool_module, place, once)
        failed, *good = outcomes(pool, doing(None, None, None))
        assert failed.error, error
        assert good == [ScoreOutcome(1.0), ScoreOutcome(2.0)], error


def test_after_a_sample_that_breaks_the_protocol_a_new_worker_scores_the_next(make_pool: MakePool) -> None:
    pool = make_pool()
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for bad in (*doing("garbled frame", "foreign frame", "two results"), Sample("", [], {"deep": deep})):
        before, failed, after = outcomes(pool, [*doing("pid"), bad, *doing("pid")])
        assert failed.error
        assert (before.error, after.error) == ("", "")
        assert before.score != after.score, "it has been killed"


def test_a_callback_that_raises_costs_no_thread(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.submit([(doing(None), lambda _: [][0])])
    assert outcomes(pool, doing("pid"))[0].error == ""


@pytest.mark.parametrize(
    ("call", "hidden", "inherited"),
    [
        (
            {"spec": "by_row", "hidden_variables": ["KEY_OF_ANOTHER", "KEY_FOR_TRAINING"]},
            ["KEY_OF_ANOTHER", "KEY_FOR_TRAINING"],
            ["KEY_OF_ITS_OWN"],
        ),
        (
            {"spec": "Keyed", "options": {"api_key_env": "HF_TOKEN"}},
            ["WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"],
            ["HF_TOKEN", "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM"],
        ),
    ],
)
def test_secrets_are_not_inherited_but_for_the_functions_own(
    make_pool: MakePool,
    monkeypatch: pytest.MonkeyPatch,
    call: dict[str, Any],
    hidden: list[str],
    inherited: list[str],
) -> None:
    for name in (*hidden, *inherited):
        monkeypatch.setenv(name, "secret")
    asked = [Sample("", [], {"do": "inherited", "names": names}) for names in (hidden, inherited)]
    assert outcomes(make_pool(**call), asked) == [ScoreOutcome(0.0), ScoreOutcome(len(inherited))]


def test_a_sample_larger_than_any_buffer(pool: WorkerPool) -> None:
    (outcome,) = outcomes(pool, [Sample("é" * 10**6, [], {"do": "huge", "blob": "x" * 10**7})])
    assert outcome == ScoreOutcome(1e7)


def test_a_worker_that_is_killed_while_idle_costs_at_most_one_sample(pool: WorkerPool) -> None:
    for worker in workers():
        worker.kill()
    found = outcomes(pool, doing(*[None] * 20))
    assert sum(bool(outcome.error) for outcome in found) <= 2
    assert all(outcome.error in ("", "the worker process was killed by SIGKILL") for outcome in found)


def test_a_request_of_many_samples_lets_one_of_a_few_pass() -> None:
    waiting = FairQueue()
    noted: list[list[ScoreOutcome]] = []
    long, short = doing(*[None] * 100), doing(None, None)
    waiting.put([([sample], noted.append) for sample in long])
    waiting.put([([sample], noted.append) for sample in short])
    assert waiting.size == 102
    taken = [item[0][0] for _ in range(4) if (item := waiting.get()) is not None]
    assert [any(sample is mine for mine in short) for sample in taken] == [False, True, False, True]
    assert waiting.size == 98
    waiting.close()
    assert waiting.get() is None


def test_closing_ends_a_running_function_and_drops_what_waits(pool: WorkerPool) -> None:
    finished: list[list[ScoreOutcome]] = []
    for sample in doing("loop", "sleep", None, None):
        pool.submit([([sample], finished.append)])
    assert len(workers()) >= 2
    pool.close()
    assert not finished
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker-") and thread.is_alive()]


def test_workers_end_with_a_parent_that_is_killed_outright(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sample = f"Sample('', [], {{'do': 'daemon', 'pid_file': {str(pid_file)!r}}})"
    script = (
        "import os, sys, time\n"
        "from python_backend.rewards.pool import FunctionCall, WorkerPool\n"
        "from python_backend.rewards.function import Sample\n"
        "pool = WorkerPool(FunctionCall(sys.argv[1], 600.0), num_workers=2)\n"
        f"pool.submit([([{sample}], lambda outcome: None)])\n"
        "pool.submit([([Sample('', [], {'do': 'loop'})], lambda outcome: None)])\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, f"{FILE}:by_row"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        while not pid_file.is_file() or not pid_file.read_text():
            time.sleep(0.01)
        children = psutil.Process(parent.pid).children(recursive=True)
        os.kill(parent.pid, signal.SIGKILL)
    assert len(children) >= 5  # two workers, what watches each, the daemon, and perhaps still the process that began it
    assert int(pid_file.read_text()) in [child.pid for child in children]
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, gone


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ("missing.py:score", "missing.py:score cannot be imported: FileNotFoundError: missing.py does not exist"),
        ("no.such_module:score", "cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (f"{FILE}:nothing", f"cannot be imported: {FILE} has no 'nothing'"),
        (f"{FILE}:_ACTIONS", "defines '_ACTIONS' as dict, not a function"),
        *[
            ("broken.py:score", body)
            for body in ("import sys\nsys.exit(2)", "raise KeyError('x')", "def score(:", "import os\nos._exit(4)")
        ],
    ],
)
def test_a_function_that_cannot_be_imported_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, cause: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if spec.startswith("broken"):
        Path("broken.py").write_text(cause)
        cause = "broken.py:score cannot be imported: "
    with pytest.raises(FunctionError, match=re.escape(cause)):
        WorkerPool(FunctionCall(spec, 1.0), num_workers=2)
    assert not workers()


def test_an_import_without_end_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("import time\ntime.sleep(3600)\n")
    with pytest.raises(FunctionError, match="cannot be imported: took longer than 1 s"):
        WorkerPool(FunctionCall(f"{path}:score", 1.0), num_workers=1, start_limit_s=1.0)
    assert not workers()


def test_a_file_may_import_its_neighbours_and_a_module_is_found_by_name(make_pool: MakePool, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_a_reward.py").write_text("OFFSET = 2\n")
    path = tmp_path / "with neighbour.py"
    path.write_text("from neighbour_of_a_reward import OFFSET\ndef f(sample): return len(sample.text) + OFFSET\n")
    assert outcomes(make_pool(f"{path}:f"), [Sample("abc")]) == [ScoreOutcome(5.0)]
    assert outcomes(make_pool("builtins:hash"), [Sample("abc")])[0].error


def test_prompt_and_response_come_from_the_metadata() -> None:
    found = [Sample("a b"), Sample("a b", [], {"prompt": "a", "response": " b"})]
    assert [(sample.prompt, sample.response) for sample in found] == [(None, None), ("a", " b")]


@pytest.mark.parametrize("value", [True, 3, 0.5])
def test_numbers_are_scores(value: float) -> None:
    assert checked(value) == float(value)


@pytest.mark.parametrize("spec", ["", "name", "file.py", "a b:c", "file.txt/x:name", "file.py:1"])
def test_what_is_no_function(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape("write path/to/file.py:name or package.module:name")):
        load_function(spec)


def test_sample_is_found_where_it_was_before() -> None:
    assert importlib.import_module("python_backend.function_rewards").Sample is Sample
