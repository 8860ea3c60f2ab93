"""Folders whose state.json holds the sha256 of every other file and of its own content, to detect damage."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.store.weights import sha256_of

STATE_FILE = "state.json"


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's content does not match its checksums; the message names the file."""


def hashes(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Return the sha256 of every file below `folder`, or of every `parts`-th of them, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256_of(path) for path in paths[part::parts]}


def sealed(state: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of state.json, given the sha256 of each file by relative path."""
    data = {**state, "files": dict(files)}
    return {**data, "sha256": _digest_of(data)}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, including `files` and `sha256`.

    Raises DamagedCheckpoint if it is unreadable or does not match its own sha256.
    """
    path = folder / STATE_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        intact = data["sha256"] == _digest_of(data)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its sha256")
    return data


def verify_folder(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Verify the sha256 of each file, or of every `parts`-th of them, and return the content of state.json.

    Raises DamagedCheckpoint if one differs.
    """
    state = read_state(folder)
    for name, expected in sorted(state["files"].items())[part::parts]:
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
