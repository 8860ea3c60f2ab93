"""Settings of all tests: the same bits and the same examples each time, on a machine of any speed."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Not in this folder: Triton's own stubs put the folder that pytest was started in before theirs.
sys.path.append(str(Path(__file__).parent / "support" / "stub"))

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

pytest_plugins = ["schedule", "scoring_rig", "server_fixtures", "sidecar_fixtures"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
