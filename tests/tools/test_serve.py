"""`python -m tools serve` as a process: signals, failures, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tiny_models import regions, server_processes, write_repository, write_scoring_model
from tiny_serve import serve, wait_for, write_run

from python_backend.store.durable import read_json
from tools.server.health import get_page
from trainer.control_plane import ControlPlane


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose repository is rendered and whose critic has a version."""
    return write_run(tmp_path)


def wait_until_gone(parent_pid: int) -> None:
    while server_processes(parent_pid) or regions(parent_pid):
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "own"), [(signal.SIGINT, "."), (signal.SIGTERM, "server 0 ü")])
def test_serve_stops_cleanly_on_a_signal(run_dir: Path, number: signal.Signals, own: str) -> None:
    """Once with `server.dir`: nothing of the server is then in the folder that it shares with other servers.

    The Python backend would not find its files in such a folder, which has a space and an umlaut. A second server in
    its folder ends before it touches anything there. Other users cannot read what it writes; the group can where the
    configuration says so.
    """
    write_repository(run_dir / own / "model_repository")
    shared = {path.name for path in run_dir.iterdir()}
    overrides = [] if own == "." else [f"server.dir={run_dir / own}", "run.access=group"]
    process = serve(run_dir, *overrides)
    state = run_dir / own / "server.json"
    wait_for(state, process)
    assert own == "." or {path.name for path in run_dir.iterdir()} == shared
    grpc_url = json.loads(state.read_text())["grpc"]
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (state, state.parent / "logs")}
    assert modes == ({0} if own == "." else {0o060, 0o070})
    second = serve(run_dir, *overrides)
    refusal = f"another server is running in {state.parent} (process {process.pid} on {platform.node()})"
    assert second.communicate()[1].startswith(f"error: {refusal}; stop it first")
    assert (second.returncode, json.loads(state.read_text())["grpc"]) == (2, grpc_url)
    assert not (run_dir / own / "logs" / "tritonserver.previous.log").exists()
    with ControlPlane(grpc_url) as control:
        control.probe_scoring("critic_infer", ("rewards", "values"), timeout_s=10)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "ready: inference http://127.0.0.1:" in out
    assert out.endswith("stopped\n")
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []
    assert not state.exists()


TWO_TOKENS = [
    {"name": "tokens", "datatype": "INT64", "shape": [1, 2], "data": [0, 0]},
    {"name": "sequence_lengths", "datatype": "INT64", "shape": [1, 1], "data": [2]},
]


def status(run_dir: Path, path: str, body: object = None) -> int:
    """Send a request to the running server; return the status of its response."""
    url = f"http://{json.loads((run_dir / 'server.json').read_text())['http']}/v2/models/{path}"
    try:
        with urllib.request.urlopen(url, body and json.dumps(body).encode(), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def busy(run_dir: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], list[Future[int]]]]:
    """Run `tools serve` with a model that computes one request and has another in its queue until `block` is removed.

    Its name is none that the supervisor probes, so no other request is in its queue.
    """
    block, begun = run_dir / "block", run_dir / "begun"
    block.touch()
    waiting = f"open({str(begun)!r}, 'w')\n        while os.path.exists({str(block)!r}): time.sleep(0.02)"
    write_scoring_model(run_dir / "model_repository", "blocking", on_request=waiting)
    process = serve(run_dir, *overrides)
    wait_for(run_dir / "server.json", process)
    metrics_url = json.loads((run_dir / "server.json").read_text())["metrics"]
    with ThreadPoolExecutor(2) as pool:
        in_flight = [pool.submit(status, run_dir, "blocking/infer", {"inputs": TWO_TOKENS})]
        wait_for(begun, process)
        in_flight += [pool.submit(status, run_dir, "blocking/infer", {"inputs": TWO_TOKENS})]
        while not re.search(r'pending_request_count\{model="blocking".*\} 1', get_page(metrics_url, "/metrics")):
            time.sleep(0.02)
        try:
            yield process, in_flight
        finally:
            block.unlink(missing_ok=True)
            process.kill()


def test_serve_answers_what_is_in_flight_and_refuses_the_rest(run_dir: Path) -> None:
    with busy(run_dir) as (process, in_flight):
        process.send_signal(signal.SIGTERM)
        while status(run_dir, "blocking/ready") == 200:
            time.sleep(0.02)
        assert status(run_dir, "blocking/infer", {"inputs": TWO_TOKENS}) == 404
        assert process.poll() is None
        assert not any(request.done() for request in in_flight)
        (run_dir / "block").unlink()
        assert [request.result() for request in in_flight] == [200, 200]
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert re.search(r"drained for [\d.]+ s: all requests are answered", out)
    assert out.endswith("stopped\n")


