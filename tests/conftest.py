"""What every test gets: one torch thread, so that bits and timings do not depend on the machine's cores.

Two pytest workers share the tests. Those that share a server run in one worker, so that it is started once; those of a
file stay together, because the file's fixtures are started once for them.
"""

import sys
from pathlib import Path

import pytest
import torch

# Not in this folder: Triton's own stubs put the folder that pytest was started in before theirs.
sys.path.append(str(Path(__file__).parent / "stub"))

pytest_plugins = ["server_fixtures", "sidecar_fixtures"]
SHARED_SERVERS = {"live", "finished"}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        shares = SHARED_SERVERS.intersection(item.fixturenames)
        item.add_marker(pytest.mark.xdist_group("shared servers" if shares else item.path.stem))
