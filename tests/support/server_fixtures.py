"""Servers that the integration tests share. Each is started once per session, when it is first used, because loading
torch in two stubs is slow.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
from live_system import (
    TRAINING_KEY,
    Checkpoints,
    FinishedRun,
    System,
    make_checkpoints,
    make_run,
    run_actor,
    start_system,
)
from schedule import scope_of

KEY_VARIABLE = "RLHF_TEST_TRAINING_KEY"
RUNNING = contextlib.ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop them after the last test that shares them, which only xdist's workers know: idle, they take CPU time."""
    if hasattr(item.config, "workerinput") and (nextitem is None or not shares_servers(nextitem)):
        RUNNING.close()


def shares_servers(item: pytest.Item) -> bool:
    return scope_of(item.nodeid.partition("::")[0]) == "servers"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny random models."""
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    """Server and sidecar with the default reload, one tokenizer, a training key, and a live reward model."""
    with mock.patch.dict(os.environ, {KEY_VARIABLE: TRAINING_KEY}):
        sections = {"server": {"training_key_env": KEY_VARIABLE}, "reward": {"store": True}}
        run = make_run(tmp_path_factory.mktemp("live"), checkpoints, **sections)
        system = start_system(run)
        RUNNING.callback(system.stop)
        yield system
        RUNNING.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[FinishedRun]:
    """A system without a training key after three PPO steps; server and sidecar still run.

    Tests may load its models with other settings, so a test that needs a certain setting loads the model itself.
    """
    system = start_system(make_run(tmp_path_factory.mktemp("finished"), checkpoints))
    ended = FinishedRun(system.run, system.server, system.sidecar, *run_actor(system.run, "actor"))
    RUNNING.callback(ended.stop)
    yield ended
    RUNNING.close()


@pytest.fixture(autouse=True)
def sidecars_run(request: pytest.FixtureRequest) -> None:
    """Start the sidecar of a shared system again if a test that failed has left it without one."""
    for name in {"live", "finished"}.intersection(request.fixturenames):
        system = request.getfixturevalue(name)
        if system.sidecar.poll() is not None:
            system.start_sidecar()
