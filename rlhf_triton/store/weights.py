"""The weights store: numbered, immutable versions of a model's weights; CURRENT names the version to serve.

Does not import torch, because servers, the sidecar and the tools all use it.

    <root>/<version>/{model.safetensors, config.json, manifest.json}    or several weights files with an index
    <root>/CURRENT    version number, replaced by rename: the single source of truth for what is served
    <root>/NEXT       number of the version being verified; instances preload it
    <root>/serving/   one record per instance (ServingRecord)
"""

from __future__ import annotations

import contextlib
import json
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import INDEX_FILE, WEIGHTS_FILE, head_files, stored_adapters
from rlhf_triton.digests import brief, digest_of, json_digest
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store import durable
from rlhf_triton.store.serving_records import ServingRecord, ServingRecords

MANIFEST_FILE = "manifest.json"
WRITER_PATIENCE_S = 10.0  # how long to wait for another writer
READ_ONLY = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
FIRST_VERSION = "make version 0 with `python -m rlhf_triton.trainer --config YAML --init-only`"


class WeightsError(RlhfError):
    """A version cannot be used; the message names the version and the cause."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the weights of a version come from."""

    run_id: str
    step: int = 0  # number of critic updates in these weights; 0 for a reward model
    parent: int | None = None  # version that these weights were trained or copied from
    epoch: int = 0  # journal epoch of the sidecar that wrote it
    tokenizer: str | None = None  # version 0 of a critic: fingerprint of the tokenizer whose tokens it is trained on
    made_from: dict[str, Any] | None = None  # version 0: the settings from which it was made
    source: str | None = None  # folder from which these weights were copied


