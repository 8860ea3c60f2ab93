"""Checks the machine: Python, packages, devices, tritonserver, memory, open files and the disk.

Only the standard library is imported here, because the packages may be broken."""

import importlib
import importlib.metadata
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_triton.tools.checks.findings import Finding, failed, warning
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.triton_home import find_tritonserver, libpython_dir, usage

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"  # not in a wheel
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
    "matplotlib": "matplotlib",
    "tensorboard": "tensorboard",
}
OPTIONAL = ("nvidia-pytriton", "peft", "starlette", "pyarrow", "prometheus-client")
MIB = 1 << 20
GIB = 1 << 30
MIN_SHM = 64 * MIB
RECOMMENDED_SHM = 512 * MIB
MIN_DISK = GIB
MIN_FILES = 256
RECOMMENDED_FILES = 4096
LARGE_SKEW_S = 5.0


def python() -> Iterator[Finding]:
    """Check the interpreter, and that it has the library which Triton's stub loads."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        yield failed("python", f"{version}, must be 3.10 to 3.12: create the virtual environment with one of these")
    else:
        yield Finding("python", f"{version} ({sys.executable})")
    yield Finding("libpython", str(libpython_dir()))


def packages() -> Iterator[Finding]:
    """Check that each package is installed, in a version that the project is tested with, and can be imported."""
    tested = _tested_versions()
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
            text = f"{installed}, tested with {versions[0]}: pip install '{name}=={versions[0]}' if anything fails"
            yield warning(name, text)
        else:
            yield Finding(name, installed)


def _import_error(module: str | None) -> str | None:
    try:
        if module is not None:
            importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything
        return str(error)
    return None


def _tested_versions() -> dict[str, list[str]]:
    """Return the tested versions of each package, by lower-case name, one for each Python."""
    tested: dict[str, list[str]] = {}
    lines = CONSTRAINTS.read_text() if CONSTRAINTS.exists() else ""
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lines, re.M):
        tested.setdefault(name.lower(), []).append(version)
    return tested


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
    text = f"{free / MIB:,.0f} MiB free in {SHARED_MEMORY}"
    remedy = "docker run --shm-size=1g, or remove files there"
    if free < MIN_SHM:
        yield failed("shared memory", f"{text}, the models need at least {MIN_SHM // MIB}: {remedy}")
    elif free < RECOMMENDED_SHM:
        yield warning("shared memory", f"{text}, large requests may fail: {remedy}")
    else:
        yield Finding("shared memory", text)


def open_files() -> Iterator[Finding]:
    """Check how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < RECOMMENDED_FILES:
        remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        if 0 < hard < RECOMMENDED_FILES:
            remedy = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        report = failed if soft < MIN_FILES else warning
        yield report("open files", f"at most {soft} per process, {RECOMMENDED_FILES} are enough: {remedy}")
    else:
        yield Finding("open files", f"at most {soft if soft != resource.RLIM_INFINITY else 'any number'} per process")


def existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def disk(folder: Path, needed: int) -> Iterator[Finding]:
    """Check that files can be written in `folder` or where it will be made, and that the clocks agree.

    Args:
        needed: bytes of the checkpoints that a run keeps there, at least.
    """
    place = existing_folder(folder)
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
            now = time.time()
            written = os.fstat(file.fileno()).st_mtime
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
