"""The weights store: numbered, immutable versions of the critic; CURRENT names the one that is served.

Imports no torch: servers, the sidecar and the tools all read it.

    <root>/<version>/{model.safetensors, config.json, manifest.json}
    <root>/CURRENT    one line, replaced by rename: the only truth about what is served
    <root>/NEXT       one line: the version that is being verified; instances load it meanwhile
    <root>/serving/   a record of each instance (serving_records.py)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.checkpoints.safetensors_header import read_header
from python_backend.errors import RlhfError
from python_backend.store import durable
from python_backend.store.serving_records import ServingRecord, ServingRecords

MANIFEST_FILE = "manifest.json"
HASHED_AT_ONCE = 1 << 24  # bytes: a thread that hashes asks for Python's lock only between two blocks
WRITER_PATIENCE_S = 10.0
READ_ONLY = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
FIRST_VERSION = "make version 0 with `python -m trainer --config YAML --init-only`"


class WeightsError(RlhfError):
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


class WeightsStore:
    """Versions under one folder. Version numbers only rise; a version is never overwritten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = ServingRecords(root / "serving")
        self._current = root / "CURRENT"
        self._next = root / "NEXT"

    def folder(self, version: int) -> Path:
        """Where `version` lies."""
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return [number for number in durable.numbers_in(self.root) if (self.folder(number) / MANIFEST_FILE).is_file()]

    def current(self) -> int | None:
        """The version that is served; None in an empty store. Raises WeightsError if CURRENT is unreadable."""
        return _read_number(self._current)

    def set_current(self, version: int, *, back: bool = False) -> None:
        """Make every instance serve `version`; numbers only rise, but `back` returns to one that was served before.

        Raises:
            WeightsError: the version is not there, or not above the one served.
        """
        self.manifest(version)
        current = self.current()
        if not back and current is not None and version < current:
            raise WeightsError(f"version {version} is not above version {current}, which is served")
        durable.replace_file(self._current, f"{version}\n".encode())

    def announce(self, version: int) -> None:
        """Let the instances load `version` while it is verified, so that they have it when CURRENT moves."""
        durable.replace_file(self._next, f"{version}\n".encode(), durable=False)

    def announced(self) -> int | None:
        """The version announced last."""
        try:
            return _read_number(self._next)
        except WeightsError:  # only a hint, and not made to survive a crash
            return None

    def manifest(self, version: int) -> Manifest:
        """The manifest of `version`. Raises WeightsError if the version is not there or incomplete."""
        try:
            data = durable.read_json(self.folder(version) / MANIFEST_FILE)
            if data is None:
                raise WeightsError(f"version {version} is not in the weights store")
            return Manifest(**data)
        except (OSError, ValueError, TypeError) as error:
            raise WeightsError(f"version {version}: unreadable manifest: {error}") from error

    def manifests(self) -> list[Manifest]:
        """The manifests that can be read, ascending."""
        found = []
        for version in self.versions():
            with contextlib.suppress(WeightsError):  # a damaged one hides no other
                found.append(self.manifest(version))
        return found

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
        with self._writing(), durable.staged_folder(self.root) as staging:
            write(staging)
            digest = sha256_of(staging / WEIGHTS_FILE)
            existing = self._find(run_id=run_id, step=step, sha256=digest) if reuse else None
            if existing is not None:
                return existing
            tensors = tensor_types(staging / WEIGHTS_FILE)
            manifest = Manifest(self.next_version(), run_id, step, digest, tensors, parent, epoch)
            (staging / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=1))
            for path in staging.iterdir():
                path.chmod(READ_ONLY)  # instances map the file: who cuts it short in place kills them
            durable.sync_tree(staging)
            staging.rename(self.folder(manifest.version))
            durable.sync_directory(self.root)
            return manifest

    def next_version(self) -> int:
        """The number that the next version gets."""
        return max([*durable.numbers_in(self.root), self.current() or -1], default=-1) + 1

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

    def serving(self) -> list[ServingRecord]:
        """Records of the live instances that serve a version."""
        return [record for record in self.records.alive() if record.version is not None]

    def prune(self, *, keep: int) -> list[int]:
        """Delete old versions; return their numbers.

        Kept: version 0, CURRENT, the newest `keep`, and whatever a live instance serves or loads.
        """
        with self._writing():
            records = self.records.alive()
            needed = {0, self.current(), *(r.version for r in records), *(r.loading for r in records)}
            doomed = [v for v in self.versions()[:-keep] if v not in needed]
            for version in doomed:
                durable.remove_folder(self.folder(version))
            durable.sweep(self.root)
            durable.sweep_files(self.root / "serving")
            return doomed

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time: the sidecar, or a person's rollback beside it.

        Raises TimeoutError, an OSError, where the other one does not end: it may have been stopped.
        """
        durable.make_folder(self.root)
        with durable.exclusive_lock(self.root / "WRITER", patience_s=WRITER_PATIENCE_S):
            yield

    def _find(self, *, run_id: str, step: int, sha256: str) -> Manifest | None:
        newest = next(reversed(self.manifests()), None)
        same = newest is not None and (newest.run_id, newest.step, newest.sha256) == (run_id, step, sha256)
        return newest if same else None


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        block = memoryview(bytearray(max(1, min(os.fstat(file.fileno()).st_size, HASHED_AT_ONCE))))
        while size := file.readinto(block):
            state.update(block[:size])
    return state.hexdigest()


def tensor_types(path: Path) -> dict[str, list[Any]]:
    """Return `{name: [dtype, shape]}` of a safetensors file. Raises ValueError if it is damaged."""
    return {name: [info.dtype, list(info.shape)] for name, info in sorted(read_header(path).items())}


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    if not durable.is_number(text.strip()):
        raise WeightsError(f"{path} holds {text[:40]!r}, not a version number")
    return int(text)
