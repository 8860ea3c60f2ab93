"""`make test-device` runs this folder on simulated GPUs; on a real one, those files run that need no simulation."""

import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("test_*.py"))
NEED_SIMULATION = [path.name for path in FILES if "simcuda" in path.read_text() or "simulated_cuda" in path.read_text()]
IS_SIMULATED = "simulated_cuda.plugin" in sys.modules
IS_REAL = not IS_SIMULATED and torch.cuda.is_available()

collect_ignore = [] if IS_SIMULATED else NEED_SIMULATION if IS_REAL else [path.name for path in FILES]


def pytest_terminal_summary(terminalreporter):
    if IS_REAL:
        terminalreporter.write_line(f"SKIPPED, because they need simulated GPUs: {', '.join(NEED_SIMULATION)}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A policy."""
    from run_checkpoints import make_checkpoint, make_tokenizer  # imports what a real GPU's tests need not have

    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)
