"""A disk of its own for a test: a small tmpfs that can be filled up, emptied, and made read-only.
Given: a folder to mount it on. Returns: a `SmallDisk`, gone when the context ends; a skip where nobody may mount.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all the space there is; a file that somebody replaces meanwhile gives some back."""
        for _ in range(100):
            with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(b"0" * (1 << 16))
            if shutil.disk_usage(self.folder).free == 0:
                return
        raise AssertionError(f"{self.folder} does not fill up")

    def empty(self) -> None:
        """Give it back."""
        self._ballast.unlink()

    def read_only(self, on: bool) -> None:
        """Root writes where permissions forbid it, but not here. Waits until no file is open for writing."""
        command = ["mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.folder)]
        for _ in range(100):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.02)
        raise AssertionError(done.stderr)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mount one on `folder`; skip the test where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a full disk is tested on a small tmpfs, and there is no `mount` here")
    if done.returncode != 0:
        pytest.skip(f"a full disk is tested on a small tmpfs, and mounting is not permitted: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
