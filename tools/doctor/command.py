"""`python -m tools doctor`: checks the machine, a configuration and its server, one line each, with the remedy."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.arguments import parse_or_complete
from tools.doctor import machine
from tools.doctor.finding import Check, Finding, Level, run_checks, warning


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 0, or 1 if one of them keeps a run from working."""
    parser = argparse.ArgumentParser(
        description="Check what a run needs, before it starts or while it runs; exit code 1 if something is missing.",
    )
    parser.add_argument("--config", type=Path, help="YAML file of the run; without it, only the machine is checked")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override of a key in the YAML file")
    arguments = parse_or_complete(parser, argv)
    counts = dict.fromkeys(Level, 0)
    for finding in findings(arguments.config, arguments.overrides):
        counts[finding.level] += 1
        print(finding, flush=True)
    print(f"\n{counts[Level.OK]} ok, {counts[Level.WARNING]} warnings, {counts[Level.FAILED]} failed")
    return 1 if counts[Level.FAILED] else 0


def findings(path: Path | None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Check the machine and, if `path` is given, the configuration and its server; yield what is found."""
    installed = [*run_checks([("python", machine.python), ("packages", machine.packages)])]
    yield from installed
    checks = {"devices": machine.devices, "shared memory": machine.shared_memory, "open files": machine.open_files}
    yield from run_checks(checks.items())
    further: dict[str, Check] = {
        "tritonserver": functools.partial(machine.tritonserver, None),
        "disk": functools.partial(machine.disk, Path("runs"), 0),
    }

    def configuration() -> Iterator[Finding]:
        """Load the configuration, and check further what it says."""
        # Imported here, because they need the packages that were checked above.
        checks = importlib.import_module("tools.doctor.configuration")
        config = importlib.import_module("python_backend.config").load_config(path, overrides)
        further["tritonserver"] = functools.partial(machine.tritonserver, config.server.tritonserver)
        further["disk"] = functools.partial(machine.disk, config.run.dir, checks.disk_bytes(config))
        further.update({name: functools.partial(check, config) for name, check in checks.CHECKS.items()})
        yield Finding("configuration", f"{path}: run {config.run.identity} in {config.run.dir}")

    if path is not None and any(each.level is Level.FAILED for each in installed if each.name in machine.PACKAGES):
        yield warning("configuration", "not checked: install the packages above first")
    elif path is not None:
        yield from run_checks([("configuration", configuration)])
    yield from run_checks(further.items())
