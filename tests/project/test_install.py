"""The script that Dockerfile.triton runs, in a fresh virtual environment: each image gets what it needs, no more."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "install.sh"
NOWHERE = {"pytriton", "vaderSentiment", "pytest", "benchmarks", "chaos"}  # in no image
TRAINING = {"peft", "tensorboard", "pyarrow", "matplotlib"}
STAGES = {
    "serving,operating": ("import tools.serve, tools.render_configs, tools.server.healthcheck", NOWHERE | TRAINING),
    "training": ("import tools.run, trainer.sidecar, actor.loop, matplotlib, peft, pyarrow, tensorboard", NOWHERE),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_script_installs_what_each_image_needs(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    assert str(python) != sys.executable
    (kept := ROOT / "build" / "kept").mkdir(parents=True, exist_ok=True)  # as simulated cards are
    for extras, (imports, absent) in STAGES.items():
        done = subprocess.run(
            [str(SCRIPT), extras],
            env={**os.environ, "PYTHON": str(python)},  # pip keeps the settings that it has here
            capture_output=True,
            text=True,
            timeout=840,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        code = f"{imports}; import importlib.util as u; print([n for n in {sorted(absent)} if u.find_spec(n)])"
        ran = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
        for arguments, expected in ((["serve", "--help"], 0), (["chaos", "--help"], 2)):  # it is in no image
            script = [str(python.with_name("rlhf-triton")), *arguments]
            ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert ran.returncode == expected, ran.stderr
    kept.rmdir()


def test_script_needs_an_extra() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: tools/install.sh EXTRA" in done.stderr) == (1, True)
