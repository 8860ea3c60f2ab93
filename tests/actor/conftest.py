"""The policy of the actor's tests: a random Llama of a few thousand weights."""

import pytest
from generated_conversations import random_policy


@pytest.fixture(scope="session")
def checkpoint(checkpoints):
    return checkpoints.policy


@pytest.fixture(scope="module")
def model():
    """Return a policy with random weights whose replies end on their own now and then."""
    return random_policy(6.0)
