"""The notebooks of examples/, executed in a short form; with RENEW_NOTEBOOKS=1 as they are, and stored with outputs."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

import rlhf_triton as rt

ROOT = Path(__file__).resolve().parents[2]
GRPO, PPO = NOTEBOOKS = [
    ROOT / "examples" / f"{name}.ipynb" for name in ("grpo_with_a_verifier", "ppo_with_a_reward_model")
]
MOST_BYTES = 150_000
RENEWED = bool(os.environ.get("RENEW_NOTEBOOKS"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of the notebooks."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress")  # tqdm warns because ipywidgets is not installed
    return tmp_path


def execute(path, folder, *, steps, check):
    """Execute a notebook with fewer steps and a cell `check` at its end; or renew it."""
    notebook = nbformat.read(path, as_version=4)
    if not RENEWED:
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        first.source, found = re.subn(r"^STEPS = \d+", f"STEPS = {steps}", first.source, flags=re.MULTILINE)
        assert found == 1
        notebook.cells.append(new_code_cell(check))
    NotebookClient(
        notebook,
        timeout=550,
        record_timing=False,
        coalesce_streams=True,  # otherwise the number of outputs depends on when lines arrive
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(json.loads(portable(json.dumps(cell.outputs), folder)))
    if RENEWED:
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
    text = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "\\u001b" not in text, "an output has an escape code"
    assert all(len(cell.get("outputs", [])) <= 4 for cell in notebook.cells), (
        "a cell has more outputs than a live line and warnings"
    )


def portable(text, folder):
    """Return outputs without absolute paths, and with SVGs that are smaller, on one line, and have no date."""

    def smaller(svg):
        rounded = re.sub(r"(\d\d\.\d)\d{3,}", r"\1", svg[0])
        return re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|(\\n| )+(?=\\n| )", "", rounded).replace("\\n", " ")

    return re.sub("<svg.*?</svg>", smaller, text.replace(f"{folder}/", ""))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_verifier_teaches_a_policy_with_grpo(folder):
    execute(GRPO, folder, steps=16, check="assert policy.config.vocab_size == len(tokenizer)")
    metrics = rt.Run(folder / "runs" / "train-1").metrics
    assert metrics["reward"][-5:].mean() > metrics["reward"][:5].mean() + 0.05
    assert (np.diff(metrics["step"]) == 1).all(), "the run did not resume at the next step"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_critic_that_ppo_has_trained_has_a_value_for_each_token(folder):
    execute(PPO, folder, steps=6, check="assert [len(row) for row in rows] == [len(each) for each in values]")
    metrics = rt.Run(folder / "runs" / "train-1").metrics
    assert np.isfinite(metrics["train_rollouts/explained_variance"]).all()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_small_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert any(cell.get("outputs") for cell in cells)
    assert path.stat().st_size < MOST_BYTES
