"""What the image of Dockerfile.triton runs when it serves the committed repository alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import pytest
from shebang import SHEBANG
from tiny_models import tiny_server, write_repository

from python_backend.config import RunConfig
from python_backend.store.control_key import VARIABLE
from tools.render_configs import DEFAULT_REPOSITORY, main, parse_config, render_repository
from tools.server.container import EXIT_TIMEOUT_S, copy_repository, training_key, tritonserver_command, weights_dir
from tools.server.drain import main as drain
from tools.server.healthcheck import check as healthcheck

ROOT = Path(__file__).resolve().parents[2]


# In place of tritonserver: on SIGTERM it ends with the number of models that the server under test still has.
FAKE_TRITONSERVER = (
    SHEBANG
    + """import signal, sys
sys.path.insert(0, {root!r})
from tools.server.drain import _loaded
signal.signal(signal.SIGTERM, lambda *_: sys.exit(len(_loaded({url!r}, "tiny"))))
print("serving", flush=True)
while True:
    signal.pause()
"""
)
ENTRY_POINT = """
import functools, sys
from pathlib import Path
from tools.server import entry_point
entry_point.drain = functools.partial(entry_point.drain, url=sys.argv[1])
sys.exit(entry_point.main())
"""


def start_entry_point(folder: Path, tritonserver: str, *arguments: str) -> subprocess.Popen[str]:
    """Start what the image runs in `folder`, where the image's repository is, with this script as `tritonserver`."""
    fake = folder / "bin" / "tritonserver"
    fake.parent.mkdir()
    fake.write_text(tritonserver)
    fake.chmod(0o755)
    (folder / "model_repository").symlink_to(DEFAULT_REPOSITORY)
    environment = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(arguments or ["-m", "tools.server.entry_point"])]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_stopped_container_and_the_drain_command_unload_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            assert container.stdout is not None
            while container.stdout.readline() != "serving\n":
                assert container.poll() is None
            container.terminate()
        assert container.returncode == 0, "tritonserver was stopped while it had models"
        assert not any(control.is_ready(model) for model in server.models())
        assert drain(repository, url) == 0
    assert drain(repository, server.section.http_url) == 1, "it does not run"


def test_a_drain_ends_soon_after_the_last_process_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model stays in the index until its requests are answered, which those of a dead process never are."""
    name = f"stub-of-{tmp_path.name}-{os.getpid()}"
    monkeypatch.setattr("tools.server.drain.STUB", name)
    monkeypatch.setattr("tools.server.drain._post", lambda *_: b'[{"name": "critic", "state": "UNLOADING"}]')
    monkeypatch.setenv(VARIABLE, "any")
    begin = time.monotonic()
    with subprocess.Popen([f"/somewhere/{name}", "600"], executable=shutil.which("sleep")) as stub:
        threading.Timer(1.5, stub.kill).start()
        assert drain(tmp_path, "nowhere") == 1
    assert 1.5 < time.monotonic() - begin < 10


def test_everything_that_is_not_needed_is_closed(tmp_path: Path) -> None:
    command = tritonserver_command(tmp_path, key="secret", address="0.0.0.0", control_address="127.0.0.1")
    options = {name: value for name, _, value in (argument.partition("=") for argument in command[1:])}
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        closed, _, key = options[option].partition(":")
        assert {"model-repository", "shared-memory", "trace", "logging"} == set(closed.split(","))
        assert key.endswith("=secret")
    assert options["--grpc-address"] == "127.0.0.1"
    assert options["--load-model"] == "*"
    assert int(options["--exit-timeout-secs"]) == EXIT_TIMEOUT_S < 10
    assert (options["--allow-sagemaker"], options["--allow-vertex-ai"]) == ("false", "false")


def test_a_training_key_is_made_once_and_is_nobody_elses_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRAINING_KEY", raising=False)
    key = training_key(tmp_path / "runs")
    file = tmp_path / "runs" / "training.key"
    assert (len(key), stat.S_IMODE(file.stat().st_mode)) == (64, 0o600)
    assert f"the key in {file}" in capsys.readouterr().out
    assert training_key(tmp_path / "runs") == key
    monkeypatch.setenv("TRAINING_KEY", "mine")
    assert training_key(tmp_path / "runs") == "mine"


def rendered(folder: Path, **sections: dict) -> Path:
    render_repository(RunConfig.model_validate(sections), folder, resolve_paths=False)
    return folder


def test_training_needs_the_key_unless_another_was_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "other")
    rewards = {"length": {"function": "rewards/length.py:penalty"}}
    for name, key, sections in (
        ("plain", "secret", {}),
        ("functions", "secret", {"rewards": rewards}),
        ("key", "other", {"server": {"training_key_env": "MY_KEY"}}),
    ):
        source, copy = rendered(tmp_path / name, **sections), tmp_path / f"{name}-copy"
        copy_repository(source, copy, "secret")
        assert {path.name for path in copy.iterdir()} == {path.name for path in source.iterdir()}
        for path in copy.glob("*/config.pbtxt"):
            model = path.parent.name
            if model in ("critic_train", "critic_save"):
                found = parse_config(model, path.read_text()).parameters["training_key_sha256"].string_value
                assert found == hashlib.sha256(key.encode()).hexdigest()
            else:
                assert path.read_text() == (source / model / "config.pbtxt").read_text()
        assert weights_dir(copy) == Path("runs/default/weights/critic")


def test_another_rendering_keeps_its_paths_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.yaml").write_text("rewards: {length: {function: 'rewards/length.py:penalty'}, model: {}}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--config", "my.yaml", "--relative", "--out", "repository"]) == 0
    texts = "".join(path.read_text() for path in Path("repository").glob("*/config.pbtxt"))
    assert (str(tmp_path) in texts, '"rewards/length.py:penalty"' in texts) == (False, True)


def make_current(folder: Path, version: int) -> None:
    (folder / "weights").mkdir(exist_ok=True)
    (folder / "weights" / "CURRENT").write_text(f"{version}\n")


def test_the_server_that_it_starts_serves_and_the_healthcheck_infers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the wheel's server, but for the one option that it does not know yet."""
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
        assert healthcheck(tmp_path / "repository", url) == 0
        make_current(tmp_path, 0)
        assert healthcheck(tmp_path / "repository", url) == 0
        make_current(tmp_path, 1)
        assert healthcheck(tmp_path / "repository", url) == 1
        assert "critic serves version 0, but CURRENT is 1" in capsys.readouterr().err
        make_current(tmp_path, 0)
        for stub in server.processes()["reward_model"]:
            stub.kill()
        assert healthcheck(tmp_path / "repository", url) == 1


