"""Builds a folder once, atomically, and rebuilds it when its fingerprint changes."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from python_backend.errors import RlhfError
from python_backend.store.durable import remove_folder

Log = Callable[[str], None]
MANIFEST = "prepared.json"


@dataclass(frozen=True)
class Built:
    """A finished folder and the figures that its builder returned."""

    root: Path
    figures: dict[str, Any]


def build_once(
    out_dir: Path, fingerprint: dict[str, Any], build: Callable[[Path], dict[str, Any]], log: Log = print
) -> Built:
    """Return the folder `out_dir`; build it with `build(folder)` unless it exists with the same fingerprint.

    The folder is built beside `out_dir` and renamed at the end, so that a folder with a manifest is complete. Raises
    RlhfError if `out_dir` is neither empty nor a prepared demo.
    """
    out_dir = Path(out_dir).absolute()
    ready = _load(out_dir, fingerprint)
    if ready is not None:
        log(f"already prepared: {out_dir}")
        return ready
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / MANIFEST).is_file():
        raise RlhfError(f"{out_dir} is neither empty nor a prepared demo: choose another folder")
    _remove_abandoned(out_dir)
    building = out_dir.with_name(f".{out_dir.name}.building-{os.getpid()}")
    building.mkdir(parents=True)
    try:
        figures = build(building)
        manifest = {"fingerprint": fingerprint, "figures": figures}
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        remove_folder(out_dir)  # a rename cannot replace a folder
        building.rename(out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Built(out_dir, figures)


def code_fingerprint(sources: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Return a hash of the modules `sources` of this folder, constants included, and the versions of `packages`."""
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in sources)
    return {"sources": hashlib.sha256(code).hexdigest(), "versions": {name: version(name) for name in packages}}


def _load(out_dir: Path, fingerprint: dict[str, Any]) -> Built | None:
    manifest_path = out_dir / MANIFEST
    if not manifest_path.is_file():
        return None
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    return Built(out_dir, manifest["figures"]) if manifest["fingerprint"] == fingerprint else None


def _remove_abandoned(out_dir: Path) -> None:
    """Remove the temporary folders of killed preparations of `out_dir`; keep those of running processes."""
    for path in out_dir.parent.glob(f".{out_dir.name}.building-*"):
        pid = path.name.rpartition("-")[2]
        if pid == str(os.getpid()) or not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
