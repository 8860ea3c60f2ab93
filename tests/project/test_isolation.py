"""A failed test affects no other test, and a checkout uses its own code in any environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import asyncio, gc, socket, subprocess
import aiohttp, psutil
from fake_triton import FakeTriton

async def test_leaves_a_client_session_and_a_server():
    server = FakeTriton()
    await server.start()
    session = aiohttp.ClientSession()
    async with session.get(f"http://{server.url}/v2/models/x/ready"):
        raise KeyError

async def test_after_it():
    gc.collect()
    assert len(asyncio.all_tasks()) == 1

def test_leaves_a_process_a_file_a_socket_and_an_event_loop():
    left = subprocess.Popen(["sleep", "600"]), open("/dev/null"), socket.socket(), asyncio.new_event_loop()
    raise KeyError

def test_after_that():
    gc.collect()
    assert [child for child in psutil.Process().children() if "sleep" in child.cmdline()] == []
"""


@pytest.mark.slow
def test_resources_left_open_by_a_failed_test_fail_no_other(tmp_path):
    (tmp_path / "test_left.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "2 failed, 2 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["tools/config_reference.py", "--check"],
        ["tools/render_configs.py", "--check"],
        ["deploy/monitoring/generate.py"],
        ["-m", "benchmarks", "--help"],
        ["-m", "examples.demo", "--help"],
    ],
)
def test_checkout_uses_its_own_code_in_another_checkouts_environment(tmp_path, arguments):
    other = shutil.copytree(
        ROOT,
        tmp_path / "other",
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "tests", "runs"),
    )
    with (other / "rlhf_triton" / "__init__.py").open("a") as module:
        module.write("print('of the other checkout')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=other, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("of the other checkout\n")
