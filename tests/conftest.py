"""What every test gets: one torch thread, so that bits and timings do not depend on the machine's cores."""

import sys
from pathlib import Path

import pytest
import torch

# Not in this folder: Triton's own stubs put the folder that pytest was started in before theirs.
sys.path.append(str(Path(__file__).parent / "support" / "stub"))

pytest_plugins = ["schedule", "scoring_rig", "server_fixtures", "sidecar_fixtures"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
