"""`python -m tools init environment NAME`: writes an environment that trains, for you to change."""

import argparse
import json
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from python_backend.config.command_line import reporting
from python_backend.errors import RlhfError
from tools.arguments import parse_or_complete

NUM_PROMPTS = 16


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the files into the current folder; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Write an environment of agents, its test, prompts and YAML.")
    parser.add_argument("what", choices=("environment",), help="what to write")
    parser.add_argument("name", help="name of the files, such as my_game")
    parser.add_argument(
        "--policy", default="path/to/policy", metavar="FOLDER", help="for actor.policy.model: a chat model"
    )
    arguments = parse_or_complete(parser, argv)
    name, config = arguments.name, f"{arguments.name}.yaml"
    if not name.isidentifier() or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise RlhfError(f"the name is {name!r}; use letters, digits and _ that are no keyword or module of Python")
    files = _files(name, arguments.policy)
    if existing := [file for file in files if Path(file).exists()]:
        raise RlhfError(f"{Path(existing[0]).absolute()} exists; choose another name than {name}, or move it away")
    for file, text in files.items():
        Path(file).write_text(text, encoding="utf-8")
    print(f"written: {', '.join(files)}; next:")
    print(f"  python -m pytest test_{name}.py")
    print(f"  python -m tools run --config {config} --dry-run    # set actor.policy.model first, a chat model's folder")
    print(f"  python -m tools run --config {config}              # its report shows conversations before and after")
    return 0


def _files(name: str, policy: str) -> dict[str, str]:
    """Return {file: text}."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loaded = Environment(loader=PackageLoader("tools"), undefined=StrictUndefined, keep_trailing_newline=True)
    known = {"name": name, "cls": name.title().replace("_", ""), "policy": policy}
    begin = {"messages": [{"role": "user", "content": "Let us play a game. "}]}
    return {
        f"{name}.py": loaded.get_template("environment.py.j2").render(known),
        f"test_{name}.py": loaded.get_template("test_environment.py.j2").render(known),
        f"{name}.jsonl": "".join(json.dumps({**begin, "secret": 1 + i % 9}) + "\n" for i in range(NUM_PROMPTS)),
        f"{name}.yaml": loaded.get_template("environment.yaml.j2").render(known),
    }
