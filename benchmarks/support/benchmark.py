"""Protocol of a benchmark, and the types that all benchmarks share: options, targets, and records of measurements."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from python_backend.errors import RlhfError
from python_backend.store.durable import write_json

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

    def __init__(self, out: Path, result: Result) -> None:
        self.out = out
        self.result = result
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

    A module with pictures also has `draw(result, out)`, which writes them to the folder `out`. If it has
    `sections(result)`, that returns the texts and tables of report.md instead of summary and targets, and
    `has_failed(result)` whether the command returns 1.
    """

    OPTIONS: dict[str, Option]

    def measure(self, settings: argparse.Namespace, record: Record) -> None:
        """Measure, and store samples in `record`; `settings` has a value for each option."""

    def summarise(self, result: Result) -> Any:
        """Return medians and ratios of the samples; a list of flat dicts is printed as a table."""

    def targets(self, result: Result) -> list[Target]:
        """Return the targets; `result["summary"]` is what `summarise` returned."""
