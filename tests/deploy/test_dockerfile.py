"""Dockerfile.triton: linted, each RUN step executed. Without a Docker engine, the rest is read off the file."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.test_install import STAGES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "Dockerfile.triton"
TARGETS = ("trainer", "single", "server")
Instruction = tuple[str, str]


def stages() -> dict[str, list[Instruction]]:
    """The instructions of each stage, after those of the stage that it starts from."""
    found: dict[str, list[Instruction]] = {}
    for line in FILE.read_text().replace("\\\n", " ").splitlines():
        word, _, argument = line.partition(" ")
        if word == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = list(found.get(base, []))
        elif word.isupper() and found:
            found[name].append((word, argument))
    return found


def last(target: str, name: str) -> str:
    """The last instruction of that name is the one that counts."""
    return [argument for word, argument in stages()[target] if word == name][-1]


def test_the_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_base_images_can_be_pinned_and_are_new_enough() -> None:
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", FILE.read_text(), re.MULTILINE))
    bases = re.findall(r"^FROM (\S+) AS", FILE.read_text(), re.MULTILINE)
    outside = [base for base in bases if base not in stages()]
    assert sorted(outside) == sorted(f"${{{name}}}" for name in defaults)  # each base is an argument
    year, month = re.fullmatch(r"nvcr\.io/nvidia/tritonserver:(\d+)\.(\d+)-py3", defaults["TRITON_IMAGE"]).groups()  # type: ignore[union-attr]
    assert (int(year), int(month)) >= (26, 5)


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_nobody_in_particular(target: str) -> None:
    user, _, group = last(target, "USER").partition(":")
    assert int(user) > 0 < int(group)
    assert "HEALTHCHECK" in [word for word, _ in stages()[target]]


@pytest.mark.parametrize("target", TARGETS)
def test_its_commands_exist(target: str) -> None:
    lines = [last(target, "CMD"), last(target, "HEALTHCHECK").partition("CMD ")[2]]
    modules = [re.match(r'\["python3", "-m", "([\w.]+)"', line)[1] for line in lines if line]  # type: ignore[index]
    assert len(modules) == (1 if target == "trainer" else 2)
    for module in [*modules, "tools.server.drain"]:  # the last is the preStop hook of a server alone
        script = f"import sys, {module}; print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        if module.startswith("tools.server"):  # the standard library and numpy: started every few seconds
            assert not {"psutil", "tritonclient", "pydantic", "jinja2", "torch"} & set(loaded.stdout.split())


def test_each_run_step_is_executed_by_a_test(tmp_path: Path) -> None:
    steps = {argument for stage in stages().values() for word, argument in stage if word == "RUN"}
    installs = {f"tools/install.sh {extras}" for extras in STAGES}  # tests/project/test_install.py runs these
    assert steps > installs
    (folder,) = steps - installs
    mine = folder.replace("-o 1000 -g 1000", f"-o {os.getuid()} -g {os.getgid()}")
    assert mine != folder
    subprocess.run(mine, shell=True, cwd=tmp_path, check=True)
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


def test_what_is_copied_exists_and_tests_are_not_in_the_image() -> None:
    copied = {
        word for stage in stages().values() for name, line in stage if name == "COPY" for word in line.split()[:-1]
    }
    assert all((ROOT / path).exists() for path in copied)
    assert not copied & {"tests", "benchmarks", "chaos", "deploy", "."}
