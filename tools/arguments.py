"""Parses a command's arguments."""

import argparse
import sys
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed `argv` (default: the process's). Overrides may stand before and after options."""
    words = sys.argv[1:] if argv is None else argv
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    is_complete = any(word.split("=")[0] in ("--config", "-h", "--help") for word in words)
    config = next((action for action in parser._actions if "--config" in action.option_strings), None)
    if config is not None and not is_complete:
        if files:
            parser.error(f"give the configuration as --config {files[0]}")
        if config.required:
            parser.error("give a YAML file as --config FILE; it names the models' folders, such as reward.model")
    arguments, rest = parser.parse_known_args(argv)  # `parse_intermixed_args` does not support commands of commands
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        hint = "; settings are written as section.key=value, such as server.http_port=…"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint if 'overrides' in arguments else ''}")
    if rest:
        arguments.overrides += rest
    return arguments


def program() -> str:
    """Return how the commands were called, without the command's name."""
    return sys.argv[0].rpartition(" ")[0] or "rlhf-triton"
