"""The policy of the actor's tests: a random Llama of a few thousand weights."""

import pytest


@pytest.fixture(scope="session")
def checkpoint(checkpoints):
    return checkpoints.policy
