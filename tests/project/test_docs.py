"""README, CONTRIBUTING and docs/: their commands, YAML, Python, keys, paths and links fit the code."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.command import BENCHMARKS
from python_backend.config import RunConfig, load_config
from python_backend.rewards.function import Sample, load_function
from tools.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHONS = ("python", "python3", ".venv/bin/python")
# Not ours, and not installed everywhere.
OTHER_PROGRAMS = ("docker", "apt", "pip", "tritonserver", "kubectl", "sbatch", "echo", "prometheus")
MODULES = {
    "pytest": None,
    "torch.distributed.run": None,
    "actor": "actor/__main__.py",
    "trainer": "trainer/__main__.py",
    "tools.server.drain": "tools/server/drain.py",
}
OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)+=.*")
KEY = re.compile(rf"(?:{'|'.join(RunConfig.model_fields)})(?:\.(?:\w+|<name>))+")
FILE_ENDINGS = (".py", ".yaml", ".jsonl", ".log", ".lock", ".md", ".html")
FOLDERS = (
    "actor",
    "benchmarks",
    "chaos",
    "configs",
    "critic_client",
    "deploy",
    "docs",
    "examples",
    "model_repository",
    "python_backend",
    "tests",
    "tools",
    "trainer",
)


def blocks(language: str) -> list[Any]:
    """The fenced blocks in `language`, each with the page that it is on."""
    found = [(page, text) for page in PAGES for name, text in FENCE.findall(page.read_text()) if name == language]
    return [pytest.param(text, id=f"{page.stem}-{i}") for i, (page, text) in enumerate(found)]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def commands() -> Iterator[str]:
    """Every command line: in bash blocks, in indented lines, and between backticks."""
    for page in PAGES:
        text = page.read_text()
        for language, block in FENCE.findall(text):
            if language == "bash":
                yield from block.splitlines()
        yield from INDENTED.findall(prose(page))
        spans = [" ".join(span.split()) for span in SPAN.findall(prose(page))]
        yield from (span for span in spans if re.match(r"(make|python -m|\.venv/bin/python) ", span))


COMMAND_LINES = sorted(
    {command for line in commands() if (command := line.partition(" #")[0].strip()) and not command.startswith("#")}
)


def test_commands_are_found() -> None:
    assert {"make demo", "make docs"} <= set(COMMAND_LINES)
    assert sum("-m tools" in command for command in COMMAND_LINES) > 10


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_a_command_exists_with_its_options(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
        return
    if program not in PYTHONS:
        assert program in OTHER_PROGRAMS
        return
    file = script_of(arguments)
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")} - {"--help"}
    if file is not None:
        assert options <= options_in(ROOT / file), f"{file} has no such option"
    overrides = [word for word in arguments if OVERRIDE.fullmatch(word)]
    (tmp_path / "my.yaml").write_text("{}")
    load_config(tmp_path / "my.yaml", overrides)


def script_of(arguments: list[str]) -> str | None:
    """The file that a Python command runs; None where it is not ours."""
    if arguments[0] != "-m":
        return arguments[0]
    module, *rest = arguments[1:]
    if module != "tools":
        return MODULES[module]
    name = rest[0] if rest else "--help"
    if name == "bench" and rest[1:] and not rest[1].startswith("-"):
        return f"{BENCHMARKS[rest[1]][0].replace('.', '/')}.py"
    return "tools/__main__.py" if name == "--help" else f"{COMMANDS[name][0].replace('.', '/')}.py"


@cache
def options_in(file: Path) -> set[str]:
    """The options of a benchmark, or those that a file's argument parser declares by literal names or shares."""
    if (module := ".".join(file.relative_to(ROOT).with_suffix("").parts)) in dict(BENCHMARKS.values()):
        keys = importlib.import_module(module).OPTIONS
        return {"--out", "--report-only", "--quick", *(f"--{key.replace('_', '-')}" for key in keys)}
    source = file.read_text()
    shared = (ROOT / "python_backend/config/command_line.py").read_text() if "command_line" in source else ""
    calls = [node for text in (source, shared) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    added = [call.args for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {arg.value for args in added for arg in args if isinstance(arg, ast.Constant)}


CHEAP = [  # what answers in less than a second
    ["-m", "tools", "--help"],
    ["-m", "tools", "run", "--help"],
    ["-m", "tools", "serve", "--help"],
    ["-m", "tools", "import", "--help"],
    ["-m", "tools", "weights", "rollback", "--help"],
    ["-m", "tools", "bench", "--help"],
    ["-m", "tools", "bench", "reload", "--help"],
    ["-m", "actor", "--help"],
    ["-m", "trainer", "--help"],
    ["tools/render_configs.py", "--check"],
    ["tools/config_reference.py", "--check"],
]


@pytest.mark.slow
def test_cheap_commands_run() -> None:
    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        for arguments, done in zip(CHEAP, pool.map(run, CHEAP), strict=True):
            assert done.returncode == 0, (arguments, done.stdout + done.stderr)
            if "reload" in arguments:
                assert {"--cycles", "--quiet-s"} <= set(done.stdout.replace(",", " ").split())


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_a_valid_configuration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert yaml.safe_load(text)
    load_config(path)


def test_a_section_of_a_report_is_made() -> None:
    (text,) = [block.values[0] for block in blocks("python") if "ReportSection" in block.values[0]]
    names: dict[str, Any] = {}
    exec(compile(text, "a page", "exec"), names)
    texts = [{"step": step, "response": "word " * step} for step in (1, 2)]
    assert [section.table[1] for section in names["sections"](SimpleNamespace(texts=texts))] == [[2, 2, "word word "]]


# The loss of docs/algorithms.md is tested in tests/actor/test_own_functions.py.
@pytest.mark.parametrize(
    "text", [block for block in blocks("python") if not {"LossInputs", "ReportSection"} & {*block.values[0].split()}]
)
def test_a_reward_function_scores(text: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(text, "a page", "exec"), names)
    arguments = {name: getattr(value, "__annotations__", {}).keys() for name, value in names.items()}
    name = next(name for name, found in arguments.items() if found & {"group", "sample", "completions"})
    (tmp_path / "page.py").write_text(text)
    function = load_function(f"{tmp_path / 'page.py'}:{name}")
    samples = [
        Sample("", [], {"prompt": "What is 2 + 3?", "response": response, "answer": "5"})
        for response in ("It is 5.", "It is 6.", "It is 6.")
    ]
    scores = [function(sample) for sample in samples] if "sample" in arguments[name] else function(samples)
    assert scores[0] > scores[1]


def known_keys() -> set[str]:
    """Every section and key of the configuration, `rewards.<name>` for the terms of a sum."""
    keys, schema = set(), RunConfig.model_json_schema()

    def collect(prefix: str, field: dict[str, Any]) -> None:
        keys.add(prefix)
        for kind in [field, *field.get("anyOf", [])]:
            if "$ref" in kind:
                for name, inner in schema["$defs"][kind["$ref"].rpartition("/")[2]]["properties"].items():
                    collect(f"{prefix}.{name}", inner)
            elif isinstance(kind.get("additionalProperties"), dict):
                collect(f"{prefix}.<name>", kind["additionalProperties"])

    for name, field in schema["properties"].items():
        collect(name, field)
    return keys


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_exist(page: Path) -> None:
    text = prose(page)
    if page.stem == "coming-from":  # the first column has keys of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    used = {match[0] for span in SPAN.findall(text) if (match := KEY.match(span))}
    assert {key for key in used if not key.endswith(FILE_ENDINGS)} <= known_keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_exist(page: Path) -> None:
    for span in SPAN.findall(prose(page)):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+", span):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_a_front_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the documentation is built with Python 3.11 or newer")
    options = [
        "-W",
        "--keep-going",
        "--nitpicky",
        "--fresh-env",
        "--quiet",
        "-b",
        "dummy",
        "-d",
        str(tmp_path / "trees"),
    ]
    command = [sys.executable, "-m", "sphinx", *options, "docs", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
