"""An empty journal."""

import pytest

from rlhf_triton.store.journal import Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal", "run")
