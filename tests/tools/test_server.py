"""`rlhf-triton serve` as a process: signals, failures, leftovers; and child processes of any kind."""

import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import stat
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from http_server import HttpServer
from shebang import SHEBANG
from tiny_models import regions, server_processes, write_repository, write_scoring_model
from tiny_serve import serve, write_run
from waiting import wait_for

from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.run_lock import only_server
from rlhf_triton.tools.checks.prompt_rows import check_prompts
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.health import get_page, is_triton
from rlhf_triton.tools.server.ports import free_port
from rlhf_triton.tools.server.server_log import relay_lines, set_aside_if_large
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.vllm import VllmServer, check_vllm, starts_vllm, vllm_arguments


@pytest.fixture
def run_dir(tmp_path):
    """A run whose repository is rendered and whose critic has a version."""
    return write_run(tmp_path)


@pytest.mark.parametrize(("number", "own"), [(signal.SIGINT, "."), (signal.SIGTERM, "server 0 ü")])
def test_serve_stops_cleanly_on_a_signal(run_dir, number, own):
    """Once with `server.dir`, where no file of the server may be in the folder that servers share.

    That folder's name has a space and an umlaut, with which the Python backend would not find its files. Other users
    cannot read the files; the group can if the configuration says so.
    """
    write_repository(run_dir / own / "model_repository")
    shared = {path.name for path in run_dir.iterdir()}
    overrides = [] if own == "." else [f"server.dir={run_dir / own}", "run.access=group"]
    process = serve(run_dir, *overrides)
    state = run_dir / own / "server.json"
    wait_for(state.exists, process)
    assert own == "." or {path.name for path in run_dir.iterdir()} == shared
    grpc_url = json.loads(state.read_text())["grpc"]
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (state, state.parent / "logs")}
    assert modes == ({0} if own == "." else {0o060, 0o070})
    with ControlPlane(grpc_url) as control:
        control.probe("critic_infer", 120, ("rewards", "values"))
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "ready: inference http://127.0.0.1:" in out
    assert out.endswith("stopped\n")
    assert (server_processes(process.pid), regions(process.pid), state.exists()) == ([], [], False)


