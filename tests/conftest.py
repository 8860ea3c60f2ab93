"""What every test gets: one torch thread, so that bits and timings do not depend on the machine's cores."""

import pytest
import torch

pytest_plugins = ["server_fixtures", "sidecar_fixtures"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
