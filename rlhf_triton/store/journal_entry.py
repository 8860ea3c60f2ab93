"""Journal entries, their file names and results, and the format of training files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from rlhf_triton.checkpoints.safetensors_header import encode_header
from rlhf_triton.digests import brief
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import INT64_MAX
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS
from rlhf_triton.wire.training_payload import TrainPayload, content_digest, field_digest

Kind = Literal["train", "save", "rewind"]
NUM_NUMBERS = {"train": 0, "save": 1, "rewind": 2}  # numbers after the kind in an entry's name: rank, target
NUMBER = r"(0|[1-9][0-9]{0,18})"  # at most 19 digits: int64
NAME = re.compile(rf"(0[0-9]{{7}}|[1-9][0-9]{{7,18}})\.(train|save|rewind)(?:\.{NUMBER})?(?:\.{NUMBER})?")
DIGEST = "digest"
RESULT_SUFFIX = ".json"  # appended to the entry's name


class DamagedEntry(RlhfError):
    """An entry's file does not have the content that was accepted; the message names the file."""


@dataclass(frozen=True, order=True)
class Entry:
    """One accepted request. Entries are processed in ascending order of their fields."""

    # Train: the step to train; save: the step to checkpoint; rewind: the last step accepted before the rewind.
    step: int
    rank: int  # train: 0; others: 1, 2, … in order of acceptance
    kind: Kind
    target: int = -1  # rewind only: the step to go back to

    @property
    def name(self) -> str:
        """Name of the entry's file."""
        suffix = "" if self.kind == "train" else f".{self.rank}"
        target = f".{self.target}" if self.kind == "rewind" else ""
        return f"{self.step:08d}.{self.kind}{suffix}{target}"

    @classmethod
    def parse(cls, name: str) -> Entry:
        """Return the entry with the file name `name`. Raises ValueError if it is not an entry's name."""
        found = NAME.fullmatch(name)
        if found:
            step, kind, rank, target = found.groups()
            entry = cls(int(step), int(rank or 0), cast(Kind, kind), int(target or -1))
            num_numbers = (rank is not None) + (target is not None)
            if num_numbers == NUM_NUMBERS[kind] and max(entry.step, entry.rank, entry.target) <= INT64_MAX:
                return entry
        raise ValueError(f"{name!r} is not a journal entry")


def entries_in(folder: Path, suffix: str = "", kind: Kind | None = None) -> set[Entry]:
    """Return the entries (of all kinds, or of `kind`) that have a file `<entry><suffix>` in `folder`."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return set()
    found = set()
    for name in names:
        if name.endswith(suffix) and (kind or "") in name:  # a cheap filter before parsing: there may be 1,000 files
            with contextlib.suppress(ValueError):
                found.add(Entry.parse(name.removesuffix(suffix)))
    return found


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of processing one journal entry; the server converts it to the response."""

    entry: str
    weights_version: int
    loss_mean: float | None = None
    digest: str | None = None
    error: str | None = None
    owners: list[str] | None = None  # rewind only: the owners of the run after the rewind, newest first
    skipped_batches: list[int] = field(default_factory=list)  # as in UpdateReport; a replay skips the same ones


def read_training_file(path: Path) -> tuple[TrainPayload, str]:
    """Return a training entry's payload and digest.

    Raises DamagedEntry if the file is unreadable or its content does not match the digest.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            digest = file.metadata()[DIGEST]
        payload = TrainPayload(
            arrays[TOKENS], arrays[SEQUENCE_LENGTHS], arrays[RETURNS], arrays[PREV_VALUES], arrays[MASK]
        )
        found = payload.digest()
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise DamagedEntry(f"{path} is damaged: {reason_of(error)}") from error
    if found != digest:
        raise DamagedEntry(
            f"{path} is damaged: its content has digest {brief(found)}, but its header says {brief(digest)}"
        )
    return payload, digest


def metadata_in(path: Path, name: str) -> str | None:
    """Return a value from a training file's metadata; None if it is missing or the header is damaged.

    Raises FileNotFoundError if the file is missing.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get(name)
    except SafetensorError:
        return None


DTYPES = {"float32": "F32", "int64": "I64"}  # NumPy name -> safetensors name
BESIDE = ThreadPoolExecutor(3, "journal-file")  # for hashing and checks; the writing thread mostly waits for the disk


class TrainingFile:
    """The safetensors file of one payload, with `digest` in its metadata.

    Hashing takes about as long as writing, so the two overlap: the file starts with a placeholder header, which the
    header with the digest replaces at the end. The arrays are written from their own buffers, without a copy.
    """

    def __init__(
        self,
        payload: TrainPayload,
        check: Callable[[], None] = lambda: None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Start hashing and `check`, which raises if the content is invalid, in background threads.

        `more`: further metadata that is not part of the digest.
        """
        self._more = more or {}
        self._arrays = {name: np.ascontiguousarray(array) for name, array in payload.arrays().items()}
        # The largest array takes longest to hash, so it starts first.
        largest_first = sorted(self._arrays.items(), key=lambda item: -item[1].nbytes)
        self._digests = {name: BESIDE.submit(field_digest, array) for name, array in largest_first}
        self._checked = BESIDE.submit(check)

    def check(self) -> None:
        """Wait for the check; re-raise its exception, if any."""
        self._checked.result()

    def close(self) -> None:
        """Wait until no thread reads the caller's arrays, then re-raise the check's exception, if any."""
        wait(self._digests.values())
        self.check()

    @property
    def digest(self) -> str:
        """Digest of the content; blocks until it is computed."""
        return content_digest({name: digest.result() for name, digest in self._digests.items()})

    def matches(self, digest: str) -> bool:
        """Return whether the content has this digest."""
        return digest == self.digest

    def parts(self) -> list[bytes | memoryview]:
        """Return the header with a placeholder digest, followed by the arrays' buffers."""
        return [
            header(self._arrays, {DIGEST: content_digest({}), **self._more}),
            *(array.data for array in self._arrays.values()),
        ]

    def header(self) -> bytes:
        """Return the final header, as long as the placeholder in `parts`. Re-raises the check's exception."""
        self.check()
        return header(self._arrays, {DIGEST: self.digest, **self._more})


def header(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file that stores `arrays` in order."""
    return encode_header({name: (DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()}, metadata)
