"""What every benchmark uses to measure and to judge: options, targets, records, rounds, ratios, time and memory."""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from rlhf_triton.store.durable import write_json

T = TypeVar("T")
Sample = dict[str, Any]
Result = dict[str, Any]
"""Content of result.json."""


@dataclass(frozen=True)
class Option:
    """Command-line option. If its default is a list, its value is a comma-separated list."""

    default: Any
    help: str
    quick: Any = None
    """Default with `--quick`; None: the same default as without."""
    known: Collection[str] = ()
    """Accepted values; empty: any."""

    def add_to(self, parser: argparse.ArgumentParser, name: str, *, quick: bool) -> None:
        """Add the option as `--name` to the parser."""
        default = self.quick if quick and self.quick is not None else self.default
        parser.add_argument(f"--{name.replace('_', '-')}", type=self._parsed, default=default, help=self.help)

    def _parsed(self, text: str) -> Any:
        is_list = isinstance(self.default, list)
        kind = type(self.default[0] if is_list else self.default)
        items = [item for item in text.split(",") if item] if is_list else [text]
        for item in items:
            if self.known and item not in self.known:
                raise argparse.ArgumentTypeError(f"unknown {item!r}; known: {', '.join(self.known)}")
        return [kind(item) for item in items] if is_list else kind(text)


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

    def add(self, sample: Sample) -> None:
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
    """Return processor, cores, memory, system, load, and each GPU's name, memory, driver and power limit."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,power.limit", "--format=csv,noheader"]
    has_gpu = shutil.which("nvidia-smi") is not None
    return {
        "processor": found[1] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": os.getloadavg()[0],
        "gpus": subprocess.run(query, capture_output=True, text=True).stdout.splitlines() if has_gpu else [],
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, and the commit of this checkout."""
    packages = ("torch", "transformers", "numpy", "tritonclient", "nvidia-pytriton", "aiohttp")
    installed = {found.name: found.version for found in importlib.metadata.distributions() if found.name in packages}
    root = Path(__file__).resolve().parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {"python": platform.python_version(), **installed, "commit": done.stdout.strip() or "unknown"}


# ---- rounds that measure every contender once, and what comes of them ----


def in_turn(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each round has every name once and starts with another name than the round before."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            yield number, name


def quotient(one: float | None, other: float | None) -> float | None:
    """Return `one / other`; None if either is None or `other` is 0."""
    return one / other if one is not None and other else None


def grouped(samples: Iterable[Sample], *keys: str) -> dict[tuple[Any, ...], list[Sample]]:
    """Group samples by the values of `keys`, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        found.setdefault(tuple(sample[key] for key in keys), []).append(sample)
    return found


def select(samples: Iterable[Sample], **labels: Any) -> list[Sample]:
    """Return the samples that have all of the given labels."""
    return [sample for sample in samples if all(sample[key] == value for key, value in labels.items())]


def pairs(samples: Iterable[Sample], one: str, other: str, by: str = "contender") -> list[tuple[Sample, Sample]]:
    """Return (sample of `one`, sample of `other`) for each round that has both; `by` is the key that holds the name."""
    of = {(sample[by], sample["round"]): sample for sample in samples}
    return [
        (sample, of[other, number]) for (name, number), sample in of.items() if name == one and (other, number) in of
    ]


def ratio(samples: Iterable[Sample], one: str, other: str, key: str, by: str = "contender") -> float | None:
    """Return the median over the rounds of `one`'s `key` divided by `other`'s; None if no round has both."""
    return median_of(a[key] / b[key] for a, b in pairs(samples, one, other, by))


def medians(samples: Sequence[Sample], *keys: str) -> dict[str, float]:
    """Return the median of the samples for each key."""
    return {key: statistics.median(sample[key] for sample in samples) for key in keys}


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there is no such value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# ---- time, CPU time and memory of processes ----


def timed(do: Callable[[], T]) -> tuple[float, T]:
    """Call `do`; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return CPU seconds, user and system, of the processes and all their descendants."""
    return _family_sum(pids, lambda process: sum(process.cpu_times()[:2]))


def peak_rss_mb(pids: Iterable[int]) -> float:
    """Return the summed peak resident size (MiB) of the processes and descendants; each counts shared pages in full."""
    return _family_sum(pids, lambda process: peak_rss_bytes(process.pid)) / 2**20


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Return the largest resident memory of a process since its start, or since 5 was written to its clear_refs."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0  # a zombie has none


def _family_sum(pids: Iterable[int], value: Callable[[psutil.Process], float]) -> float:
    """Return the sum of `value` over the processes and their descendants, except those that have ended."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    total += value(process)
    return total
