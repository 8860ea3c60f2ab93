"""Rewards that are Python functions alone, on the real server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import reward_functions
from bare_client import Refused, ask, ask_all
from live_system import (
    TEXTS,
    make_tokenizer,
    random_rows,
    scoring_inputs,
)
from settled import settled_statistics
from tiny_models import stub_of, tiny_server

from python_backend.config import RunConfig
from python_backend.wire.contract import (
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARDS,
    texts_array,
)
from tools.render_configs import render_repository
from tools.server.health import get_page
from tools.server.healthcheck import check as healthcheck
from tools.server.model_loading import probe
from tools.server.tritonserver import TritonServer

pytestmark = pytest.mark.slow

FUNCTIONS = Path(reward_functions.__file__)
TERMS = {
    "length": {"function": f"{FUNCTIONS}:num_tokens", "weight": -0.5},
    "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 2.0, "timeout_s": 1.0},
}
OUTPUTS = (REWARDS, REWARD_COMPONENTS, REWARD_ERRORS)


def functions_alone(folder: Path, terms: dict) -> Path:
    """A repository of the reward side only: nothing in it imports torch. The tokenizer is the critic's."""
    make_tokenizer().save_pretrained(folder / "critic")
    critic = {"checkpoint": str(folder / "critic")}
    reward = {"checkpoint": str(folder / "nothing")}
    config = RunConfig.model_validate({"critic": critic, "reward": reward, "rewards": terms})
    repository = folder / "repository"
    render_repository(config, repository)
    for model in ("critic", "critic_infer", "critic_train", "critic_save"):
        shutil.rmtree(repository / model)
    return repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("functions")
    functions_alone(folder, TERMS)
    with tiny_server(folder, exit_timeout_s=1) as server:
        server.wait_ready()
        workers = worker_processes(server)
        assert len(workers) == 8
        yield server
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, [(worker.status(), worker.ppid()) for worker in alive]


