"""pytest plugin (`-p simulated_cuda.plugin`): the simulated GPUs, and `cuda` as the device that sections default to.

Only the defaults of the configuration's sections change. A loader that is called without a device still loads on the
CPU, as it does for a user: giving it the GPU here would hide code that forgets to name one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simulated_cuda.hook import simulate_on_import

STARTUP = str(Path(__file__).resolve().parent / "startup")

simulate_on_import()


def pytest_configure(config):
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in [str(Path(path).resolve()) for path in paths]:
        raise pytest.UsageError(
            f"PYTHONPATH must have {STARTUP}, so that processes of tests have the simulated GPUs, too"
        )
    default_to_gpus()
    config.addinivalue_line("filterwarnings", "ignore:CUDA reports")


def pytest_collection_modifyitems(config, items):
    """Run the tests in `tests/device`, and of all others only those that take a path of their own on a GPU."""
    given = list(items)
    items[:] = [i for i in given if i.path.parent.name == "device" or i.get_closest_marker("device")]
    config.hook.pytest_deselected(items=[item for item in given if item not in items])


def pytest_runtest_setup():
    import torch

    # A model that was loaded or measured in this thread has chosen a GPU and a stream of its own.
    for gpu in reversed(range(torch.cuda.device_count())):
        torch.cuda.set_stream(torch.cuda.default_stream(gpu))  # which also makes the GPU current


def default_to_gpus():
    """Make `cuda` the default of each `device` in the configuration, and float32 that of each precision."""
    from rlhf_triton.config.run_config import RunConfig
    from rlhf_triton.config.sections import Section

    done = set()

    def change(section):
        if section in done:
            return
        done.add(section)
        for name, field in section.model_fields.items():
            if isinstance(field.default, Section):
                change(type(field.default))
                field.default = type(field.default)()
            elif name == "device":
                field.default = "cuda"
            elif name in ("precision", "dtype") and field.default is not None:
                field.default = "float32"  # not `auto`: tests that name none compare closer than bfloat16 allows
        section.model_rebuild(force=True)

    change(RunConfig)
    assert RunConfig().actor.policy.device == RunConfig.model_validate({"trainer": {}}).trainer.device == "cuda"
