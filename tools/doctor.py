"""`rlhf-triton doctor`: checks the machine, a configuration and its server, one line each, with the remedy.

Only the standard library is imported here, because the packages may be broken.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.checks import machine
from rlhf_triton.tools.checks.findings import Finding, Level, found_by, warning


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 0, or 1 if one of them keeps a run from working."""
    parser = argparse.ArgumentParser(
        description="Check what a run needs, before it starts or while it runs; exit code 1 if something is missing.",
    )
    parser.add_argument("--config", type=Path, help="YAML file of the run; without it, only the machine is checked")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override of a key in the YAML file")
    arguments = parse(parser, argv)
    counts = dict.fromkeys(Level, 0)
    for finding in findings(arguments.config, arguments.overrides):
        counts[finding.level] += 1
        print(finding, flush=True)
    print(f"\n{counts[Level.OK]} ok, {counts[Level.WARNING]} warnings, {counts[Level.FAILED]} failed")
    return 1 if counts[Level.FAILED] else 0


def findings(path: Path | None, overrides: Sequence[str] = ()) -> Iterator[Finding]:
    """Check the machine and, if `path` is given, the configuration and its server; yield the findings."""
    installed = [*found_by("python", machine.python), *found_by("packages", machine.packages)]
    yield from installed
    yield from found_by("devices", machine.devices)
    yield from found_by("shared memory", machine.shared_memory)
    yield from found_by("open files", machine.open_files)
    if path is not None and any(each.level is Level.FAILED for each in installed if each.name in machine.PACKAGES):
        yield warning("configuration", "not checked: install the packages above first")
        path = None
    loaded: list[Any] = []
    if path is not None:
        yield from found_by("configuration", _loaded, path, overrides, loaded)
    if not loaded:
        yield from found_by("tritonserver", machine.tritonserver, None)
        yield from found_by("disk", machine.disk, Path("runs"), 0)
        return
    from rlhf_triton.tools.checks import preflight  # needs the packages that were checked above

    (config,) = loaded
    yield from found_by("tritonserver", machine.tritonserver, config.server.tritonserver)
    yield from found_by("disk", machine.disk, config.run.dir, preflight.disk_bytes(config))
    yield from preflight.findings(config, "doctor", found_by)


def _loaded(path: Path, overrides: Sequence[str], loaded: list[Any]) -> Iterator[Finding]:
    """Load the configuration into `loaded`."""
    from rlhf_triton.config.loading import load_config  # needs packages, too

    config = load_config(path, overrides)
    loaded.append(config)
    yield Finding("configuration", f"{path}: run {config.run.identity} in {config.run.dir}")
