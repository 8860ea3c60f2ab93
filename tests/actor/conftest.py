"""The policy of the actor's tests: a random Llama of a few thousand weights."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(checkpoints) -> Path:
    return checkpoints.policy
