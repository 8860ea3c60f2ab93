"""Journal entries, their file names and results, and the format of training files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rlhf_triton.digests import brief
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import INT64_MAX
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS
from rlhf_triton.wire.training_payload import TrainPayload

Kind = Literal["train", "save", "rewind"]
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
        step, kind, rank, target, *_ = *name.split("."), "", ""
        entry = cls(int(step), int(rank or 0), cast(Kind, kind), int(target or -1))
        is_canonical = kind in get_args(Kind) and entry.name == name and "-" not in name
        if not is_canonical or max(entry.step, entry.rank, entry.target) > INT64_MAX:
            raise ValueError(f"{name!r} is not a journal entry")
        return entry


def entries_in(folder: Path, suffix: str = "", kind: Kind | None = None) -> set[Entry]:
    """Return the entries (of all kinds, or of `kind`) that have a file `<entry><suffix>` in `folder`."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return set()
    entries = set()
    for name in names:
        if name.endswith(suffix) and (kind or "") in name:  # a cheap filter before parsing: there may be 1,000 files
            with contextlib.suppress(ValueError):
                entries.add(Entry.parse(name.removesuffix(suffix)))
    return entries


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
        actual = payload.digest()
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise DamagedEntry(f"{path} is damaged: {reason_of(error)}") from error
    if actual != digest:
        raise DamagedEntry(
            f"{path} is damaged: its content has digest {brief(actual)}, but its header says {brief(digest)}"
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


def training_file(payload: TrainPayload, metadata: Mapping[str, str]) -> bytes:
    """Return the content of a payload's safetensors file; the metadata must have its `digest`."""
    return save({name: np.ascontiguousarray(array) for name, array in payload.arrays().items()}, {**metadata})
