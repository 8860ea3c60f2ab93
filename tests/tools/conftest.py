"""A configuration that doctor and the start of a run can check."""

import pytest
from live_system import make_run


@pytest.fixture
def config(tmp_path, checkpoints):
    """A configuration of a PPO run, on free ports."""
    return make_run(tmp_path / "run", checkpoints).path