def test_a_live_reward_model_behind_current_is_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 2}}, "reward": {"store": True}}
    repository = rendered(tmp_path / "repository", **sections, rewards={"model": {}})
    monkeypatch.setattr("tools.server.healthcheck.infer", lambda *_: {"rewards": [0.5], "reward_version": [3]})
    monkeypatch.chdir(tmp_path)
    assert weights_dir(repository) == Path("runs/default/weights/reward")
    for current, code in ((3, 0), (4, 1)):
        weights_dir(repository).mkdir(parents=True, exist_ok=True)
        (weights_dir(repository) / "CURRENT").write_text(f"{current}\n")
        assert healthcheck(repository, "http://nowhere") == code
    assert "reward_model serves version 3, but CURRENT is 4" in capsys.readouterr().err


@pytest.mark.parametrize("sections", [{}, {"actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 2}}}])
def test_a_reward_model_that_needs_more_than_tokens_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sections: dict
) -> None:
    """It refuses the probe's row; the critic beside it is asked alone then."""
    repository = rendered(tmp_path / "repository", reward={"template": "{{ response }}"}, **sections)
    refusal = b'{"error": "tokens: reward.template needs more than a row of tokens; send sentences"}'

    class Server:
        def open(self, where: str | urllib.request.Request, timeout: float) -> io.BytesIO:
            if isinstance(where, str):
                types = (("tokens", "INT64"), ("sequence_lengths", "INT64"))
                return io.BytesIO(json.dumps({"inputs": [{"name": n, "datatype": d} for n, d in types]}).encode())
            if where.full_url.endswith("/critic/infer"):
                return io.BytesIO(b'{"outputs": [{"name": "weights_version", "data": [3]}]}')
            raise urllib.error.HTTPError(where.full_url, 400, "Bad Request", Message(), io.BytesIO(refusal))

    monkeypatch.setattr("tools.server.healthcheck.LOCAL", Server())
    monkeypatch.chdir(tmp_path)
    for current, code in ((3, 0), (4, 1 if (repository / "critic").is_dir() else 0)):
        weights_dir(repository).mkdir(parents=True, exist_ok=True)
        (weights_dir(repository) / "CURRENT").write_text(f"{current}\n")
        assert healthcheck(repository, "http://nowhere") == code
    refusal = b'{"error": "out of memory"}'
    assert healthcheck(repository, "http://nowhere") == 1


def test_what_it_writes_is_nobody_elses_to_read(tmp_path: Path) -> None:
    """The server's models write with the mask of the entry point; the exit code is the server's."""
    container = start_entry_point(tmp_path, "#!/bin/sh\nmkdir runs/journal && touch runs/journal/entry\nexit 3")
    container.communicate()
    assert container.returncode == 3
    for path in (tmp_path / "runs").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
