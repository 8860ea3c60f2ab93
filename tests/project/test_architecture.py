"""Rules of the code base that linters do not check: names, sizes, and forbidden imports."""

import ast
import builtins
import collections
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("python_backend", "trainer", "actor", "tools")  # parts of the package that lie beside it
PACKAGES = ("rlhf_triton", *LINKED, "benchmarks", "examples")
MOST_LINES = {"actor/loop.py": 220, "trainer/sidecar.py": 200, "README.md": 130}
# Besides those of .importlinter, modules that import torch only in a function, because it costs seconds.
TORCH_WHEN_NEEDED = [
    "rlhf_triton.actor.__main__",
    "rlhf_triton.trainer.__main__",
    "benchmarks.reload",
    "benchmarks.scoring",
    "benchmarks.staleness",
    "examples.demo.prepare",
]
HEAVY = {"pydantic", "safetensors", "torch", "transformers", "tritonclient", "yaml"}
NUMPY_ALONE = ["rlhf_triton.models.batching", "rlhf_triton.wire.contract"]


def tracked(*patterns):
    """Return the files that git tracks, or would track if they were added now."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]


def modules():
    """The source of each module of the packages."""
    return {path: path.read_text() for path in tracked(*(f"{package}/*.py" for package in PACKAGES))}


def test_tests_import_neither_benchmarks_nor_examples_nor_other_tests():
    """Tests run the first two as a user does, so either may change or go without them; they share tests/support."""
    for path in tracked("tests/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] not in {"benchmarks", "examples"}, f"{path} imports {name}"
                assert not name.rpartition(".")[2].startswith("test_"), f"{path} imports {name}, a test"


def imported_after(modules, tmp_path):
    """Return what a fresh interpreter has loaded after each of `modules`, imported in this order."""
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


def modules_without_torch():
    """Return the modules of .importlinter's contract `no-torch`, and those of its packages."""
    linter = configparser.ConfigParser()
    linter.read(ROOT / ".importlinter")
    for name in linter["importlinter:contract:no-torch"]["source_modules"].split():
        folder = ROOT / name.replace(".", "/")
        paths = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
        yield from (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)


def test_modules_that_do_not_compute_never_import_torch(tmp_path):
    names = [*modules_without_torch(), *TORCH_WHEN_NEEDED]
    loaded = imported_after(names, tmp_path)
    assert set(loaded) == set(names)
    guilty = [name for name, packages in loaded.items() if packages & {"torch", "transformers"}]
    assert not guilty[:1], f"{guilty[:1]} imports torch or transformers"
    contract = imported_after(NUMPY_ALONE, tmp_path)[NUMPY_ALONE[-1]]
    assert contract & {*HEAVY, "numpy"} == {"numpy"}
    client = imported_after(["rlhf_triton.client.reward"], tmp_path)["rlhf_triton.client.reward"]
    assert not client & {"aiohttp", "tritonclient"}, "a client that is not made yet imports what only requests need"


def test_clients_and_the_gateway_are_installed_without_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def packages(requirements):
        names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
        inner = re.findall(r"rlhf-on-triton\[(.+?)\]", " ".join(requirements))
        return names.union(*(packages(extras[extra]) for found in inner for extra in found.split(",")))

    for extra in ([], extras["gateway"]):
        found = packages([*project["dependencies"], *extra])
        assert not found & {"torch", "transformers", "tokenizers"}, extra
    assert not any("<2" in requirement for requirement in project["dependencies"])  # NumPy 2, too
    for name in ("serve", "train"):
        assert {"torch", "transformers", "nvidia-pytriton"} <= packages(extras[name])


def test_no_module_is_named_utils_and_entry_modules_stay_short():
    assert not {path.stem for path in modules()} & {"utils", "common", "helpers", "base"}
    assert not (ROOT / "tests" / "__init__.py").exists()
    for path, most in MOST_LINES.items():
        assert len((ROOT / path).read_text().splitlines()) <= most, path


def test_modules_have_docstrings_no_pickle_and_unique_class_names():
    classes = collections.defaultdict(list)
    for path, text in modules().items():
        tree = ast.parse(text)
        assert path.stem == "__init__" or ast.get_docstring(tree), path
        assert not re.search(r"\bpickle\b|torch\.(load|save)\(", text) or path.name == "unpickle.py", path
        for node in tree.body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):  # aliases of types
                names = re.findall(r"^[A-Z]\w*[a-z]\w*(?=:| =)", ast.unparse(node))
            for name in names:
                classes[name].append(str(path.relative_to(ROOT)))
    del classes["TritonPythonModel"]  # Triton's python backend prescribes the name
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}


def test_no_keys_or_absolute_paths_are_committed():
    """Absolute paths of a home or a checkout; /dev, /usr, /opt and /tmp are the same everywhere."""
    assert not tracked("*.env", "*.key", "*.pem")
    pattern = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt|workspace)/[\w.-]")
    for path in tracked():
        if path.suffix in {".png", ".jpg", ".safetensors", ".pyc"} or path == Path(__file__):
            continue
        found = pattern.search(path.read_text(errors="replace"))
        assert not found or path.name.startswith("Dockerfile"), f"{path}: {found}"


def test_errors_docstring_lists_every_exception_class():
    nodes = [
        node for text in modules().values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases] for node in nodes}

    def is_exception(name):
        if name in bases:
            return any(is_exception(base) for base in bases[name])
        return issubclass(getattr(builtins, name, object), BaseException)

    found = {name for name in bases if is_exception(name)}
    tree = (ROOT / "rlhf_triton" / "errors.py").read_text().split('"""')[1]
    assert found - {*re.findall(r"\w+", tree)} == set()
    assert {name for name in re.findall(r"^ {2,}(\w+)", tree, re.M)} <= found
