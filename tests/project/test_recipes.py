"""docs/recipes/: the files and commands of every page run as they stand, with five steps and tiny models."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.tools.example_model import main
from rlhf_triton.tools.server.ports import PORT_KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "recipes").glob("*.md"))}
FILE = re.compile(r"^```(?:py|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {name: text for page in PAGES.values() for name, text in FILE.findall(page)}
NUM_STEPS = 5


def commands(page):
    """Return a page's commands that use its files, as words; the others install and make models."""
    lines = [shlex.split(line, comments=True) for block in COMMANDS.findall(PAGES[page]) for line in block.splitlines()]
    return [words for words in lines if FILES.keys() & {*words}]


def execute(words, folder):
    program, *arguments = words
    if program == "rlhf-triton":
        arguments = ["-m", "rlhf_triton.tools", *arguments, *(f"server.{key}=0" for key in PORT_KEYS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of all pages, for few steps and with tiny models."""
    path = tmp_path_factory.mktemp("recipes")
    assert main([str(path / "models")]) == 0
    for name in ("prompts", "validation"):
        write_jsonl(path / "models" / f"{name}.jsonl", [{"text": f"Sentence {i} begins"} for i in range(8)])
    for name, text in FILES.items():
        short = re.sub(r"\bsteps(=|: )\d+", rf"steps\g<1>{NUM_STEPS}", text)
        (path / name).write_text(short.replace("runs/prepared/seed-0", "models"))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_recipe_trains_as_it_stands(page, folder):
    known = {*folder.glob("runs/*")}
    for words in commands(page):
        execute(words, folder)
    (run,) = {*folder.glob("runs/*")} - known
    rewards = [row["train_rollouts/rewards"] for row in read_jsonl(run / "metrics.jsonl")]
    assert len(rewards) == NUM_STEPS
    assert np.isfinite(rewards).all()
