"""Versions of the policy's weights for vLLM servers: folders that all servers and ranks can read.

<root>/<number>/    a Hugging Face folder, or only the adapters under LoRA
<root>/CURRENT      {"number": ..., "name": ...}, replaced by rename
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from python_backend.store.durable import numbers_in, read_json, remove_folder, sweep, write_folder, write_json

FULL, ADAPTERS = "weights-", "adapters-"  # first part of a version's name
KEPT = 2  # the current version, and the one that a server may still be loading


@dataclass(frozen=True)
class PolicyVersion:
    """One version of the policy's weights."""

    name: str
    """Unique over all processes: a server that outlives an actor must not take the next actor's weights for its own."""
    folder: Path


class PolicyVersions:
    """The versions of one run."""

    def __init__(self, root: Path, *, are_adapters: bool) -> None:
        self._root = root
        self._prefix = f"{ADAPTERS if are_adapters else FULL}{uuid.uuid4().hex[:8]}"

    def publish(self, write: Callable[[Path], None]) -> None:
        """Have `write` fill the folder of a new version, make it the current one, and remove old ones."""
        self._root.mkdir(parents=True, exist_ok=True)
        sweep(self._root)
        number = max(numbers_in(self._root), default=0) + 1
        write_folder(self._root / str(number), write, durable=False)  # the next actor publishes its own
        write_json(self._root / "CURRENT", {"number": number, "name": f"{self._prefix}-{number}"})
        for old in numbers_in(self._root)[:-KEPT]:
            remove_folder(self._root / str(old))

    def current(self) -> PolicyVersion:
        """Return the current version, which must have been published."""
        found = read_json(self._root / "CURRENT")
        assert found is not None, "no version was published"
        return PolicyVersion(found["name"], (self._root / str(found["number"])).absolute())
