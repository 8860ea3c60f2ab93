"""Machine, versions and date of a measurement, for result.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "transformers", "numpy", "tritonclient", "nvidia-pytriton", "aiohttp")


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


def now_utc() -> str:
    """Return the current UTC date and time in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
