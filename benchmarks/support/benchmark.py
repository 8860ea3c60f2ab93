"""Protocol of a benchmark, and the types that all benchmarks share: options, targets, and records of measurements."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import psutil

from python_backend.errors import RlhfError
from python_backend.store.durable import write_json

PACKAGES = ("torch", "transformers", "numpy", "tritonclient", "nvidia-pytriton", "aiohttp")
Result = dict[str, Any]
"""Content of result.json."""


class BenchError(RlhfError):
    """Raised if a benchmark cannot continue; the message says why."""


@dataclass(frozen=True)
class Option:
    """Command-line option. If its default is a list, its value is a comma-separated list."""

    default: Any
    help: str
    quick: Any = None
    """Default with `--quick`; None: the same default as without."""
    known: Collection[str] = ()
    """Accepted values; empty: any."""
    kind: Callable[[str], Any] | None = None
    """Function that converts a value; None: the type of the default."""

    def add_to(self, parser: argparse.ArgumentParser, name: str, *, quick: bool) -> None:
        """Add the option as `--name` to the parser."""
        flag, default = f"--{name.replace('_', '-')}", self.quick if quick and self.quick is not None else self.default
        parser.add_argument(flag, type=self._convert, default=default, help=self.help)

    def _convert(self, text: str) -> Any:
        if isinstance(self.default, list):
            return [self._convert_one(item, type(self.default[0])) for item in text.split(",") if item]
        return self._convert_one(text, type(self.default))

    def _convert_one(self, text: str, kind: type) -> Any:
        if self.known and text not in self.known:
            raise argparse.ArgumentTypeError(f"unknown {text!r}; known: {', '.join(self.known)}")
        return (self.kind or kind)(text)


@dataclass(frozen=True)
class Target:
    """A measured number and the limits within which it should lie."""

    name: str
    value: float | None
    """None: not measured."""
    low: float | None = None
    high: float | None = None
    """If `low` and `high` are both None, the number is only reported."""
    detail: str = ""

    @property
    def verdict(self) -> str:
        """`pass`, `miss`, `not measured`, or `no target`."""
        if self.value is None:
            return "not measured"
        if self.low is None and self.high is None:
            return "no target"
        above = self.low is None or self.value >= self.low
        return "pass" if above and (self.high is None or self.value <= self.high) else "miss"

    @property
    def limits(self) -> str:
        """What the number must be, in words; empty without a limit."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}" if self.high is not None else ""


class Record:
    """Result of a measurement in progress.

    result.json is rewritten after every sample, so an interruption loses at most one sample.
    """

    def __init__(self, out: Path, **facts: Any) -> None:
        """Begin a result with `facts`, date, machine and versions."""
        self.out = out
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        machine, versions = describe_machine(), describe_versions()
        self.result: Result = {"date": date, "machine": machine, "versions": versions, **facts, "samples": []}
        self._start = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)

    def add(self, sample: dict[str, Any]) -> None:
        """Append a sample and write result.json."""
        self.result["samples"].append(sample)
        self.save()

    def save(self) -> None:
        """Write result.json."""
        write_json(self.out / "result.json", self.result, durable=False)

    def say(self, line: str) -> None:
        """Print a line of progress, preceded by the seconds since the start."""
        print(f"{time.monotonic() - self._start:6.0f} s  {line}", file=sys.stderr, flush=True)


class Benchmark(Protocol):
    """Interface of a benchmark, implemented by the modules named in `command.BENCHMARKS`.

    A module with pictures also has `draw(result, out)`, which writes them to the folder `out`; if it has
    `has_failed(result)`, that decides whether the command returns 1.
    """

    OPTIONS: dict[str, Option]

    def measure(self, settings: argparse.Namespace, record: Record) -> None:
        """Measure, and store samples in `record`; `settings` has a value for each option."""

    def summarise(self, result: Result) -> Any:
        """Return medians and ratios of the samples; a list of flat dicts is printed as a table."""

    def targets(self, result: Result) -> list[Target]:
        """Return the targets; `result["summary"]` is what `summarise` returned."""


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, system, load and GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return {
        "processor": found[1] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": os.getloadavg()[0],
        "gpus": _describe_gpus(),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, and the commit of this checkout."""
    versions = {"python": platform.python_version()}
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions |= {name: installed[name] for name in PACKAGES if name in installed}
    root = Path(__file__).resolve().parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {**versions, "commit": done.stdout.strip() or "unknown"}


def _describe_gpus() -> list[str]:
    """Return name, memory, driver and power limit of each GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
