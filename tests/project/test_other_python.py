"""The server on another Python than the one that runs the tests: one that corrupts memory may only crash elsewhere.

`RLHF_OTHER_VENVS` names virtual environments that `make test PYTHON=...` has made in other clones, separated by `:`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "RLHF_OTHER_VENVS"
NONE_GIVEN = pytest.mark.skip(reason=f"{VARIABLE} names no virtual environment of another Python")
VENVS = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
TESTS = (  # one output of several is requested of the critic, of a reward function and of the mixture
    "test_serving.py::test_values_alone_do_not_run_the_reward_model",
    "test_reward_mixture.py::test_rewards_alone_may_be_asked_for_and_a_missing_label_is_no_zero",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("venv", VENVS or [pytest.param(None, marks=NONE_GIVEN)], ids=str)
def test_requests_are_answered(venv: Path, tmp_path: Path) -> None:
    # From this folder: a stub imports the models from the folder that the server was started in.
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'other'}"]
    command = [str(venv / "bin" / "python"), "-m", "pytest", *options, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
