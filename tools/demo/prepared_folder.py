"""Builds a folder once and atomically, and again when its fingerprint changes."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from python_backend.errors import RlhfError

Log = Callable[[str], None]
MANIFEST = "prepared.json"


class PreparationError(RlhfError, ValueError):
    """A demo cannot be prepared; the message says why."""


@dataclass(frozen=True)
class Built:
    """A finished folder and what its builder measured."""

    root: Path
    figures: dict[str, Any]


def build_once(
    out_dir: Path, fingerprint: dict[str, Any], build: Callable[[Path], dict[str, Any]], log: Log = print
) -> Built:
    """Return the folder `out_dir`; build it with `build(folder)` unless it exists with the same fingerprint.

    It is built in a sibling folder and renamed at the end, so that a folder with a manifest is complete. Raises
    PreparationError if `out_dir` holds anything but a prepared demo.
    """
    out_dir = Path(out_dir).absolute()
    ready = _load(out_dir, fingerprint)
    if ready is not None:
        log(f"already prepared: {out_dir}")
        return ready
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / MANIFEST).is_file():
        raise PreparationError(f"{out_dir} is neither empty nor a prepared demo: choose another folder")
    _remove_abandoned(out_dir)
    building = out_dir.with_name(f".{out_dir.name}.building-{os.getpid()}")
    building.mkdir(parents=True)
    try:
        figures = build(building)
        manifest = {"fingerprint": fingerprint, "figures": figures}
        (building / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _move_into_place(building, out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Built(out_dir, figures)


def code_fingerprint(sources: Sequence[str], packages: Sequence[str]) -> dict[str, Any]:
    """Return a hash of modules in this folder, which covers the recipe's constants, and the packages' versions."""
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in sources)
    return {"sources": hashlib.sha256(code).hexdigest(), "versions": {name: version(name) for name in packages}}


def _load(out_dir: Path, fingerprint: dict[str, Any]) -> Built | None:
    manifest_path = out_dir / MANIFEST
    if not manifest_path.is_file():
        return None
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    return Built(out_dir, manifest["figures"]) if manifest["fingerprint"] == fingerprint else None


def _remove_abandoned(out_dir: Path) -> None:
    """Remove what killed preparations of this folder left behind; folders of running processes stay."""
    for path in out_dir.parent.glob(f".{out_dir.name}.*-*"):
        pid = path.name.rpartition("-")[2]
        if pid == str(os.getpid()) or not _is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process, but a live one
    return True


def _move_into_place(building: Path, out_dir: Path) -> None:
    """Rename into place; an older preparation is moved away first: a rename cannot replace a non-empty folder."""
    if out_dir.exists():
        aside = building.with_name(building.name.replace(".building-", ".replaced-"))
        out_dir.rename(aside)
        building.rename(out_dir)
        shutil.rmtree(aside)
    else:
        building.rename(out_dir)
