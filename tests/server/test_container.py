"""A tritonserver outside our supervisor: the image of Dockerfile.triton, and docs/plain-tritonserver.md."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from expected_outputs import direct_rewards
from shebang import SHEBANG
from tiny_models import tiny_server, write_repository

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.control_key import VARIABLE, control_key
from rlhf_triton.tools.render_configs import DEFAULT_REPOSITORY, parse_pbtxt, render_repository
from rlhf_triton.tools.server.container import (
    EXIT_TIMEOUT_S,
    copy_repository,
    training_key,
    tritonserver_command,
    weights_dir,
)
from rlhf_triton.tools.server.drain import DRAIN_S, ORPHANED_S
from rlhf_triton.tools.server.drain import main as drain
from rlhf_triton.tools.server.healthcheck import check as healthcheck
from rlhf_triton.tools.server.triton_home import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
# In place of tritonserver: on SIGTERM it ends with the number of models that the server under test still has.
FAKE_TRITONSERVER = (
    SHEBANG
    + """import signal, sys
sys.path.insert(0, {root!r})
from rlhf_triton.tools.server.drain import _loaded
signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(_loaded({url!r}, "tiny"))))
print("serving", flush=True)
while True:
    signal.pause()
"""
)
ENTRY_POINT = """
import functools, sys
from pathlib import Path
from rlhf_triton.tools.server import entry_point
entry_point.drain = functools.partial(entry_point.drain, url=sys.argv[1])
sys.exit(entry_point.main())
"""


def start_entry_point(folder, tritonserver, *arguments):
    """Start the image's entry point in `folder`, next to the image's repository, with this script as `tritonserver`."""
    fake = folder / "bin" / "tritonserver"
    fake.parent.mkdir()
    fake.write_text(tritonserver)
    fake.chmod(0o755)
    (folder / "model_repository").symlink_to(DEFAULT_REPOSITORY)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(arguments or ["-m", "rlhf_triton.tools.server.entry_point"])]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_stopped_container_and_the_drain_command_unload_every_model(tmp_path, monkeypatch):
    repository = tmp_path / "repository"
    write_repository(repository)
    with tiny_server(tmp_path) as server, server.control() as control:
        server.wait_ready()
        monkeypatch.setenv(VARIABLE, "wrong")
        assert drain(repository, server.section.http_url) == 1
        assert control.is_ready("critic")
        monkeypatch.setenv(VARIABLE, "tiny")
        url = server.section.http_url
        fake = FAKE_TRITONSERVER.format(root=str(ROOT), url=url)
        with start_entry_point(tmp_path, fake, "-c", ENTRY_POINT, url) as container:
            while container.stdout.readline() != "serving\n":
                assert container.poll() is None
            container.terminate()
        assert container.returncode == 0, "tritonserver was stopped while it had models"
        assert not any(control.is_ready(model) for model in server.models())
        assert drain(repository, url) == 0
    assert drain(repository, server.section.http_url) == 1, "drain succeeded without a server"


def test_drain_ends_soon_after_the_models_last_process_dies(tmp_path, monkeypatch):
    """A model stays in the index until its requests are answered, which those of a dead process never are."""
    name = f"stub-of-{tmp_path.name}-{os.getpid()}"
    monkeypatch.setattr("rlhf_triton.tools.server.drain.STUB", name)
    monkeypatch.setattr(
        "rlhf_triton.tools.server.drain._post", lambda *_: b'[{"name": "critic", "state": "UNLOADING"}]'
    )
    monkeypatch.setenv(VARIABLE, "any")
    now = [100.0]
    with subprocess.Popen([f"/somewhere/{name}", "600"], executable=shutil.which("sleep")) as stub:

        def sleep(seconds):
            now[0] += seconds
            if now[0] > 103.0 and stub.poll() is None:
                stub.kill()
                stub.wait()

        monkeypatch.setattr(
            "rlhf_triton.tools.server.drain.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
        )
        assert drain(tmp_path, "nowhere") == 1
    assert 103.0 < now[0] < 104.0 + ORPHANED_S < 100.0 + DRAIN_S


def test_container_files_are_private_and_the_servers_exit_code_is_passed_on(tmp_path):
    container = start_entry_point(tmp_path, "#!/bin/sh\nmkdir runs/journal && touch runs/journal/entry\nexit 3")
    container.communicate()
    assert container.returncode == 3
    assert [path for path in (tmp_path / "runs").rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_container_command_restricts_unneeded_apis_to_the_control_key(tmp_path):
    command = tritonserver_command(tmp_path, key="secret", address="0.0.0.0", control_address="127.0.0.1")
    options = {name: value for name, _, value in (argument.partition("=") for argument in command[1:])}
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        closed, _, key = options[option].partition(":")
        assert {"model-repository", "shared-memory", "trace", "logging"} == set(closed.split(","))
        assert key.endswith("=secret")
    open_to = ("--grpc-address", "--load-model", "--allow-sagemaker", "--allow-vertex-ai")
    assert [options[name] for name in open_to] == ["127.0.0.1", "*", "false", "false"]
    assert int(options["--exit-timeout-secs"]) == EXIT_TIMEOUT_S < 10


# ---- keys ----


@pytest.mark.parametrize(
    ("make", "name", "variable"),
    [(training_key, "training.key", "TRAINING_KEY"), (control_key, "control.key", VARIABLE)],
)
def test_keys_are_created_once_with_private_permissions(tmp_path, monkeypatch, make, name, variable):
    monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "weights"  # the control key is beside it: all that share the weights share the key
    key = make(folder)
    (file,) = tmp_path.rglob(name)
    assert (len(key), stat.S_IMODE(file.stat().st_mode), make(folder)) == (64, 0o600, key)
    monkeypatch.setenv(variable, "given")
    assert make(folder) == "given"


def test_truncated_control_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for cut in ("", " \n", "0123456789abcde"):
        (tmp_path / "control.key").write_text(cut)
        with pytest.raises(RlhfError, match=r"control.key contains a key of (0|15) characters"):
            control_key(tmp_path / "critic")


# ---- the repository ----


def rendered(folder, **sections):
    render_repository(RunConfig.model_validate(sections), folder, resolve_paths=False)
    return folder


def test_the_container_adds_the_training_key_to_a_repository_rendered_without_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "other")
    rewards = {"length": {"function": "rewards/length.py:penalty"}}
    for name, key, sections in (
        ("plain", "secret", {}),
        ("functions", "secret", {"rewards": rewards}),
        ("key", "other", {"server": {"training_key_env": "MY_KEY"}}),
    ):
        source = rendered(tmp_path / name, **sections)
        copy = tmp_path / f"{name}-copy"
        copy_repository(source, copy, "secret")
        assert {path.name for path in copy.iterdir()} == {path.name for path in source.iterdir()}
        for path in copy.glob("*/config.pbtxt"):
            model = path.parent.name
            if model in ("critic_train", "critic_save"):
                found = parse_pbtxt(model, path.read_text()).parameters["training_key_sha256"].string_value
                assert found == hashlib.sha256(key.encode()).hexdigest()
            else:
                assert path.read_text() == (source / model / "config.pbtxt").read_text()
        assert weights_dir(copy) == Path("runs/default/weights/critic")


# ---- the health check ----


def make_current(weights, version):
    weights.mkdir(parents=True, exist_ok=True)
    (weights / "CURRENT").write_text(f"{version}\n")


def test_healthcheck_infers_on_a_running_server(tmp_path):
    """Uses the wheel's server, which lacks only one of the options."""
    write_repository(tmp_path / "source")
    with (tmp_path / "source" / "critic" / "config.pbtxt").open("a") as config:
        config.write(f'parameters {{ key: "store" value {{ string_value: "{tmp_path / "weights"}" }} }}\n')
    copy_repository(tmp_path / "source", tmp_path / "repository", "secret")
    assert (tmp_path / "repository" / "critic" / "1" / "__pycache__").is_dir()
    with tiny_server(tmp_path) as server:
        server.wait_ready()
        known = {argument.partition("=")[0] for argument in server._command()}
        asked = tritonserver_command(tmp_path, key="k", address="127.0.0.1", control_address="127.0.0.1")[1:]
        assert {argument.partition("=")[0] for argument in asked} - known == {"--http-max-input-size"}
        url = f"http://{server.section.http_url}"
        assert healthcheck(tmp_path / "not rendered yet", url) == 1
        assert healthcheck(tmp_path / "repository", url) == 0
        make_current(tmp_path / "weights", 0)
        assert healthcheck(tmp_path / "repository", url) == 0
        for stub in server.processes()["reward_model"]:
            stub.kill()
        assert healthcheck(tmp_path / "repository", url) == 1