def worker_processes(server: TritonServer) -> list[psutil.Process]:
    """With each worker a process that watches the server for it."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [child for child in children if "python_backend.rewards.worker" in child.cmdline()]


def labelled(*labels: object, rows: list[np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """One row for each label: the i-th has i + 1 tokens unless `rows` are given."""
    rows = rows or random_rows(range(1, len(labels) + 1), seed=0)
    return {**scoring_inputs(rows), "metadata": texts_array([json.dumps({"label": label}) for label in labels])}


def raising_line() -> int:
    """Where tests/support/reward_functions.py raises: a cause names the line."""
    lines = FUNCTIONS.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "raise RuntimeError" in line)


def errors_of(answer: dict[str, np.ndarray]) -> list[str]:
    return [item.decode() for item in answer[REWARD_ERRORS][:, 0]]


def test_the_sum_its_components_and_the_labels(server: TritonServer) -> None:
    answer = ask(server.section.http_url, REWARD_MODEL, labelled(5, -1, 0.25), OUTPUTS)
    np.testing.assert_array_equal(answer[REWARD_COMPONENTS], [[1, 5], [2, -1], [3, 0.25]])
    np.testing.assert_array_equal(answer[REWARDS][:, 0], [9.5, -3.0, -1.0])
    assert answer[REWARDS].dtype == np.float32
    assert errors_of(answer) == ["", "", ""]


def test_what_fails_costs_its_own_row(server: TritonServer) -> None:
    """In one request, and in the requests that share its batch; 0 is a score and stays one."""
    troubled = labelled(1, "raise", 3, "loop", "die", "nan", 0)
    answer, *others = ask_all(
        server.section.http_url,
        [(REWARD_MODEL, troubled, OUTPUTS), *[(REWARD_MODEL, labelled(i), OUTPUTS) for i in range(20)]],
    )
    assert not isinstance(answer, Refused)
    assert errors_of(answer) == [
        "",
        f"verdict: RuntimeError: no verdict on 'raise' (reward_functions.py:{raising_line()})",
        "",
        "verdict: took longer than 1 s and was killed",
        "verdict: the worker process ended with exit code 3",
        "verdict: returned nan, must be finite",
        "",
    ]
    failed = [1, 3, 4, 5]
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(answer[REWARDS][:, 0])), failed)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(answer[REWARD_COMPONENTS][:, 1])), failed)
    np.testing.assert_array_equal(answer[REWARD_COMPONENTS][:, 0], np.arange(1, 8))  # the other component is known
    np.testing.assert_array_equal(answer[REWARDS][[0, 2, 6], 0], [1.5, 4.5, -3.5])
    assert [float(other[REWARDS][0, 0]) for other in others] == [2.0 * i - 0.5 for i in range(20)]


def test_text_tokens_and_metadata_reach_the_function(server: TritonServer, tmp_path: Path) -> None:
    """`sentences` and the tokens that they have give the same sample."""
    tokenizer = make_tokenizer()
    rows = [np.asarray([0, *tokenizer(text)["input_ids"], 1]) for text in TEXTS]
    sent = {"metadata": texts_array([json.dumps({"label": 1})] * len(TEXTS))}
    by_text = ask(server.section.http_url, REWARD_MODEL, {"sentences": texts_array(list(TEXTS)), **sent}, OUTPUTS)
    halves = {"sentences": [text[:4] for text in TEXTS], "text_pairs": [text[4:] for text in TEXTS]}
    by_pair = ask(
        server.section.http_url,
        REWARD_MODEL,
        {**{name: texts_array(part) for name, part in halves.items()}, **sent},
        OUTPUTS,
    )
    np.testing.assert_array_equal(by_pair[REWARD_COMPONENTS], by_text[REWARD_COMPONENTS])
    by_tokens = ask(server.section.http_url, REWARD_MODEL, {**scoring_inputs(rows), **sent}, OUTPUTS)
    lengths = np.asarray([row.size for row in rows])
    np.testing.assert_array_equal(by_tokens[REWARD_COMPONENTS][:, 0], lengths)
    np.testing.assert_array_equal(by_text[REWARD_COMPONENTS][:, 0], lengths - 2)  # no special tokens are added


def test_rewards_alone_may_be_asked_for_and_a_missing_label_is_no_zero(server: TritonServer) -> None:
    answer = ask(server.section.http_url, REWARD_MODEL, scoring_inputs(random_rows([3], seed=0)), [REWARDS])
    assert set(answer) == {REWARDS}
    assert np.isnan(answer[REWARDS]).all()


def test_health_checks_and_probes_run_no_function(server: TritonServer) -> None:
    """They reach every model of the sum nevertheless. The only calls are those of the last request."""

    def num_calls() -> float:
        found = re.findall(
            r'rlhf_reward_function_total\{counter="calls".*\} (\S+)', get_page(server.section.metrics_url, "/metrics")
        )
        return sum(map(float, found))

    before = num_calls()
    with server.control() as control:
        for model in (REWARD_MODEL, "reward_function_verdict"):
            probe(control, model, 60.0)
        executed = settled_statistics(control, "reward_function_verdict").execution_count
        assert healthcheck(server.repository, f"http://{server.section.http_url}") == 0
        assert settled_statistics(control, "reward_function_verdict").execution_count == executed + 1
    ask(server.section.http_url, REWARD_MODEL, labelled(1, 2), OUTPUTS)
    assert num_calls() == before + 2


def test_metadata_that_is_no_object_is_a_cause(server: TritonServer) -> None:
    """And no error of the request: many steps of an ensemble that failed at once have crashed tritonserver."""
    for metadata in ("[1]", "{", "null"):
        wrong = {**labelled(1), "metadata": texts_array([metadata])}
        for answer in ask_all(server.section.http_url, [(REWARD_MODEL, wrong)] * 64):
            assert not isinstance(answer, Refused), answer
            assert np.isnan(answer[REWARDS]).all()
            assert errors_of(answer)[0].startswith("length: metadata[0]: ")


# ---- the last tests change the server ----


def test_a_reload_replaces_the_workers(server: TritonServer) -> None:
    replaced = [worker for worker in worker_processes(server) if f"{FUNCTIONS}:num_tokens" in worker.cmdline()]
    with server.control() as control:
        control.load("reward_function_length", parameters={"workers": "3"}, timeout_s=60)
    assert errors_of(ask(server.section.http_url, REWARD_MODEL, labelled(1), OUTPUTS)) == [""]
    _, alive = psutil.wait_procs(replaced, timeout=60)
    assert not alive
    assert len(worker_processes(server)) == 10


def test_a_full_queue_is_a_cause(server: TritonServer) -> None:
    with server.control() as control:
        control.load("reward_function_length", parameters={"max_waiting_rows": "2"}, timeout_s=60)
    assert errors_of(ask(server.section.http_url, REWARD_MODEL, labelled(1, 1))) == ["", ""]
    answer = ask(server.section.http_url, REWARD_MODEL, labelled(1, 1, 1))
    cause = "length: 0 samples are waiting, 3 more exceed the limit of 2; send fewer rows per request, or retry later"
    assert errors_of(answer) == [cause] * 3


def test_a_reload_waits_for_a_function_that_is_still_running(server: TritonServer) -> None:
    with ThreadPoolExecutor(1) as executor, server.control() as control:
        before = control.statistics("reward_function_verdict").execution_count
        asked = executor.submit(ask, server.section.http_url, REWARD_MODEL, labelled(1, "sleep"), OUTPUTS)
        while control.statistics("reward_function_verdict").execution_count == before:
            pass
        control.load("reward_function_verdict", parameters={"workers": "1"}, timeout_s=60)
        assert errors_of(asked.result()) == ["", "verdict: took longer than 1 s and was killed"]


def test_no_worker_outlives_a_server_that_is_killed_outright(server: TritonServer) -> None:
    workers = worker_processes(server)
    stub = stub_of(server, "reward_function_verdict")
    its_own = [child for child in stub.children(recursive=True) if child in workers]
    assert its_own
    stub.kill()
    _, alive = psutil.wait_procs(its_own, timeout=60)
    assert not alive
    psutil.Process(server.pid).kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
