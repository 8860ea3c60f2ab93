"""Parses a command's arguments; when a shell asks for completions (argcomplete), answers it instead."""

import argparse
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SHELL_ASKS = "_ARGCOMPLETE"  # set by the shell's completion function: 1 + the number of words before the program's name
OVERRIDES = "overrides"


def parse_or_complete(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed `argv`, by default that of the process; or answer the shell and end the process.

    Overrides may stand on both sides of options.
    """
    if SHELL_ASKS in os.environ:
        import argcomplete  # only here, since no command needs it

        argcomplete.autocomplete(parser, default_completer=_values)  # type: ignore[arg-type]  # any callable will do
    words = sys.argv[1:] if argv is None else argv
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    if files and not any(word.split("=")[0] == "--config" for word in words) and "--config" in parser.format_help():
        parser.error(f"give the configuration as --config {files[0]}")
    arguments, rest = parser.parse_known_args(argv)  # `parse_intermixed_args` does not support commands of commands
    if rest and (OVERRIDES not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(
            f"unrecognized arguments: {' '.join(rest)}{_as_override(rest[0]) if OVERRIDES in arguments else ''}"
        )
    if rest:
        arguments.overrides += rest
    return arguments


def _as_override(option: str) -> str:
    """Return how to write a setting that was given as an option, as a part of a message."""
    from rlhf_triton.config.other_names import key_of

    key = key_of("", option.lstrip("-").partition("=")[0].replace("-", "_"))
    return f"; settings are written as section.key=value, such as {key or 'server.http_port'}=…"


def command_to_complete(commands: Mapping[str, tuple[str, str]]) -> str:
    """Return the command whose arguments the shell asks for, and make it the program to complete.

    If the shell asks for the name of a command, answer it and end the process.

    Args:
        commands: a command's name -> (module, one line about it).
    """
    import argcomplete

    position = int(os.environ[SHELL_ASKS])
    _, _, _, words, _ = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    if len(words) > position and words[position] in commands:
        os.environ[SHELL_ASKS] = str(position + 1)
        return words[position]
    parser = argparse.ArgumentParser()
    names = parser.add_subparsers()
    for name, (_, what) in commands.items():
        names.add_parser(name, help=what)
    argcomplete.autocomplete(parser)
    raise AssertionError("argcomplete ends the process")


def seconds(text: str) -> float:
    """Parse an interval in seconds. Raises ArgumentTypeError unless it is positive."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _values(prefix: str, action: argparse.Action, **_: Any) -> Iterable[str]:
    """Return what an argument without choices may begin with: keys for overrides, files for paths, else nothing."""
    from argcomplete.completers import FilesCompleter

    if action.dest == OVERRIDES:
        return _keys(prefix)
    if action.type is not Path:
        return []
    return FilesCompleter(("yaml", "yml") if action.dest == "config" else ())(prefix)


def program() -> str:
    """Return how the commands were called: `rlhf-triton` or `rlhf-triton`."""
    return sys.argv[0].rpartition(" ")[0] or "rlhf-triton"


def _keys(prefix: str) -> Iterable[str]:
    """Return the configuration keys that begin with `prefix`; none for "", so that the options stay readable."""
    if not prefix or "=" in prefix:
        return []
    from rlhf_triton.config import RunConfig

    schema = RunConfig.model_json_schema()
    return [f"{key}=" for key in _leaves(schema, schema["$defs"], "") if key.startswith(prefix)]


def _leaves(section: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Iterable[str]:
    for name, field in section.get("properties", {}).items():
        kinds = [field, *field.get("anyOf", [])]
        sections = [definitions[kind["$ref"].rpartition("/")[2]] for kind in kinds if "$ref" in kind]
        inner = [key for found in sections for key in _leaves(found, definitions, f"{path}{name}.")]
        yield from inner or [f"{path}{name}"]
