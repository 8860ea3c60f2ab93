"""Rules of the code base: imports, names, sizes, generated files, and what may never be imported."""

from __future__ import annotations

import ast
import collections
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from python_backend.config import load_config
from tools import render_configs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("python_backend", "trainer", "actor", "critic_client", "tools", "benchmarks", "chaos", "examples")
MOST_MODULES = 18  # in a folder
MAIN_LOOP_LINES = 200
HARD_LIMIT_LINES = 420
# Modules that only carry, check or start things: torch alone costs seconds, in every process that imports it.
WITHOUT_TORCH = [
    "python_backend.models.batching",
    "python_backend.checkpoints.inspection",
    "python_backend.config",
    "python_backend.wire.contract",
    "python_backend.store.durable",
    "python_backend.checkpoints.positions",
    "python_backend.checkpoints.safetensors_header",
    "python_backend.store.journal",
    "python_backend.store.journal_entry",
    "python_backend.store.journal_file",
    "python_backend.store.sealed_folder",
    "python_backend.config.sections",
    "python_backend.serving.triton",
    "python_backend.serving.critic_save",
    "python_backend.serving.critic_train",
    "python_backend.rewards.pool",
    "python_backend.serving.function_reward",
    "python_backend.rewards.function",
    "python_backend.rewards.worker",
    "python_backend.serving.reward_mixture",
    "python_backend.rewards.weighted_sum",
    "python_backend.rewards.judge",
    "python_backend.config.reward_terms",
    "python_backend.checkpoints.tokenization",
    "python_backend.serving.allocator",
    "python_backend.serving.scheduling",
    "python_backend.serving.scoring",
    "python_backend.serving.requests",
    "python_backend.store.weights",
    "trainer.__main__",
    "trainer.control_plane",
    "actor.__main__",
    "python_backend.client.client",
    "critic_client",
    "tools.__main__",
    "benchmarks.scoring.processes",
    "benchmarks.reload.parts",
    "benchmarks.scoring.sweep",
    "tools.gateway.app",
    "tools.gateway.command",
    "tools.import_checkpoint",
    "tools.render_configs",
    "tools.run",
    "tools.serve",
]
NUMPY_ALONE = ["python_backend.models.batching", "python_backend.wire.contract"]


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows, or would if they were added now."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_not_shadowed_by_an_installed_package(package: str):
    file = importlib.import_module(package).__file__
    assert file is not None
    assert Path(file).resolve().parent == ROOT / package


def test_import_rules():
    # In a process of its own: import-linter silences the loggers that exist when it is called.
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def imported_after(modules: list[str], tmp_path: Path) -> dict[str, set[str]]:
    """What a fresh interpreter has loaded after each of `modules`, imported in this order."""
    (tmp_path / "triton_python_backend_utils.py").write_text("")  # exists only inside a stub
    script = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    print(name, *{module.partition('.')[0] for module in sys.modules})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", script, *modules]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: set(loaded) for name, *loaded in lines}


def test_what_does_not_compute_never_imports_torch(tmp_path: Path):
    loaded = imported_after(WITHOUT_TORCH, tmp_path)
    assert set(loaded) == set(WITHOUT_TORCH)
    guilty = [name for name, packages in loaded.items() if packages & {"torch", "transformers"}]
    assert not guilty[:1], f"{guilty[:1]} imports torch or transformers"


def test_the_contract_needs_numpy_alone(tmp_path: Path):
    loaded = imported_after(NUMPY_ALONE, tmp_path)[NUMPY_ALONE[-1]]
    assert not loaded & {"pydantic", "safetensors", "torch", "transformers", "tritonclient", "yaml"}
    assert "numpy" in loaded


def test_model_files_import_a_class_that_exists_and_nothing_else():
    files = sorted((ROOT / "model_repository").glob("*/1/model.py"))
    assert [path.parts[-3] for path in files] == ["critic", "critic_save", "critic_train", "reward_model"]
    for path in files:
        _, module = re.findall(r"from (\S+) import", path.read_text())
        assert path.read_text() == render_configs.MODEL_PY.format(module=module)
        source = ROOT / Path(*module.split(".")).with_suffix(".py")
        assert "\nTritonPythonModel = triton_model(" in source.read_text(), source


def test_the_committed_repository_is_up_to_date():
    config = load_config(render_configs.DEFAULT_CONFIG)
    drifts = render_configs.check_repository(config, render_configs.DEFAULT_REPOSITORY, resolve_paths=False)
    assert not drifts, "\n".join(drift.diff for drift in drifts)
    expected = {model for model in render_configs.render_configs(config, resolve_paths=False)}
    assert {path.name for path in (ROOT / "model_repository").iterdir()} == expected


def test_no_file_is_over_the_limit():
    sizes = {path: len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert len(sizes) > 50
    too_long = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > HARD_LIMIT_LINES}
    assert not too_long


@pytest.mark.parametrize("path", ["actor/loop.py", "trainer/sidecar.py"])
def test_the_main_loops_are_short_enough_to_read_at_once(path: str):
    assert len((ROOT / path).read_text().splitlines()) <= MAIN_LOOP_LINES


def test_folders_are_small_and_have_no_catch_all():
    folders = collections.Counter(path.parent for path in tracked(*(f"{package}/*.py" for package in PACKAGES)))
    assert {str(folder): size for folder, size in folders.items() if size > MOST_MODULES} == {}
    for path in tracked(*(f"{package}/*.py" for package in PACKAGES)):
        assert path.stem not in {"utils", "common", "helpers", "base"}, path
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_public_classes_have_names_of_their_own():
    found = collections.defaultdict(list)
    for path in tracked(*(f"{package}/*.py" for package in PACKAGES)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_every_module_says_what_it_is():
    for path in tracked(*(f"{package}/*.py" for package in PACKAGES)):
        tree = ast.parse(path.read_text())
        assert path.stem == "__init__" or ast.get_docstring(tree), path


def test_nothing_is_pickled():
    for path in tracked(*(f"{package}/*.py" for package in PACKAGES)):
        assert not re.search(r"\bpickle\b|torch\.(load|save)\(", path.read_text()), path


def test_no_key_is_committed():
    assert not tracked("*.env", "*.key", "*.pem")


def test_no_file_knows_a_machine():
    """Absolute paths of somebody's home or checkout; /dev, /usr, /opt and /tmp are the same everywhere."""
    pattern = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|workspace)/[\w.-]")
    for path in tracked():
        if path.suffix in {".png", ".jpg", ".safetensors", ".pyc"} or path == Path(__file__):
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert not found or path.name.startswith("Dockerfile"), f"{path}: {found}"
