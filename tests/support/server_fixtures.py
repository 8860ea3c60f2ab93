"""The server that the integration tests share. It is started once per session, when it is first used, because loading
torch in two stubs is slow.
"""

import contextlib
import hashlib

import pytest
from live_system import make_run, reload_model, run_actor, start_system
from run_checkpoints import make_checkpoints
from schedule import scope_of

from rlhf_triton.wire.contract import CRITIC_SAVE, CRITIC_TRAIN

KEY_VARIABLE = "RLHF_TEST_TRAINING_KEY"
RUNNING = contextlib.ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Stop it after the last test that shares it, which only xdist's workers know: idle, it takes CPU time."""
    if hasattr(item.config, "workerinput") and (nextitem is None or not shares_servers(nextitem)):
        RUNNING.close()


def shares_servers(item):
    return scope_of(item.nodeid.partition("::")[0]) == "servers"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Tiny random models."""
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def live(tmp_path_factory, checkpoints):
    """Server and sidecar with the default reload, one tokenizer and a live reward model, after three PPO steps.

    A test that loads its models with other settings loads them as they were again.
    """
    system = start_system(make_run(tmp_path_factory.mktemp("live"), checkpoints, reward={"store": True}))
    RUNNING.callback(system.stop)
    code, log = run_actor(system.run, "actor")
    assert code == 0, log
    yield system
    RUNNING.close()


@pytest.fixture
def training_key(live, monkeypatch):
    """A key, also in KEY_VARIABLE, that training on the live server needs during a test."""
    key = "open sesame"
    monkeypatch.setenv(KEY_VARIABLE, key)
    digest = {"training_key_sha256": {"string_value": hashlib.sha256(key.encode()).hexdigest()}}
    for model in (CRITIC_TRAIN, CRITIC_SAVE):
        reload_model(live.run, model, lambda config: config["parameters"].update(digest))
    yield key
    for model in (CRITIC_TRAIN, CRITIC_SAVE):
        reload_model(live.run, model, lambda config: None)


@pytest.fixture(autouse=True)
def sidecar_runs(request):
    """Start the sidecar of the shared system again if a test that failed has left it without one."""
    if "live" in request.fixturenames:
        system = request.getfixturevalue("live")
        if system.sidecar.poll() is not None:
            system.start_sidecar()
