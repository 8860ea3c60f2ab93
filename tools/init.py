"""`rlhf-triton init`: writes the YAML of your models, or an environment that trains, for you to change."""

import argparse
import importlib.util
import json
import keyword
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.command_line import reporting
from rlhf_triton.errors import RlhfError
from rlhf_triton.tools.arguments import parse

NUM_PROMPTS = 16


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the YAML or the environment; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Write a YAML for your models, or an environment of agents.")
    kinds = parser.add_subparsers(dest="what", required=True)
    models = kinds.add_parser("models", help="inspect models, try them, convert pickled weights, and write their YAML")
    models.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="key of the sections, such as reward.pooling=last"
    )
    models.add_argument("--reward", type=Path, metavar="PATH", help="folder of the reward model")
    models.add_argument("--critic", type=Path, metavar="PATH", help="folder of the critic or its body")
    models.add_argument("--policy", type=Path, metavar="PATH", help="folder of the policy")
    models.add_argument(
        "--convert", type=Path, metavar="FOLDER", help="the weights are pickled: write them here as safetensors first"
    )
    models.add_argument("--out", type=Path, metavar="FILE", help="write the YAML here; default: print it")
    models.add_argument("--no-load", action="store_true", help="only inspect the files; do not load the models")
    environment = kinds.add_parser("environment", help="write an environment, its test, prompts and YAML")
    environment.add_argument("name", help="name of the files, such as my_game")
    environment.add_argument(
        "--policy", default="path/to/policy", metavar="FOLDER", help="for actor.policy.model: a chat model"
    )
    arguments = parse(parser, argv)
    if arguments.what == "models":
        from rlhf_triton.tools.init_models import init_models  # pydantic: slow to import

        init_models(models, arguments)
    else:
        _write_environment(arguments.name, arguments.policy)
    return 0


def _write_environment(name: str, policy: str) -> None:
    config = f"{name}.yaml"
    if not name.isidentifier() or keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)):
        raise RlhfError(f"the name is {name!r}; use letters, digits and _, but no keyword of Python")
    files = _files(name, policy)
    if existing := [file for file in files if Path(file).exists()]:
        raise RlhfError(f"{Path(existing[0]).absolute()} exists; choose another name than {name}, or move it away")
    if importlib.util.find_spec(name) is not None:
        raise RlhfError(f"{name} is an installed module, which {name}.py would hide; choose another name")
    for file, text in files.items():
        Path(file).write_text(text, encoding="utf-8")
    print(f"written: {', '.join(files)}; next:")
    print(f"  python -m pytest test_{name}.py")
    print(f"  rlhf-triton run --config {config} --dry-run    # set actor.policy.model first, a chat model's folder")
    print(f"  rlhf-triton run --config {config}              # its report shows conversations before and after")


def _files(name: str, policy: str) -> dict[str, str]:
    """Return {file: text}."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loaded = Environment(
        loader=PackageLoader("rlhf_triton.tools"), undefined=StrictUndefined, keep_trailing_newline=True
    )
    values = {"name": name, "cls": _class_name(name), "policy": policy}
    begin = {"messages": [{"role": "user", "content": "Let us play a game. "}]}
    return {
        f"{name}.py": loaded.get_template("environment.py.j2").render(values),
        f"test_{name}.py": loaded.get_template("test_environment.py.j2").render(values),
        f"{name}.jsonl": "".join(json.dumps({**begin, "secret": 1 + i % 9}) + "\n" for i in range(NUM_PROMPTS)),
        f"{name}.yaml": loaded.get_template("environment.yaml.j2").render(values),
    }


def _class_name(name: str) -> str:
    return name.title().replace("_", "")
