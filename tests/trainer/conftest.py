"""The critic of the sidecar's tests: a tiny Llama with a value head."""

import pytest
from tiny_checkpoints import save_tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder, "llama", "critic")
    return folder
