"""The weights store: numbered, immutable versions of the critic; CURRENT names the one that is served.
Given: the store's folder. Returns: versions, manifests, and what each serving instance says it serves.
Holds no torch: servers, the sidecar and the tools all read it.

    <root>/<version>/{model.safetensors, config.json, manifest.json}
    <root>/CURRENT                      one line, replaced by rename: the only truth about what is served
    <root>/serving/<instance>-<pid>.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.durable import (
    read_json,
    remove_folder,
    replace_file,
    sweep,
    sync_directory,
    sync_file,
    write_json,
)

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
FIRST_VERSION = "make version 0 with `python -m trainer --config YAML --init-only`"
REMOTE_SILENCE_S = 15.0  # an instance on another host counts as gone after this silence


class WeightsError(RuntimeError):
    """A version cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Manifest:
    """What a version is: written last, so a folder with a manifest is complete."""

    version: int
    run_id: str
    step: int  # critic updates that made these weights
    sha256: str  # of model.safetensors
    tensors: dict[str, list[Any]]  # name -> [dtype, shape]
    parent: int | None  # version these weights were made from, or are a copy of
    epoch: int  # of the sidecar that wrote it


@dataclass(frozen=True)
class ServingRecord:
    """What one critic instance says of itself."""

    instance: str
    host: str
    pid: int
    version: int
    previous: int | None
    time: float  # unix seconds of the last change
    swap_ms: float | None = None  # from seeing CURRENT move to serving it
    rejected: int | None = None  # version that it refused
    error: str | None = None  # and why


