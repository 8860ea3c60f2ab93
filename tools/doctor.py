"""`rlhf-triton doctor`: checks the machine, a configuration and its server, one line each, with the remedy.

Only the standard library is imported here: the packages may be what is broken.
"""

import argparse
import functools
import importlib
import importlib.metadata
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.tools.arguments import parse_or_complete
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.triton_home import find_tritonserver, libpython_dir, usage

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"  # not in a wheel
PACKAGES = {  # what every run needs: distribution -> module
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "tokenizers": "tokenizers",
    "tritonclient": "tritonclient.http",
    "pydantic": "pydantic",
    "PyYAML": "yaml",
    "Jinja2": "jinja2",
    "psutil": "psutil",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "tensorboard": "tensorboard",
}
OPTIONAL = ("nvidia-pytriton", "peft", "fastapi", "pyarrow", "prometheus-client")
MIB, GIB = 1 << 20, 1 << 30
MIN_SHM, ENOUGH_SHM = 64 * MIB, 512 * MIB
MIN_DISK = GIB
MIN_FILES, ENOUGH_FILES = 256, 4096
LARGE_SKEW_S = 5.0


class Level(Enum):
    """How serious a finding is; the value is what the report prints."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    """What was found; of a problem, also what to do."""
    level: Level = Level.OK

    def __str__(self) -> str:
        first, *others = self.text.splitlines() or [""]
        return "\n".join([f"{self.level.value:<8} {self.name:<16} {first}", *(f"{'':<26}{line}" for line in others)])


Check = Callable[[], Iterable[Finding]]


def failed(name: str, text: str) -> Finding:
    """Return the finding of a problem that keeps a run from working."""
    return Finding(name, text, Level.FAILED)


def warning(name: str, text: str) -> Finding:
    """Return the finding of something that works but may not last."""
    return Finding(name, text, Level.WARNING)


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Run each named check and yield what it finds; one that raises is a failed check, and the others still run."""
    for name, check in checks:
        try:
            yield from check()
        except RlhfError as error:
            yield failed(name, str(error))
        except OSError as error:
            yield failed(name, reason_of(error))
        except Exception as error:  # a broken package may raise anything where it is imported
            yield failed(name, f"{type(error).__name__}: {error}")


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
    installed = [*run_checks([("python", python), ("packages", packages)])]
    yield from installed
    checks = {"devices": devices, "shared memory": shared_memory, "open files": open_files}
    yield from run_checks(checks.items())
    further: dict[str, Check] = {
        "tritonserver": functools.partial(tritonserver, None),
        "disk": functools.partial(disk, Path("runs"), 0),
    }

    def configuration() -> Iterator[Finding]:
        """Load the configuration, and check further what it says."""
        # Imported here, because they need the packages that were checked above.
        checks = importlib.import_module("rlhf_triton.tools.preflight")
        config = importlib.import_module("rlhf_triton.config").load_config(path, overrides)
        further["tritonserver"] = functools.partial(tritonserver, config.server.tritonserver)
        further["disk"] = functools.partial(disk, config.run.dir, checks.disk_bytes(config))
        further.update({name: functools.partial(check, config) for name, check in checks.CHECKS.items()})
        yield Finding("configuration", f"{path}: run {config.run.identity} in {config.run.dir}")

    if path is not None and any(each.level is Level.FAILED for each in installed if each.name in PACKAGES):
        yield warning("configuration", "not checked: install the packages above first")
    elif path is not None:
        yield from run_checks([("configuration", configuration)])
    yield from run_checks(further.items())


def python() -> Iterator[Finding]:
    """Check the interpreter, and that it has the library which Triton's stub loads."""
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        yield failed("python", f"{found}, must be 3.10 to 3.12: create the virtual environment with one of these")
    else:
        yield Finding("python", f"{found} ({sys.executable})")
    yield Finding("libpython", str(libpython_dir()))


