"""The script that Dockerfile.triton runs, in a fresh virtual environment: it installs what serving needs, no more."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_script_installs_the_serving_part_alone(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [str(ROOT / "tools" / "install_serving.sh")],
        env={**os.environ, "PYTHON": str(python)},  # pip keeps the settings that it has here
        capture_output=True, text=True, timeout=840, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    others = (
        "tritonclient", "pytriton", "matplotlib", "vaderSentiment", "tensorboard", "psutil", "benchmarks", "chaos",
    )  # fmt: skip
    code = (
        "import importlib.util as u, numpy, safetensors, tokenizers, torch, transformers;"
        "import python_backend.models.modeling;"
        f"print(numpy.__version__, [n for n in {others} if u.find_spec(n)])"
    )
    said = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    version, absent = said.split(maxsplit=1)
    assert version.startswith("1.")
    assert absent.strip() == "[]"  # sys.executable's own packages did not leak in
    assert str(python) != sys.executable
