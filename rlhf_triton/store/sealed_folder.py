"""Folders that detect damage: state.json has the digests of all other files and of its own content."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.digests import brief, digest_of, json_digest
from rlhf_triton.errors import reason_of
from rlhf_triton.store.durable import numbers_in, remove_folder, sync_directory, write_folder, write_json

STATE_FILE = "state.json"
ASIDE_SUFFIX = ".set-aside"
DIGEST = "digest"  # key of the digest of state.json's own content


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's content does not match its digests; the message names the file."""


def saved_steps(root: Path) -> list[int]:
    """Return the steps that have a checkpoint in `root`, ascending."""
    return [step for step in numbers_in(root) if (root / str(step) / STATE_FILE).is_file()]


def hashes(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Return the digest of every file below `folder`, or of every `parts`-th one from `part` on, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest_of(path) for path in paths[part::parts]}


def write_sealed(folder: Path, state: Mapping[str, Any], save: Callable[[Path], Mapping[str, str]]) -> None:
    """Write a folder with `state` and the files of `save(folder)`, which returns their digests by relative path."""

    def fill(staging: Path) -> None:
        _write_state(staging, state, save(staging), durable=False)  # `write_folder` syncs it

    write_folder(folder, fill)


def replace_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the state of a folder, whose other files stay. Raises DamagedCheckpoint if it has no intact state."""
    _write_state(folder, state, read_state(folder)["files"], durable=True)


def _write_state(folder: Path, state: Mapping[str, Any], files: Mapping[str, str], *, durable: bool) -> None:
    data = {**state, "files": dict(files)}
    write_json(folder / STATE_FILE, {**data, DIGEST: json_digest(data)}, durable=durable)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint to `<step>.set-aside`, replacing an older one of that name; return the new path."""
    aside = folder.with_name(folder.name + ASIDE_SUFFIX)
    remove_folder(aside)
    folder.rename(aside)
    sync_directory(folder.parent)
    return aside


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of state.json, including `files` and its digest.

    Raises DamagedCheckpoint if it is unreadable or does not match its own digest.
    """
    path = folder / STATE_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        intact = data[DIGEST] == json_digest({name: value for name, value in data.items() if name != DIGEST})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {reason_of(error)}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its digest")
    return data


def verify_folder(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """Verify the digest of each file, or of every `parts`-th file starting at `part`; return the content of state.json.

    Raises DamagedCheckpoint if a digest differs.
    """
    state = read_state(folder)
    for name, expected in sorted(state["files"].items())[part::parts]:
        path = folder / name
        try:
            actual = digest_of(path)
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
        if actual != expected:
            raise DamagedCheckpoint(
                f"{path} is damaged: its digest is {brief(actual)}, but {STATE_FILE} says {brief(expected)}"
            )
    return state