def packages() -> Iterator[Finding]:
    """Check that each package is installed, in a version that the project is tested with, and can be imported."""
    tested = _tested()
    for name in (*PACKAGES, *OPTIONAL):
        versions = tested.get(name.lower(), [])
        pinned = f"{name}=={versions[0]}" if versions else name
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PACKAGES:
                yield failed(name, f"not installed: pip install '{pinned}'")
            continue
        if broken := _import_error(PACKAGES.get(name)):
            yield failed(name, f"{installed} cannot be imported ({broken}): pip install --force-reinstall '{pinned}'")
        elif versions and installed.partition("+")[0] not in versions:
            told = f"{installed}, tested with {versions[0]}: pip install '{name}=={versions[0]}' if anything fails"
            yield warning(name, told)
        else:
            yield Finding(name, installed)


def _import_error(module: str | None) -> str | None:
    try:
        if module is not None:
            importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return str(error)
    return None


def _tested() -> dict[str, list[str]]:
    """Return the versions of each package, by its name in lower case, that the tests install; one for each Python."""
    found: dict[str, list[str]] = {}
    lines = CONSTRAINTS.read_text() if CONSTRAINTS.exists() else ""
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lines, re.M):
        found.setdefault(name.lower(), []).append(version)
    return found


def devices() -> Iterator[Finding]:
    """Name the devices that torch can use; nothing if it cannot be imported, which `packages` reports."""
    if _import_error("torch"):
        return
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        built = "built for CUDA " + torch.version.cuda if torch.version.cuda else "built for the CPU"
        yield Finding("devices", f"{os.cpu_count()} CPU cores, no GPU (this torch is {built})")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("devices", f"{os.cpu_count()} CPU cores, {len(names)} GPUs: {', '.join(sorted(set(names)))}")


def tritonserver(explicit: Path | None) -> Iterator[Finding]:
    """Check that a tritonserver is found which works with this Python, and that its libraries load."""
    home = find_tritonserver(explicit)
    answer = usage(home)
    if "--model-repository" not in answer.stdout + answer.stderr:
        why = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        yield failed("tritonserver", f"{home.binary} does not start: {why}; install nvidia-pytriton again")
    else:
        yield Finding("tritonserver", str(home.binary))


def shared_memory() -> Iterator[Finding]:
    """Check the room in /dev/shm, through which tritonserver and its models exchange tensors."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    text, remedy = f"{free / MIB:,.0f} MiB free in {SHARED_MEMORY}", "docker run --shm-size=1g, or remove files there"
    if free < MIN_SHM:
        yield failed("shared memory", f"{text}, the models need at least {MIN_SHM // MIB}: {remedy}")
    elif free < ENOUGH_SHM:
        yield warning("shared memory", f"{text}, large requests may fail: {remedy}")
    else:
        yield Finding("shared memory", text)


def open_files() -> Iterator[Finding]:
    """Check how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        if 0 < hard < ENOUGH_FILES:
            remedy = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        report = failed if soft < MIN_FILES else warning
        yield report("open files", f"at most {soft} per process, {ENOUGH_FILES} are enough: {remedy}")
    else:
        yield Finding("open files", f"at most {soft if soft != resource.RLIM_INFINITY else 'any number'} per process")


def disk(folder: Path, needed: int) -> Iterator[Finding]:
    """Check that files can be written in `folder` or where it will be made, and that the clocks agree.

    Args:
        needed: bytes of the checkpoints that a run keeps there, at least.
    """
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:,.1f} GiB free for {folder}"
    if free < max(needed, MIN_DISK):
        yield failed(
            "disk", f"{text}, a run needs {max(needed, MIN_DISK) / GIB:,.1f}: free some, or set another run.dir"
        )
    else:
        yield Finding("disk", text)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"0" * MIB)
            file.flush()
            os.fsync(file.fileno())
            now, written = time.time(), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        yield failed("disk", f"cannot write in {place}: {error.strerror}; set run.dir to a folder that can be written")
        return
    if abs(now - written) > LARGE_SKEW_S:
        yield warning(
            "clock",
            f"{now - written:+.0f} s against the clock of {place}: synchronise them (NTP), or `rlhf-triton status` may "
            "take a live instance on another machine for a silent one",
        )
    else:
        yield Finding("clock", f"{time.strftime('%Y-%m-%d %H:%M:%S')}, as on the disk")