@dataclass(frozen=True, kw_only=True)
class Manifest(Origin):
    """Description of a version. It is written last, so a folder with a manifest is complete.

    manifest.json also contains the digest of its own content, as `seal`.
    """

    version: int
    files: dict[str, str]  # digest of every other file in the folder: weights, their index, config.json
    base: int | None = None  # version with the other weights, if this one has only adapters
    canary: list[float] | None = None  # values of the canary row that an instance must reproduce to serve the version
    store_id: str | None = None  # first version of a store: random, see `WeightsStore.identity`

    @property
    def digest(self) -> str:
        """Digest of the files' digests: equal for versions with equal content."""
        return json_digest(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the content of manifest.json."""
        content = asdict(self)
        return {**content, "seal": json_digest(content)}


class WeightsStore:
    """Versions under one folder. Version numbers only increase, and a version is never overwritten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records = ServingRecords(root / "serving")
        self._current = root / "CURRENT"
        self._next = root / "NEXT"
        self._verified: dict[int, tuple[int, ...]] = {}  # base version of adapters -> `file_stamp` when it was verified

    def folder(self, version: int) -> Path:
        """Return the folder of `version`."""
        return self.root / str(version)

    def versions(self) -> list[int]:
        """Return the numbers of the complete versions, ascending."""
        return [number for number in durable.numbers_in(self.root) if (self.folder(number) / MANIFEST_FILE).is_file()]

    def current(self) -> int | None:
        """Return the version in CURRENT; None in an empty store. Raises WeightsError if CURRENT is malformed."""
        return _read_number(self._current)

    def set_current(self, version: int, *, back: bool = False) -> None:
        """Set CURRENT to `version`; every instance then switches to it.

        Args:
            back: allow a version below the current one (rollback).

        Raises:
            WeightsError: the version does not exist, or is below the current one without `back`.
        """
        self.manifest(version)
        current = self.current()
        if not back and current is not None and version < current:
            raise WeightsError(
                f"version {version} is below version {current}, which is served; use a rollback to serve an older one"
            )
        durable.replace_file(self._current, f"{version}\n".encode())

    def announce(self, version: int) -> None:
        """Set NEXT to `version`: instances preload it during verification, to swap as soon as CURRENT names it."""
        durable.replace_file(self._next, f"{version}\n".encode(), durable=False)

    def announced(self) -> int | None:
        """Return the version in NEXT, or None if there is none or the file is malformed."""
        try:
            return _read_number(self._next)
        except WeightsError:  # written without fsync, because it is only a hint: a crash may truncate it
            return None

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of `version`. Raises WeightsError if the version is missing or incomplete."""
        try:
            data = durable.read_json(self.folder(version) / MANIFEST_FILE)
            if data is None:
                raise WeightsError(f"version {version} is not in the weights store")
            seal = data.pop("seal")
            if seal != json_digest(data):
                raise WeightsError(
                    f"version {version}: {MANIFEST_FILE} is damaged: its content does not match its seal"
                )
            data.pop("tensors", None)  # which 0.1.0 wrote
            manifest = Manifest(**data)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise WeightsError(f"version {version}: cannot read {MANIFEST_FILE}: {reason_of(error)}") from error
        if manifest.version != version:
            raise WeightsError(
                f"version {version}: {MANIFEST_FILE} is that of version {manifest.version}; remove the folder {version}"
            )
        return manifest

    @property
    def identity(self) -> str:
        """Text that differs from other stores', whose versions have the same numbers; "" without a usable version 0.

        A copy of the store has the same one. Before there were ids, what version 0 contains.
        """
        try:
            first = self.manifest(0)
        except WeightsError:
            return ""
        return first.store_id or first.digest

    def manifests(self) -> list[Manifest]:
        """Return the readable manifests, ascending by version."""
        manifests = []
        for version in self.versions():
            with contextlib.suppress(WeightsError):  # a damaged manifest must not hide the others
                manifests.append(self.manifest(version))
        return manifests

    def add(
        self,
        write: Callable[[Path], Mapping[str, str] | None],
        origin: Origin,
        *,
        canary: list[float] | None = None,
        reuse: bool = True,
    ) -> Manifest:
        """Write a new version and return its manifest; CURRENT does not change.

        Args:
            write: writes weights and config.json into the given folder; returns the digests of the files for which it
                has computed them.
            reuse: return the newest version if it has the same run, step and content (a replay after a crash) instead
                of adding one. Older versions are never reused, because numbers must increase when steps are trained
                again after a rewind.
            canary: see `Manifest`.

        Raises:
            OSError: the write failed; nothing is left behind.
        """
        with self._writing(), durable.staged_folder(self.root) as staging:
            digests = write(staging) or {}
            files = {path.name: digests.get(path.name) or digest_of(path) for path in sorted(staging.iterdir())}
            newest = next(reversed(self.manifests()), None)
            if reuse and newest and (newest.run_id, newest.step, newest.files) == (origin.run_id, origin.step, files):
                return newest
            adapters = stored_adapters(staging)
            manifest = Manifest(
                # Above all existing ones, including incomplete folders.
                version=max([*durable.numbers_in(self.root), self.current() or -1], default=-1) + 1,
                files=files,
                base=None if adapters is None else adapters.base,
                canary=canary,
                store_id=None if newest else uuid.uuid4().hex,
                **vars(origin),
            )
            (staging / MANIFEST_FILE).write_text(json.dumps(manifest.to_json(), indent=1))
            for path in staging.iterdir():
                path.chmod(READ_ONLY)  # truncating a file in place would kill instances that map it (SIGBUS)
            durable.sync_tree(staging)
            staging.rename(self.folder(manifest.version))
            durable.sync_directory(self.root)
            return manifest

    def verify_files(self, version: int, digest: Callable[[Path], str] = digest_of) -> Manifest:
        """Call `verify_hashes` for `version`; return its manifest."""
        manifest = self.manifest(version)
        self.verify_hashes(manifest, digest)
        return manifest

    def verify_hashes(
        self,
        manifest: Manifest,
        digest: Callable[[Path], str] = digest_of,
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Compare the digests of the files, or of every `parts`-th file starting at `part`, with the manifest.

        The base version of adapters is verified again only after its files have changed. Raises WeightsError if a file
        differs, is unreadable, or would be loaded although the manifest does not name it.
        """
        version = manifest.version
        for name in sorted(manifest.files)[part::parts]:
            self.verify_file(manifest, name, digest)
        unnamed = {path.name for path in self.folder(version).glob("*.safetensors")} - manifest.files.keys()
        if unnamed:
            raise WeightsError(f"version {version}: its manifest does not name {min(unnamed)}; remove this file")
        if manifest.base is not None:
            stamp = self.file_stamp(manifest.base)
            if self._verified.get(manifest.base) != stamp:
                self.verify_hashes(self.manifest(manifest.base), digest, part=part, parts=parts)
                self._verified[manifest.base] = stamp

    def verify_file(self, manifest: Manifest, name: str, digest: Callable[[Path], str] = digest_of) -> None:
        """Compare the digest of one file with the manifest. Raises WeightsError if it differs or is unreadable."""
        expected = manifest.files[name]
        try:
            actual = digest(self.folder(manifest.version) / name)
        except (OSError, ValueError) as error:
            raise WeightsError(f"version {manifest.version}: cannot read {name}: {reason_of(error)}") from error
        if actual != expected:
            raise WeightsError(
                f"version {manifest.version}: {name} has digest {brief(actual)}, but its manifest says "
                f"{brief(expected)}"
            )

    def file_stamp(self, version: int) -> tuple[int, ...]:
        """Return inode, size and mtime of each of the version's files, which show a later change; () if unreadable."""
        try:
            stats = [path.stat() for path in sorted(self.folder(version).iterdir())]
        except OSError:
            return ()
        return tuple(number for status in stats for number in (status.st_ino, status.st_size, status.st_mtime_ns))

    def serving(self) -> list[ServingRecord]:
        """Return the records of live instances that serve a version."""
        return [record for record in self.records.alive() if record.version is not None]

    def prune(self, *, keep: int) -> list[int]:
        """Delete old versions; return their numbers.

        Keeps version 0, CURRENT, the newest `keep`, and every version that a live instance serves or is loading.
        """
        with self._writing():
            records = self.records.alive()
            needed = {0, self.current(), *(r.version for r in records), *(r.loading for r in records)}
            unneeded = [v for v in self.versions()[:-keep] if v not in needed]
            for version in unneeded:
                durable.remove_folder(self.folder(version))
            durable.sweep(self.root)
            durable.sweep_files(self.root / "serving")
            self.records.forget_died(elsewhere=True)
            return unneeded

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the writer lock, so that the sidecar and a manual rollback cannot write at the same time.

        Raises TimeoutError (an OSError) if another writer holds it for `WRITER_PATIENCE_S`.
        """
        durable.make_folder(self.root)
        with durable.exclusive_lock(self.root / "WRITER", patience_s=WRITER_PATIENCE_S):
            yield


def weights_files(folder: Path) -> list[Path]:
    """Return the weights files of a version or checkpoint, with their index if there are several."""
    single = folder / WEIGHTS_FILE
    return (
        [single, *head_files(folder)]
        if single.is_file()
        else [*sorted(folder.glob("*.safetensors")), folder / INDEX_FILE]
    )


def _read_number(path: Path) -> int | None:
    data = durable.read_if_there(path)
    if data is None:
        return None
    text = data.decode(errors="replace")
    if not durable.is_number(text.strip()):
        raise WeightsError(f"{path} contains {text[:40]!r}, not a version number")
    return int(text)