def test_a_second_server_in_a_folder_ends_before_it_changes_anything_there(run_dir):
    write_repository(run_dir / "model_repository")
    for name in ("server.json", "logs/tritonserver.log"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("{}")
    with only_server(run_dir):
        before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
        second = serve(run_dir)
        error = second.communicate()[1]
        after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    refusal = f"another server is running in {run_dir} (process {os.getpid()} on {platform.node()})"
    assert error.startswith(f"error: {refusal}; stop it first")
    assert (second.returncode, after) == (2, before)


TWO_TOKENS = [
    {"name": "tokens", "datatype": "INT64", "shape": [1, 2], "data": [0, 0]},
    {"name": "sequence_lengths", "datatype": "INT64", "shape": [1, 1], "data": [2]},
]


def status(run_dir, path, body=None):
    """Send a request to the running server; return the status of its response."""
    url = f"http://{json.loads((run_dir / 'server.json').read_text())['http']}/v2/models/{path}"
    try:
        with urllib.request.urlopen(url, body and json.dumps(body).encode(), timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def busy(run_dir, *overrides):
    """Run the server with a model that computes one request and queues another until `block` is removed.

    The supervisor does not probe a model of this name, so its queue has no other requests.
    """
    block = run_dir / "block"
    begun = run_dir / "begun"
    block.touch()
    waiting = f"open({str(begun)!r}, 'w')\n        while os.path.exists({str(block)!r}): time.sleep(0.02)"
    write_scoring_model(run_dir / "model_repository", "blocking", on_request=waiting)
    process = serve(run_dir, *overrides)
    wait_for((run_dir / "server.json").exists, process)
    metrics_url = json.loads((run_dir / "server.json").read_text())["metrics"]
    with ThreadPoolExecutor(2) as pool:
        in_flight = [pool.submit(status, run_dir, "blocking/infer", {"inputs": TWO_TOKENS})]
        wait_for(begun.exists, process)
        in_flight += [pool.submit(status, run_dir, "blocking/infer", {"inputs": TWO_TOKENS})]
        while not re.search(r'pending_request_count\{model="blocking".*\} 1', get_page(metrics_url, "/metrics")):
            time.sleep(0.02)
        try:
            yield process, in_flight
        finally:
            block.unlink(missing_ok=True)
            process.kill()


def test_serve_drains_requests_in_flight_and_refuses_new_ones(run_dir):
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


@pytest.mark.slow
def test_serve_stops_draining_at_the_second_signal(run_dir):
    with busy(run_dir) as (process, in_flight):
        process.send_signal(signal.SIGTERM)
        while status(run_dir, "blocking/ready") == 200:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
        assert all(isinstance(request.exception(), OSError) for request in in_flight)
    assert (process.returncode, err) == (0, "")
    assert "not all requests are answered" in out


@pytest.mark.slow
def test_serve_can_be_stopped_while_a_model_loads(run_dir):
    wait = "print('loading', flush=True); time.sleep(60)"
    write_scoring_model(run_dir / "model_repository", "critic", on_load=wait)
    process = serve(run_dir)
    while "loading" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.terminate()
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert (server_processes(process.pid), regions(process.pid)) == ([], [])


def test_killed_serve_leaves_no_server_behind(run_dir):
    write_scoring_model(run_dir / "model_repository", "critic")
    process = serve(run_dir)
    wait_for((run_dir / "server.json").exists, process)
    process.kill()
    process.communicate()
    while server_processes(process.pid) or regions(process.pid):
        time.sleep(0.05)


@pytest.mark.slow
def test_serve_restarts_a_server_that_aborts_at_startup_only_once(run_dir):
    repository = run_dir / "model_repository"
    write_repository(repository)
    shutil.rmtree(repository / "reward_model")
    abort = f"import os; os.mkdir({str(run_dir / 'aborted')!r}); os.kill(os.getppid(), 6)"
    on_load = f"import os; os.path.isdir({str(run_dir / 'aborted')!r}) or exec({abort!r})"
    write_scoring_model(repository, "reward_model", on_load=on_load)
    process = serve(run_dir)
    wait_for((run_dir / "server.json").exists, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.count("tritonserver was killed by SIGABRT; its log is") == out.count("starting it once more") == 1


# ---- child processes, whose logs stay bounded for a month, and the vLLM server of `rlhf-triton run` ----


def test_a_large_log_is_cut_and_its_newest_part_kept(tmp_path):
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old" * 50 + b"new" * 50)
        set_aside_if_large(log, 300)
        assert list(tmp_path.iterdir()) == [log], "a log that is not too large was rotated"
        set_aside_if_large(log, 150)
        writer.write(b"after")
    assert log.read_bytes() == b"after"  # no hole of zeros before it
    assert (tmp_path / "a.previous.log").read_bytes() == b"new" * 50
    assert len(list(tmp_path.iterdir())) == 2


def test_log_relay_continues_after_a_rotation(tmp_path):
    log = tmp_path / "a.log"
    ended = threading.Event()
    seen = []
    with log.open("ab", buffering=0) as writer:
        follower = threading.Thread(target=relay_lines, args=(log, ended.is_set, seen.append))
        follower.start()
        try:
            writer.write(b"first line, which is the longest of all\n")
            wait_for(lambda: len(seen) == 1)
            set_aside_if_large(log, 10)
            time.sleep(0.25)  # two looks of the follower
            writer.write(b"second\n")
            wait_for(lambda: len(seen) == 2)
        finally:
            ended.set()
            follower.join()
    assert seen == ["  | first line, which is the longest of all", "  | second"]


def test_child_warnings_are_read_once_and_its_exit_error_quotes_the_log(tmp_path):
    script = (
        "import json, os, signal; print(json.dumps({'level': 'ERROR', 'message': 'no room'})); "
        "import sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = Child("child", ["-c", script], tmp_path / "log", {}, command=[sys.executable])
    assert child.exit_message() == (
        f"the child was killed by SIGKILL, as the kernel does when memory runs out; its log is {tmp_path / 'log'}\n"
        "the log ends with:\nERROR no room"
    )
    assert child.new_messages() == ["no room"]
    with child.log_path.open("a") as log:
        log.write("10:00:00 INFO step 1\n10:00:01 WARNING 5 of 8 teach nothing\nTraceback\n10:00:02 ERROR no di")
        log.flush()
        assert child.new_messages() == ["5 of 8 teach nothing"]
        log.write('sk\n10:00:03 INFO resuming from the checkpoint of step 3\n{"no": "line"}\n[1]\n')
        log.write("10:00:04 INFO ended: step 3 is the last\n")
    assert child.new_messages() == ["no disk", "resuming from the checkpoint of step 3", "ended: step 3 is the last"]
    assert child.new_messages() == []
    child.log_path.write_text("10:00:04 WARNING cut\n10:00:05 INFO pretraining\n[2]\n")
    assert child.new_messages("INFO") == ["cut", "pretraining"]


def test_child_does_not_import_modules_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise AssertionError('not the standard library')")
    child = Child("child", ["json.tool", "--help"], tmp_path / "log", {})
    assert child.process.wait(100) == 0, child.log_path.read_text()


SCRIPT = (
    SHEBANG
    + """import http.server, subprocess, sys
print("started", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
)


def vllm_config(folder, *, script=SCRIPT, max_tokens=20, **policy):
    (folder / "policy").mkdir(exist_ok=True)
    (folder / "policy/config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    command = folder / "vllm"
    command.write_text(script)
    command.chmod(0o755)
    vllm = {"command": str(command), "arguments": ["--seed", "3"]}
    actor = {
        "policy": {"model": str(folder / "policy"), **policy},
        "prompts": {"max_tokens": max_tokens},
        "generation": {"engine": "vllm", "max_new_tokens": 12, "vllm": vllm},
    }
    return RunConfig.model_validate({"run": {"dir": str(folder / "run")}, "actor": actor})


@pytest.mark.parametrize(("rank", "limit"), [(16, "16"), (48, "64")])
def test_vllm_arguments_have_the_policys_model_dtype_length_and_lora_rank(tmp_path, rank, limit):
    config = vllm_config(tmp_path, precision="bfloat16", lora_rank=rank)
    assert starts_vllm(config)
    check_vllm(config)
    arguments = vllm_arguments(config, "127.0.0.1:8123")
    assert arguments[:2] == ["serve", str(tmp_path / "policy")]
    assert arguments[-2:] == ["--seed", "3"]
    expected = {"--host": "127.0.0.1", "--port": "8123", "--dtype": "bfloat16", "--max-model-len": "32"}
    pairs = dict(itertools.pairwise(arguments))
    assert pairs.items() >= (expected | {"--max-lora-rank": limit}).items()


def test_settings_that_vllm_cannot_serve_are_refused_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"actor.policy.lora_rank: 513 is above 512"):
        check_vllm(vllm_config(tmp_path, lora_rank=513))
    long = r"rows of at most 64 tokens, but actor.prompts.max_tokens \(60\) \+ .* is 72"
    with pytest.raises(ConfigError, match=long):
        check_prompts(vllm_config(tmp_path, max_tokens=60))
    config = vllm_config(tmp_path)
    (tmp_path / "vllm").unlink()
    with pytest.raises(ConfigError, match=r"actor.generation.vllm.command: .*/vllm is not an executable; install vLLM"):
        check_vllm(config)


def test_dead_vllm_server_is_restarted_and_its_processes_end(tmp_path):
    events = []
    url = f"127.0.0.1:{free_port()}"
    config = vllm_config(tmp_path)
    vllm = Supervisor(lambda: VllmServer(config, url), log=events.append, name="vLLM")
    try:
        first = psutil.Process(vllm.server.pid)
        engine = first.children()
        first.send_signal(signal.SIGKILL)
        wait_for(lambda: (vllm.restart_if_down(), vllm.server.pid != first.pid)[1])
        assert "the vLLM server was killed by SIGKILL" in events[0]
        assert (tmp_path / "run/logs/vllm.previous.log").read_text() == "started\n", (
            "the log of a failed start, with its reason, is lost"
        )
        assert not psutil.wait_procs(engine, 120)[1]
        group = psutil.Process(vllm.server.pid).children()
    finally:
        vllm.stop()
    assert not psutil.wait_procs(group, 120)[1]


def test_a_vllm_server_that_cannot_start_is_an_error_with_its_log(tmp_path):
    config = vllm_config(tmp_path, script=f"{SHEBANG}import sys\nsys.exit('no such device')\n")
    with pytest.raises(RlhfError, match="no such device"):
        VllmServer(config, f"127.0.0.1:{free_port()}")


class Answering(HttpServer):
    """Replies to every request with `content`."""

    content = b""

    def reply(self, path, headers, body):
        return 200, {}, self.content


def test_only_a_program_named_triton_is_triton():
    with Answering() as server:
        for content, expected in {
            b'{"name": "triton", "version": "2.51.0", "extensions": []}': True,
            b'{"services": [{"name":"triton"}]}': False,
            b'["name"]': False,
            b"<title>triton</title>": False,
        }.items():
            server.content = content
            assert is_triton(server.url.removeprefix("http://")) == expected
    assert not is_triton(f"127.0.0.1:{free_port()}")
