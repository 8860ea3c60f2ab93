"""Reads the rows of prompt files: JSONL, Parquet, Arrow, or a folder that `datasets` wrote with `save_to_disk`.

`datasets` itself is not needed (and requires NumPy 2): its shards are plain Arrow streams, which pyarrow reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.errors import RlhfError

SOURCES = ("text", "messages", "prompt")  # columns that may hold the prompt; the first one present is used
CONVERSATIONS = ("messages", "prompt")  # columns that may hold chat messages
ROWS_AT_ONCE = 1024
ARROW_FILE_MAGIC = b"ARROW1"  # distinguishes the Arrow file format from streams, which have no magic bytes
JSON_TYPES = (str, int, float, bool, type(None))


class PromptError(RlhfError, ValueError):
    """The prompt file cannot be used; the message names file, row and cause."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file: its columns and its location."""

    number: int  # from 1; empty lines count
    where: str  # file and row, for error messages
    columns: Any


def read_rows(path: Path) -> Iterator[PromptRow]:
    """Yield the rows of `path`: a dataset folder, a `.parquet` or `.arrow` file, or JSONL with any other suffix.

    Raises:
        PromptError: the file is unreadable or malformed, or a column holds a value that JSON cannot represent.
    """
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        return _table_rows(path)
    return _json_lines(path)


def source_of(row: PromptRow) -> str:
    """Return the name of the column that holds the prompt. Raises PromptError if there is none."""
    columns = row.columns if isinstance(row.columns, dict) else {}
    source = next((name for name in SOURCES if columns.get(name) is not None), None)
    if source is None:
        raise PromptError(
            f"{row.where}: must have a {', '.join(SOURCES[:-1])} or {SOURCES[-1]} column, got {str(row.columns)[:80]!r}"
        )
    return source


def _json_lines(path: Path) -> Iterator[PromptRow]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() would also split at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if line.strip():
            try:
                yield PromptRow(number, where, json.loads(line))
            except json.JSONDecodeError as error:
                raise PromptError(f"{where}: not JSON: {error}") from error


def _table_rows(path: Path) -> Iterator[PromptRow]:
    number = 0
    for shard in _shards(path) if path.is_dir() else [path]:
        for columns in _shard_rows(shard):
            number += 1
            where = f"{path}, row {number}"
            for name, value in columns.items():
                _check_plain(where, name, value)
            yield PromptRow(number, where, {name: _without_nulls(name, value) for name, value in columns.items()})


def _shards(folder: Path) -> list[Path]:
    """Return the Arrow files of a dataset, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise PromptError(f"{folder} contains several splits; choose one of its subfolders: {', '.join(splits)}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / shard["filename"] for shard in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PromptError(
            f"cannot read the prompts {folder}: not a folder written by datasets' save_to_disk ({error})"
        ) from error


def _shard_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa  # deferred: a large library that JSONL does not need
        from pyarrow import parquet
    except ImportError as error:
        raise PromptError(
            f"cannot read the prompts {path}: {error}; install pyarrow, or convert them to JSONL"
        ) from error
    try:
        with path.open("rb") as file:
            if path.suffix == ".parquet":
                batches = parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
            elif file.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                file.seek(0)
                batches = pa.ipc.open_stream(file)
            for batch in batches:
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise PromptError(f"cannot read the prompts {path}: {error}") from error


def _check_plain(where: str, name: str, value: Any) -> None:
    """Raise PromptError if JSON cannot represent the value: reward functions receive the columns as JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(where, f"{name}.{key}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(where, name, inner)
    elif not isinstance(value, JSON_TYPES):
        raise PromptError(
            f"{where}: {name}: {value!r} is a {type(value).__name__}, which JSON cannot represent; remove the "
            "column, or store it as text or numbers"
        )


def _without_nulls(name: str, value: Any) -> Any:
    """Drop null keys from messages: Arrow gives each message the keys of all, and templates treat null as set."""
    if name not in CONVERSATIONS or not isinstance(value, list):
        return value
    return [{k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item for item in value]
