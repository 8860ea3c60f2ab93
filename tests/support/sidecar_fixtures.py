"""Sidecar fixtures: `rig` runs and is served, `make` builds further rigs, `straight` is an undisturbed run.

A test module loads them with `pytest_plugins = ["sidecar_fixtures"]`.
"""

import pytest
from sidecar_rig import Rig
from tiny_checkpoints import save_tiny

from rlhf_triton.models.modeling import quiet_transformers


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    quiet_transformers()
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder, "gpt2", "critic", n_layer=1)
    return folder


@pytest.fixture
def make(tmp_path, checkpoint):
    rigs = []

    def new(name="run", **settings):
        rigs.append(Rig(tmp_path / name, checkpoint, **settings))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make, straight):
    """A running sidecar and one serving instance.

    It starts after `straight` has ended: models that load at the same time share torch's random state.
    """
    return make().begin()


@pytest.fixture(scope="session")
def straight(tmp_path_factory, checkpoint):
    """Six undisturbed steps with every version kept: the expected result of all other runs."""
    rig = Rig(tmp_path_factory.mktemp("straight"), checkpoint, publish={"keep": 100})
    rig.begin().train(1, 2, 3, 4, 5, 6)
    rig.stop()
    yield rig
    rig.close()
