"""README, CONTRIBUTING and docs/: their commands, YAML, Python, keys, paths and links match the code."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import rlhf_triton as rt
from rlhf_triton.config.keys import keys_of
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.rewards import RewardTerm
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import without_effect
from rlhf_triton.rewards.function import load_function
from rlhf_triton.rewards.sample import Sample
from rlhf_triton.tools.__main__ import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
OURS = ("rlhf-triton", ".venv/bin/rlhf-triton")
PYTHONS = ("python", "python3", ".venv/bin/python")
# Not ours, and not installed everywhere.
OTHER_PROGRAMS = (
    ".venv/bin/tensorboard",
    "docker",
    "apt",
    "pip",
    "tritonserver",
    "kubectl",
    "sbatch",
    "echo",
    "prometheus",
)
MODULES = {
    "pytest": None,
    "torch.distributed.run": None,
    "rlhf_triton.actor": "actor/__main__.py",
    "rlhf_triton.trainer": "trainer/__main__.py",
    "rlhf_triton.tools.server.drain": "tools/server/drain.py",
    "examples.demo": "examples/demo/__main__.py",
}
OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)+=.*")
KEY = re.compile(rf"(?:{'|'.join(RunConfig.model_fields)})(?:\.(?:\w+|<name>))+")
KNOWN_KEYS = {*keys_of(RunConfig, ""), "rewards.<name>", *keys_of(RewardTerm, "rewards.<name>.")}
FILE_ENDINGS = (".py", ".yaml", ".jsonl", ".log", ".lock", ".md", ".html", ".safetensors")
RECIPE_FILES = {
    name
    for page in PAGES
    if page.parent.name == "recipes"
    for name in re.findall(r"^# (\w+\.py)$", page.read_text(), re.M)
}
FOLDERS = (
    "actor",
    "benchmarks",
    "configs",
    "deploy",
    "docs",
    "examples",
    "model_repository",
    "python_backend",
    "rlhf_triton",
    "tests",
    "tools",
    "trainer",
)


def blocks(language):
    """Return the fenced blocks in `language`, each with its page."""
    found = [(page, text) for page in PAGES for name, text in FENCE.findall(page.read_text()) if name == language]
    return [pytest.param(text, id=f"{page.stem}-{i}") for i, (page, text) in enumerate(found)]


def prose(page):
    return FENCE.sub("", page.read_text())


def commands():
    """Return every command line: in bash blocks, in indented lines, and between backticks."""
    for page in PAGES:
        text = page.read_text()
        for language, block in FENCE.findall(text):
            if language == "bash":
                yield from block.splitlines()
        yield from INDENTED.findall(prose(page))
        spans = [" ".join(span.split()) for span in SPAN.findall(prose(page))]
        yield from (span for span in spans if re.match(r"(make|python -m|\.venv/bin/python|rlhf-triton) ", span))


COMMAND_LINES = sorted(
    {command for line in commands() if (command := line.partition(" #")[0].strip()) and not command.startswith("#")}
)


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_documented_commands_and_options_exist(command, tmp_path):
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
        return
    if program in OURS:
        arguments = ["-m", "rlhf_triton.tools", *arguments]
    elif program not in PYTHONS:
        assert program in OTHER_PROGRAMS
        return
    file = script_of(arguments)
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")} - {"--help"}
    if file is not None:
        assert options <= options_in(ROOT / file), f"{file} has no such option"
    overrides = [word for word in arguments if OVERRIDE.fullmatch(word)]
    (tmp_path / "my.yaml").write_text("{}")
    load_config(tmp_path / "my.yaml", overrides)


def test_exit_codes_belong_to_existing_commands():
    page = (ROOT / "docs/operating.md").read_text()
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    words = {span.split()[0] for span in SPAN.findall(table) if not span.startswith("--")}
    assert words >= {"run", "serve"}
    assert {word for word in words if not (ROOT / word).is_file()} <= {*COMMANDS, "python"}


def script_of(arguments):
    """Return the file that a Python command runs; None if it is not ours."""
    if arguments[0] != "-m":
        return None if arguments[0] in RECIPE_FILES else arguments[0]
    module, *rest = arguments[1:]
    if module == "benchmarks":
        return f"benchmarks/{'__main__' if rest in ([], ['--help']) else rest[0]}.py"
    if module != "rlhf_triton.tools":
        return MODULES[module]
    name = rest[0] if rest else "--help"
    return "tools/__main__.py" if name == "--help" else f"{module_of(name).replace('.', '/')}.py"


@cache
def options_in(file):
    """Return the options that a file's argument parser declares by literal names, or shares with other files."""
    source = file.read_text()
    if "command_line" in source:
        source += (ROOT / "rlhf_triton/config/command_line.py").read_text()
    if file.parent.name == "benchmarks":
        source += (ROOT / "benchmarks/__main__.py").read_text()
    arguments = [arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) for arg in node.args]
    constants = [arg.value for arg in arguments if isinstance(arg, ast.Constant)]
    return {value for value in constants if isinstance(value, str) and value.startswith("--")}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_documented_yaml_is_a_valid_configuration(text, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert yaml.safe_load(text)
    assert without_effect(load_config(path)) == []


# The sections of a report are tested in tests/tools/test_report.py, environments in tests/tools/test_init.py, and
# recipes in test_recipes.py.
@pytest.mark.parametrize(
    "text",
    [
        block
        for block in blocks("python")
        if "ReportSection" not in block.values[0] and not block.id.startswith("environments-")
    ],
)
def test_documented_reward_functions_score(text, tmp_path):
    names = {}
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_keys_paths_and_links_exist(page):
    text = prose(page)
    for span in SPAN.findall(text):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+", span):
            assert (ROOT / span).exists(), span
    for link in LINK.findall(text):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    if page.stem == "coming-from":  # the first column has keys of other trainers
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    used = {match[0] for span in SPAN.findall(text) if (match := KEY.match(span))}
    if page.stem == "runs-from-python":  # where `run` and `server` are objects
        used -= {f"run.{name}" for name in dir(rt.Run)}
        used -= {f"server.{name}" for name in (*dir(rt.Services), *rt.Services.__annotations__)}
    assert {key for key in used if not key.endswith(FILE_ENDINGS)} <= KNOWN_KEYS


def test_readme_index_and_side_menu_have_the_same_map_of_all_pages():
    readme, index = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    row = re.compile(r"^\| (.*) \| (.*\]\(.*) \|$", re.MULTILINE)
    rows = row.findall(index)
    assert [(topic, pages.replace("](docs/", "](")) for topic, pages in row.findall(readme)] == rows
    menu = re.findall(r":caption: (.*)\n\n((?:.+\n)+)```", index)
    assert [(caption.lower(), [f"{page}.md" for page in pages.split()]) for caption, pages in menu] == [
        (topic.lower(), LINK.findall(pages)) for topic, pages in rows
    ]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert {page for _, links in rows for page in LINK.findall(links)} == pages - {"index.md"}


def test_version_is_past_the_last_release_while_the_changelog_has_unreleased_changes():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    release = re.search(r"^## \[(\d\S*)\]", changelog, re.MULTILINE)
    has_changes = "\n* " in changelog[: release.start()]
    assert Version(version) > Version(release[1]) if has_changes else version == release[1]
    assert f"Status: {version}, " in (ROOT / "README.md").read_text()


def test_docstrings_refer_to_existing_keys_and_names():
    """A reference is a key of the configuration, `module`, or `module.name`; the module may have its folders."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    words = {path.relative_to(ROOT): set(re.findall(r"\w+", path.read_text())) for path in files}
    stems = {path.stem for path in words}
    wrong = []
    for path in words:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            for span in re.findall(r"`([a-z]\w*(?:\.\w+)+)`", str(node.value.value)):
                *folders, module, name = span.split(".")
                if span in KNOWN_KEYS or span.endswith(FILE_ENDINGS) or module not in stems:
                    continue
                if span.startswith("model."):  # a tensor or an attribute of a torch model
                    continue
                end = "/".join(["", *folders, module])
                homes = [home for home in words if f"/{home.with_suffix('')}".endswith(end)]
                is_module = any(f"{end}/{name}/" in f"/{home.with_suffix('')}/" for home in words)
                if not is_module and not any(name in words[home] for home in homes):
                    wrong.append(f"{path}:{node.lineno}: {span}")
    assert wrong == []


def anchors(page):
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_configuration_keys_match_the_frozen_list():
    """A new key needs one to go: keys.txt changes by whole lines, and never grows."""
    keys = {*keys_of(RunConfig, ""), *keys_of(RewardTerm, "rewards.<name>.")}
    sections = {key.rpartition(".")[0] for key in keys}
    frozen = (ROOT / "tests" / "project" / "keys.txt").read_text().split()
    assert sorted(keys - sections - {"rewards"}) == frozen
    assert len(frozen) <= 205
