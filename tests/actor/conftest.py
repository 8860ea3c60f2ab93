"""The policy of the actor's tests: a random Llama of a few thousand weights."""

from pathlib import Path

import pytest
from live_system import Checkpoints


@pytest.fixture(scope="session")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints.policy
