"""docs/plain-tritonserver.md as it stands: its command, the lines that this prints, in a clean shell, and its client.

In a folder whose name has a space and an umlaut, as has the virtual environment's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from live_system import Checkpoints, direct_rewards

from python_backend.config.sections import UNMEASURED
from tools.server.triton_home import SETTINGS, find_tritonserver, lay_out_backends, server_environment

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plain-tritonserver.md").read_text()
FUNCTION = """
def verify(sample):
    return float("answer" in sample.metadata)
"""


def block(language: str) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]


def environment_below(folder: Path) -> Path:
    """A virtual environment with the packages of this one; return its Python."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    return folder / "bin" / "python3"


def image_below(folder: Path) -> Path:
    """The layout of the NGC image: the backend's files, with one stub, beside the server; return the server."""
    wheel = find_tritonserver()
    lay_out_backends(wheel, folder / "backends")
    server = folder / "bin" / "tritonserver"
    server.parent.mkdir(parents=True)
    libraries = server_environment(wheel)["LD_LIBRARY_PATH"]  # the image's are where the loader finds them
    server.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.quote(str(wheel.binary))} "$@"\n'
    )
    server.chmod(0o755)
    return server


def printed_lines(python: Path, folder: Path, *overrides: str) -> str:
    """Run the page's command in `folder`; return what it prints."""
    (command,) = re.findall(r"^    \.venv/bin/python (.* --print-command)$", PAGE, re.MULTILINE)
    settings = [f"reward.{name}={value}" for name, value in UNMEASURED.items()]
    ports = [f"server.{name}_port=0" for name in ("http", "grpc", "metrics")]
    done = subprocess.run(
        [str(python), *command.split(), *settings, *ports, *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def pasted(lines: str, log: Path) -> Iterator[tuple[psutil.Process, str]]:
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
    assert shell.stdin is not None
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


def is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://{url}/v2/health/ready", timeout=10).status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("installed", ["wheel", pytest.param("image", marks=pytest.mark.slow)])
def test_what_is_printed_serves_and_the_example_gets_rewards(
    checkpoints: Checkpoints, tmp_path: Path, installed: str
) -> None:
    folder = tmp_path / "ü x"
    python = environment_below(folder / "environment")
    (folder / "my.yaml").write_text(block("yaml"))
    (folder / "my_rewards.py").write_text(FUNCTION)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "reward").symlink_to(checkpoints.reward)
    overrides = [f"server.tritonserver={image_below(tmp_path / 'tritonserver')}"] if installed == "image" else []
    lines = printed_lines(
        python,
        folder,
        "rewards={model: {}, verdict: {function: 'my_rewards.py:verify', workers: 1}}",
        f"critic.checkpoint={checkpoints.critic}",  # its version 0 is published by what is printed
        *overrides,
    )
    assert (folder / "runs" / "mine" / "weights" / "control.key").read_text() not in lines
    with pasted(lines, tmp_path / "log") as (server, url):
        client = block("py").replace("127.0.0.1:8000", url)
        done = subprocess.run([sys.executable, "-c", client], cwd="/", capture_output=True, text=True, check=False)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://{url}/v2/repository/index", data=b"")
        sockets = [at for at in server.net_connections() if at.status == psutil.CONN_LISTEN]
        assert {at.laddr.ip.removeprefix("::ffff:") for at in sockets} == {"127.0.0.1"}
        assert server.environ().items() >= SETTINGS.items()
        assert urllib.request.urlopen(f"http://{url}/v2/models/critic/ready", timeout=10).status == 200
    assert done.returncode == 0, done.stderr
    scores = np.array(re.findall(r"-?\d+\.\d*(?:e-?\d+)?", done.stdout), np.float64)
    rows = [np.array([5, 6, 7]), np.array([8, 9])]
    np.testing.assert_allclose(scores[:2], direct_rewards(checkpoints.reward, rows), rtol=1e-3, atol=1e-4)
    assert len(scores) == 4
