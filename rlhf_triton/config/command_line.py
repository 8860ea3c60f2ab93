"""Shared parts of the command-line entry points: arguments, logging, signals and error reporting."""

import argparse
import errno
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec

from rlhf_triton.config.sections import RunSection
from rlhf_triton.errors import REPORTED, RlhfError, reason_of
from rlhf_triton.monitoring.log_lines import log_json, say

Arguments = ParamSpec("Arguments")


def run_parser(description: str, *, prog: str | None = None, default: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser for `--config` and overrides; `--config` is required if there is no `default`."""
    return add_run_arguments(argparse.ArgumentParser(prog=prog, description=description), default)


def add_run_arguments(parser: argparse.ArgumentParser, default: Path | None = None) -> argparse.ArgumentParser:
    """Add `--config` and the overrides to `parser` and return it."""
    about_default = f"; default: {default.parent.name}/{default.name}" if default else ""
    parser.add_argument(
        "--config", type=Path, default=default, required=default is None, help=f"YAML file of the run{about_default}"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override of a key in the YAML file")
    return parser


def add_accept_changes(parser: argparse.ArgumentParser) -> None:
    """Add `--accept-changes` to `parser`."""
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although reward, environment, algorithm or policy have changed since the last start",
    )


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run` to `parser`."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the models hold on each device, start nothing; exit 1 if the free memory is less",
    )


def log_to_stderr(process: str, run: RunSection, *, gpus: str = "") -> None:
    """Log INFO and above to stderr, one line each, as text or JSON; `rlhf-triton run` parses both.

    Ranks other than 0 log only warnings and errors, with their rank.

    Args:
        gpus: `RunConfig.gpu_precisions`, which is logged first.
    """
    rank = int(os.environ.get("RANK", "0"))
    level, name = (logging.WARNING, f"rank {rank}: ") if rank else (logging.INFO, "")
    if run.log_format == "json":
        log_json(process, run.identity, rank=rank, level=level)
    else:
        logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {name}%(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request at INFO
    if gpus:
        logging.getLogger(process).info("on GPUs: %s", gpus)


def limit_access(run: RunSection) -> None:
    """Set the umask of this process and its children."""
    os.umask(0o077 if run.access == "owner" else 0o007)


def interrupt_on_signals(numbers: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
    """Make these signals raise KeyboardInterrupt, even if a background job inherited SIGINT as ignored."""
    for number in numbers:
        signal.signal(number, signal.default_int_handler)


def report(error: BaseException, code: int = 2) -> int:
    """Print the error to stderr; return `code`, the exit code. 2 means that the command could not do its work."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "; make room, and start again" if is_full else ""
    say(f"error: {error if isinstance(error, RlhfError) else reason_of(error)}{hint}", sys.stderr)
    return code


def reporting(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Decorator: make a command's `main` print a `REPORTED` error and return 2 instead of raising it."""

    @functools.wraps(main)
    def run(*args: Arguments.args, **keywords: Arguments.kwargs) -> int:
        try:
            return main(*args, **keywords)
        except REPORTED as error:
            return report(error)

    return run