REFUSAL = "tokens: reward.template needs more than a row of tokens; send sentences"
GRPO = {"actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 2}}}
TEMPLATE = {"reward": {"template": "{{ response }}"}}


@pytest.mark.parametrize(
    ("sections", "refusal", "behind"),
    [
        ({**GRPO, "reward": {"store": True}, "rewards": {"model": {}}}, None, "reward_model serves version 3"),
        ({**TEMPLATE, "critic": {}}, REFUSAL, "critic serves version 3"),  # the critic is asked alone then
        ({**TEMPLATE, **GRPO}, REFUSAL, ""),
        (TEMPLATE, "out of memory", "HTTP Error 400"),
    ],
)
def test_healthcheck_fails_if_a_model_is_behind_current_or_fails(
    tmp_path, monkeypatch, capsys, sections, refusal, behind
):
    """A live reward model behind CURRENT is unhealthy; a model that says it needs more than tokens is healthy."""
    repository = rendered(tmp_path / "repository", **sections)

    def answer(where, timeout):
        if refusal and not where.full_url.endswith("/critic/infer"):
            body = io.BytesIO(json.dumps({"error": refusal}).encode())
            raise urllib.error.HTTPError(where.full_url, 400, "Bad Request", Message(), body)
        outputs = [{"name": name, "data": [3]} for name in ("weights_version", "reward_version")]
        return io.BytesIO(json.dumps({"outputs": outputs}).encode())

    monkeypatch.setattr("rlhf_triton.tools.server.healthcheck.LOCAL", SimpleNamespace(open=answer))
    monkeypatch.chdir(tmp_path)
    for current in (3, 4):
        make_current(weights_dir(repository), current)
        expected = 1 if refusal not in (None, REFUSAL) or (behind and current == 4) else 0
        assert healthcheck(repository, "http://nowhere") == expected
    assert behind in capsys.readouterr().err


# ---- docs/plain-tritonserver.md ----


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plain-tritonserver.md").read_text()
FUNCTION = """
def verify(sample):
    return float("answer" in sample.metadata)
"""


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]


