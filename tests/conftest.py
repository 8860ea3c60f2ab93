"""Settings of all tests: bit-identical results and identical examples each time, however fast the machine is."""

import asyncio
import contextlib
import gc
import inspect
import random
import signal
import sys
import time
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings

from rlhf_triton.client import retry
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.tools.server.ports import release_ports

# Not in this folder: Triton's own stubs put the folder that pytest was started in before theirs.
sys.path.append(str(Path(__file__).parent / "support" / "stub"))

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

retry.BACKOFF_S = 0.001  # for the clients in this process, so that tests do not wait

LAST_ERROR = ("last_type", "last_value", "last_traceback", "last_exc")  # in `sys`: pytest keeps it for debuggers

pytest_plugins = ["schedule", "scoring_rig", "server_fixtures", "sidecar_fixtures"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Kill the processes that a test which fails has started and left, so that no later one finds them."""
    begin_s = time.time() - 1  # psutil knows the second in which the machine started
    try:
        yield
    except BaseException:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "multiprocessing" not in " ".join(child.cmdline()) and child.create_time() >= begin_s:
                    child.kill()
                    child.wait()
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Collect what a test which has failed left open, before Python warns of it in whatever test then runs."""
    try:
        yield
    finally:
        if any(hasattr(sys, name) for name in LAST_ERROR):
            for name in LAST_ERROR:
                vars(sys).pop(name, None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Reset the number of threads, on which results depend bit for bit and which the previous test may have changed.

    Whatever draws without a seed of its own draws the same each time, and what is logged once is logged in each test.
    Ports that the test before has claimed are free again.
    """
    release_ports()
    warn_once.cache_clear()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def pytest_sessionfinish():
    """Release the ports that tests have claimed, of which Python would warn."""
    release_ports()


@pytest.fixture(autouse=True)
def connections_end_before_their_loop(monkeypatch):
    """Fail the test that leaves one open; when it is collected, Python warns of it in whatever test then runs."""
    left = []
    close = BaseSelectorEventLoop.close

    def closing(loop):
        left.extend(repr(transport) for transport in loop._transports.values() if transport._sock is not None)
        close(loop)

    monkeypatch.setattr(BaseSelectorEventLoop, "close", closing)
    yield
    assert left == []


@pytest.fixture
def signals_kept():
    """Some commands take the signals of the process that they are the main program of."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