class WeightsStore:
    """Versions under one folder. Version numbers only rise; a version is never overwritten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._current = root / "CURRENT"
        self._serving = root / "serving"

    def folder(self, version: int) -> Path:
        """Where `version` lies."""
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit() and (p / MANIFEST_FILE).is_file())

    def current(self) -> int | None:
        """The version that is served; None in an empty store. Raises WeightsError if CURRENT is unreadable."""
        try:
            text = self._current.read_text(errors="replace")
        except FileNotFoundError:
            return None
        if not text.strip().isdigit():
            raise WeightsError(f"{self._current} holds {text[:40]!r}, not a version number")
        return int(text)

    def set_current(self, version: int) -> None:
        """Make every instance serve `version`."""
        self.manifest(version)
        replace_file(self._current, f"{version}\n".encode())

    def manifest(self, version: int) -> Manifest:
        """The manifest of `version`. Raises WeightsError if the version is not there or incomplete."""
        try:
            data = read_json(self.folder(version) / MANIFEST_FILE)
            if data is None:
                raise WeightsError(f"version {version} is not in the weights store")
            return Manifest(**data)
        except (OSError, ValueError, TypeError) as error:
            raise WeightsError(f"version {version}: unreadable manifest: {error}") from error

    def add(
        self,
        write: Callable[[Path], None],
        *,
        run_id: str,
        step: int,
        parent: int | None,
        epoch: int,
        reuse: bool = True,
    ) -> Manifest:
        """Write a new version; CURRENT stays where it is.

        With `reuse`, the newest version is returned instead of being written again if it is the same run's, step's
        and content: a replay after a crash. An older one is not: numbers must rise when steps are trained again after
        a rewind.

        Args:
            write: puts model.safetensors and config.json into the folder it is given.

        Raises:
            OSError: the disk refuses; nothing is left behind.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        staging = self.root / f".staging-{uuid.uuid4().hex}"
        staging.mkdir()
        try:
            write(staging)
            digest = sha256_of(staging / WEIGHTS_FILE)
            existing = self._find(run_id=run_id, step=step, sha256=digest) if reuse else None
            if existing is not None:
                return existing
            version = self.next_version()
            manifest = Manifest(version, run_id, step, digest, tensor_types(staging / WEIGHTS_FILE), parent, epoch)
            (staging / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1))
            for path in staging.iterdir():
                sync_file(path)
            sync_directory(staging)
            staging.rename(self.folder(version))
            sync_directory(self.root)
            return manifest
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def next_version(self) -> int:
        """The number that the next version gets."""
        taken = [int(p.name) for p in self.root.iterdir() if p.name.isdigit()]
        return max([*taken, self.current() or -1], default=-1) + 1

    def verify_files(self, version: int) -> Manifest:
        """Compare hash, names, dtypes and shapes on disk with the manifest. Raises WeightsError."""
        manifest = self.manifest(version)
        path = self.folder(version) / WEIGHTS_FILE
        try:
            digest = sha256_of(path)
            tensors = tensor_types(path)
        except (OSError, ValueError) as error:
            raise WeightsError(f"version {version}: cannot read {WEIGHTS_FILE}: {error}") from error
        if digest != manifest.sha256:
            raise WeightsError(
                f"version {version}: {WEIGHTS_FILE} has sha256 {digest[:12]}…, its manifest says "
                f"{manifest.sha256[:12]}…"
            )
        if tensors != manifest.tensors:
            raise WeightsError(f"version {version}: tensors differ from the manifest")
        return manifest

    def acknowledge(self, record: ServingRecord) -> None:
        """Say what an instance serves (called by the instance)."""
        self._serving.mkdir(parents=True, exist_ok=True)
        write_json(self._record_path(record.instance, record.pid), asdict(record), durable=False)

    def touch(self, instance: str, pid: int) -> None:
        """Say that the instance is still there."""
        os.utime(self._record_path(instance, pid))

    def withdraw(self, instance: str, pid: int) -> None:
        """The instance serves no more."""
        self._record_path(instance, pid).unlink(missing_ok=True)

    def serving(self) -> list[ServingRecord]:
        """Records of the instances that are alive."""
        return [record for record, path in self._records() if _is_alive(record, path)]

    def died(self) -> list[ServingRecord]:
        """Records of instances on this host whose process ended without withdrawing: killed, or crashed."""
        here = socket.gethostname()
        return [record for record, path in self._records() if record.host == here and not _is_alive(record, path)]

    def forget_died(self) -> None:
        """Remove the records of instances that are not alive (called by an instance that takes their place)."""
        for record, path in self._records():
            if not _is_alive(record, path):
                path.unlink(missing_ok=True)

    def prune(self, *, keep: int) -> list[int]:
        """Delete old versions; return their numbers.

        Kept: version 0, CURRENT, the newest `keep`, and whatever a live instance serves.
        """
        needed = {0, self.current(), *(record.version for record in self.serving())}
        doomed = [v for v in self.versions()[:-keep] if v not in needed]
        for version in doomed:
            remove_folder(self.folder(version))
        sweep(self.root)
        return doomed

    def _records(self) -> list[tuple[ServingRecord, Path]]:
        found = ((path, read_json(path)) for path in sorted(self._serving.glob("*.json")))
        return [(ServingRecord(**data), path) for path, data in found if data is not None]

    def _find(self, *, run_id: str, step: int, sha256: str) -> Manifest | None:
        newest = [self.manifest(version) for version in self.versions()[-1:]]
        return next((m for m in newest if (m.run_id, m.step, m.sha256) == (run_id, step, sha256)), None)

    def _record_path(self, instance: str, pid: int) -> Path:
        return self._serving / f"{instance}-{pid}.json"


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def tensor_types(path: Path) -> dict[str, list[Any]]:
    """`{name: [dtype, shape]}` from a safetensors header. Raises ValueError if it is none, or cut short."""
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= size <= 100_000_000:
            raise ValueError("not a safetensors file")
        try:
            header = json.loads(file.read(size))
            tensors = {name: item for name, item in sorted(header.items()) if name != "__metadata__"}
            end = max((item["data_offsets"][1] for item in tensors.values()), default=0)
            types = {name: [item["dtype"], item["shape"]] for name, item in tensors.items()}
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError("not a safetensors file") from error
    if path.stat().st_size != 8 + size + end:
        raise ValueError(f"{path.stat().st_size} bytes long, its header says {8 + size + end}")
    return types


def _is_alive(record: ServingRecord, path: Path) -> bool:
    if record.host == socket.gethostname():
        try:
            state = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z"  # tritonserver does not reap a stub that was killed
    try:
        return time.time() - path.stat().st_mtime < REMOTE_SILENCE_S
    except FileNotFoundError:
        return False
