"""A small tmpfs for a test, which can be filled up, emptied, and made read-only."""

import contextlib
import shutil
import subprocess
import time

import pytest


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, folder):
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self):
        """Use up all the space; repeated, since a file that is replaced meanwhile frees some."""
        for _ in range(100):
            with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(b"0" * (1 << 16))
            if shutil.disk_usage(self.folder).free == 0:
                return
        raise AssertionError(f"{self.folder} does not fill up")

    def empty(self):
        """Free the space again."""
        self._ballast.unlink()

    def read_only(self, on):
        """Remount the disk; waits until no file is open for writing. File permissions would not stop root."""
        command = ["mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.folder)]
        for _ in range(100):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.02)
        raise AssertionError(done.stderr)


@contextlib.contextmanager
def small_disk(folder):
    """Mount a disk of 4 MB on `folder` and unmount it at the end; skip the test if mounting is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
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