KEEPS = """
class TritonPythonModel:
    kept = []

    def execute(self, requests):
        self.kept += [request.get_response_sender() for request in requests]
        open({begun!r}, "w")
"""


def test_serve_does_not_wait_for_requests_whose_process_has_died(run_dir: Path) -> None:
    """Triton never answers what a model's process had taken over, and reports the model as unloading for ever."""
    write_scoring_model(run_dir / "model_repository", "blocking")
    (model,) = (run_dir / "model_repository" / "blocking").glob("*/model.py")
    model.write_text(KEEPS.format(begun=str(run_dir / "begun")))
    process = serve(run_dir, "server.drain_s=1000")
    wait_for(run_dir / "server.json", process)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(status, run_dir, "blocking/infer", {"inputs": TWO_TOKENS})
        wait_for(run_dir / "begun", process)
        process.send_signal(signal.SIGTERM)
        while status(run_dir, "blocking/ready") == 200:
            time.sleep(0.02)
        assert not request.done()
        (stub,) = [stub for stub in server_processes(process.pid) if str(model) in " ".join(stub.cmdline())]
        stub.kill()
        out, err = process.communicate()
        assert isinstance(request.exception(), OSError)
    assert (process.returncode, err) == (0, "")
    assert "not all requests are answered" in out


@pytest.mark.slow
@pytest.mark.parametrize("drain_s", [0, 0.5, 1000])
def test_serve_waits_until_the_second_signal_or_as_long_as_configured(run_dir: Path, drain_s: float) -> None:
    with busy(run_dir, f"server.drain_s={drain_s}") as (process, in_flight):
        process.send_signal(signal.SIGTERM)
        if drain_s == 1000:
            while status(run_dir, "blocking/ready") == 200:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        assert all(isinstance(request.exception(), OSError) for request in in_flight)
    assert (process.returncode, err) == (0, "")
    assert ("not all requests are answered" in out) == (drain_s > 0)


def test_serve_can_be_stopped_while_a_model_loads(run_dir: Path) -> None:
    wait = "print('loading', flush=True); time.sleep(60)"
    write_scoring_model(run_dir / "model_repository", "critic", on_load=wait)
    process = serve(run_dir)
    assert process.stdout is not None
    while "loading" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []


def test_a_killed_serve_takes_its_server_along(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic")
    process = serve(run_dir)
    wait_for(run_dir / "server.json", process)
    process.kill()
    process.communicate()
    wait_until_gone(process.pid)


@pytest.mark.slow
def test_serve_starts_a_server_that_aborts_at_its_start_once_more(run_dir: Path) -> None:
    repository = run_dir / "model_repository"
    write_repository(repository)
    shutil.rmtree(repository / "reward_model")
    abort = f"import os; os.mkdir({str(run_dir / 'aborted')!r}); os.kill(os.getppid(), 6)"
    on_load = f"import os; os.path.isdir({str(run_dir / 'aborted')!r}) or exec({abort!r})"
    write_scoring_model(repository, "reward_model", on_load=on_load)
    process = serve(run_dir)
    wait_for(run_dir / "server.json", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.count("tritonserver was killed by SIGABRT; its log is") == out.count("starting it once more") == 1


@pytest.mark.slow
def test_serve_starts_a_server_that_died_again(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic")
    process = serve(run_dir)
    state = run_dir / "server.json"
    wait_for(state, process)
    first = json.loads(state.read_text())
    psutil.Process(first["pid"]).kill()
    while (read_json(state) or first)["pid"] == first["pid"]:  # gone for a while
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    second = json.loads(state.read_text())
    assert {**second, "pid": 0} == {**first, "pid": 0}
    assert process.stdout is not None
    said = [""]
    while "serving again after" not in said[-1]:  # said after server.json is written
        said.append(process.stdout.readline())
        assert said[-1], said
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert any("tritonserver was killed by SIGKILL" in line for line in said)
    wait_until_gone(process.pid)


def test_serve_exits_with_one_sentence_when_a_model_does_not_load(run_dir: Path) -> None:
    write_scoring_model(run_dir / "model_repository", "critic", on_load="raise ValueError('3 labels')")
    process = serve(run_dir)
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("error: critic could not be loaded: ValueError: 3 labels (model.py line 10);")
    assert len(err.splitlines()) == 1
    assert server_processes(process.pid) == []
    assert regions(process.pid) == []
