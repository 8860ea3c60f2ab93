"""Folders whose state.json names the sha256 of every file in them and of its own content, so that damage is found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.store.weights import sha256_of

STATE_FILE = "state.json"


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was written; the message names the file."""


def seal(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of state.json for `folder` as it is now, subfolders included."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return sealed(state, {str(path.relative_to(folder)): sha256_of(path) for path in paths})


def sealed(state: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of state.json for files whose sha256 is known."""
    data = {**state, "files": dict(files)}
    return {**data, "sha256": _digest_of(data)}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, `files` and `sha256` included. Raises DamagedCheckpoint."""
    path = folder / STATE_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        intact = data["sha256"] == _digest_of(data)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not have the sha256 that it names")
    return data


def verify_folder(folder: Path) -> dict[str, Any]:
    """Compare each file with its sha256; return the content of state.json. Raises DamagedCheckpoint."""
    state = read_state(folder)
    for name, expected in state["files"].items():
        path = folder / name
        try:
            found = sha256_of(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if found != expected:
            raise DamagedCheckpoint(f"{path} is damaged: sha256 {found[:12]}…, {STATE_FILE} says {expected[:12]}…")
    return state


def _digest_of(data: Mapping[str, Any]) -> str:
    content = {name: value for name, value in data.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