def printed_lines(folder, *overrides):
    """Run the page's command in `folder`; return what it prints."""
    (command,) = re.findall(r"^    \.venv/bin/rlhf-triton (.* --print-command)$", PAGE, re.MULTILINE)
    ports = [f"server.{name}_port=0" for name in ("http", "grpc", "metrics")]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_triton.tools", *command.split(), *ports, *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def pasted(lines, log):
    """Paste lines into a clean shell in another folder; yield the server, once it is ready, and its address."""
    url = "127.0.0.1:" + re.findall(r"--http-port=(\d+)", lines)[0]
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            cwd="/",
            start_new_session=True,
        )
    try:
        shell.stdin.write(lines.encode())
        shell.stdin.close()
        while not is_ready(url):
            assert shell.poll() is None, log.read_text(errors="replace")
            time.sleep(0.05)
        (server,) = psutil.Process(shell.pid).children()
        yield server, url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGINT)  # as Ctrl-C does
        shell.wait()
    psutil.wait_procs([server], timeout=30)
    assert "Exit timeout expired" not in log.read_text(errors="replace"), "tritonserver did not stop in time"


def is_ready(url):
    try:
        return bool(urllib.request.urlopen(f"http://{url}/v2/health/ready", timeout=10).status == 200)
    except OSError:
        return False


@pytest.mark.slow
def test_documented_plain_tritonserver_commands_serve_rewards_in_a_clean_shell(checkpoints, tmp_path):
    folder = tmp_path
    (folder / "my.yaml").write_text(block("yaml"))
    (folder / "my_rewards.py").write_text(FUNCTION)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "reward").symlink_to(checkpoints.reward)
    lines = printed_lines(
        folder,
        "rewards={model: {}, verdict: {function: 'my_rewards.py:verify', workers: 1}}",
        f"critic.model={checkpoints.critic}",  # its version 0 is published by what is printed
    )
    assert (folder / "runs" / "mine" / "weights" / "control.key").read_text() not in lines
    with pasted(lines, tmp_path / "log") as (server, url):
        client = block("py").replace("127.0.0.1:8000", url)
        done = subprocess.run([sys.executable, "-c", client], cwd="/", capture_output=True, text=True)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://{url}/v2/repository/index", data=b"")
        sockets = [at for at in server.net_connections() if at.status == psutil.CONN_LISTEN]
        assert {at.laddr.ip.removeprefix("::ffff:") for at in sockets} == {"127.0.0.1"}
        assert server.environ().items() >= SETTINGS.items()
        assert urllib.request.urlopen(f"http://{url}/v2/models/critic/ready", timeout=120).status == 200
    assert done.returncode == 0, done.stderr
    scores = np.array(re.findall(r"-?\d+\.\d*(?:e-?\d+)?", done.stdout), np.float64)
    rows = [np.array([5, 6, 7]), np.array([8, 9])]
    np.testing.assert_allclose(scores[:2], direct_rewards(checkpoints.reward, rows), rtol=1e-3, atol=1e-4)
    assert len(scores) == 4
