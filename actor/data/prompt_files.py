"""Reads single rows of prompt files: JSONL, Parquet, Arrow, or a folder that `datasets` wrote with `save_to_disk`.

`datasets` itself is not needed (and requires NumPy 2): its shards are plain Arrow streams, which pyarrow reads.
"""

import contextlib
import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.wire.texts import MAX_NESTING

SOURCES = ("text", "messages", "prompt")  # columns that may hold the prompt
EMPTY: tuple[Any, ...] = (None, "", [])
JSONL_HINT = "; a JSONL file has one object per line, as written by df.to_json(path, orient='records', lines=True)"
NO_SOURCE = "must have a text, messages or prompt column"
CONVERSATIONS = ("messages", "prompt")  # columns that may hold chat messages
MAX_DEPTH = MAX_NESTING - 1  # columns are one level down, in the metadata
EXACT = 2**53  # integers below it convert to float without rounding
CACHED_BYTES = 2**30  # limit for decoded row groups of Parquet files
FINGERPRINT_BYTES = 64 * 1024
ARROW_FILE_MAGIC = b"ARROW1"  # distinguishes the Arrow file format from streams, which have no magic bytes
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
JSON_TYPES = (str, int, float, bool, type(None))


class PromptError(RlhfError, ValueError):
    """The prompt file cannot be used; the message names file, row and cause."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file: its columns and its location."""

    number: int  # line or row, from 1; empty lines count
    where: str  # file and row, for error messages
    columns: dict[str, Any]


def open_rows(path: Path) -> "JsonLines | TableRows":
    """Open `path`: a dataset folder, a `.parquet` or `.arrow` file, or JSONL with any other suffix.

    Raises:
        PromptError: the file is unreadable or not in the format of its suffix.
    """
    return TableRows(path) if path.is_dir() or path.suffix.lower() in TABLES else JsonLines(path)


def read_rows(path: Path) -> Iterator[PromptRow]:
    """Yield the rows of `path` in order. Raises PromptError if the file or a row cannot be read."""
    rows = open_rows(path)
    return (rows.row(index) for index in range(len(rows)))


# All formats give the same rows. Arrow gives every row and nested object the keys of all rows, with null for missing
# ones, and a column with 1 and 1.5 has floats only. So null keys of nested objects are dropped, in JSONL as well, and
# JSONL rows get the columns of all rows, and floats where another row has floats.


def plain_value(where: str, name: str, value: Any, is_float: Callable[[str], bool] = lambda name: False) -> Any:
    """Return the value of a column without the null keys of nested objects.

    Args:
        where: file and row, for error messages.
        name: name of the column, or of a key within it, such as `answer.unit`.
        is_float: returns whether any row has a float under a name.

    Raises:
        PromptError: JSON cannot represent the value, or it is nested too deep for the server.
    """

    def read(name: str, value: Any, depth: int) -> Any:
        if isinstance(value, (dict, list)) and depth > MAX_DEPTH:
            raise PromptError(f"{where}: {name:.80}: nested more than {MAX_DEPTH} levels deep; store it as text")
        if isinstance(value, list):
            return [read(name, inner, depth + 1) for inner in value]
        if isinstance(value, dict):
            if bad_keys := [key for key in value if not isinstance(key, str)]:
                raise PromptError(f"{where}: {name}: the key {bad_keys[0]!r} is not a string; store it as a string")
            return {key: read(f"{name}.{key}", item, depth + 1) for key, item in value.items() if item is not None}
        if not isinstance(value, JSON_TYPES):
            raise PromptError(
                f"{where}: {name}: {value!r:.80} is a {type(value).__name__}, which JSON cannot represent; remove the "
                "column, or store it as text or numbers"
            )
        return float(value) if type(value) is int and abs(value) < EXACT and is_float(name) else value

    return read(name, value, 1)


def fingerprint(path: Path) -> str:
    """Return the size and a hash of the first bytes of a prompt file, or of all files of a dataset folder."""
    files = _shards(path) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(opened.read(FINGERPRINT_BYTES))
    return f"{sum(file.stat().st_size for file in files)}-{digest.hexdigest()[:16]}"


def source_of(row: PromptRow) -> str:
    """Return the name of the column that holds the prompt. Raises PromptError unless there is exactly one."""
    sources = _sources(row)
    if not sources:
        raise PromptError(
            f"{row.where}: {NO_SOURCE}, got {str({k: v for k, v in row.columns.items() if v is not None})[:80]!r}"
        )
    if len(sources) > 1:
        raise PromptError(
            f"{row.where}: {' and '.join(sources)} could each be the prompt; keep one of them, and remove or rename "
            "the others"
        )
    return sources[0]


def _sources(row: PromptRow) -> list[str]:
    """Return the names of the non-empty prompt columns; if all are empty, the first of them."""
    present = [name for name in SOURCES if row.columns.get(name) is not None]
    return [name for name in present if row.columns[name] not in EMPTY] or present[:1]


def with_empty_prompt(row: PromptRow) -> PromptRow:
    """Return the row; if it has no prompt, with an empty user message, which the environment's observation fills."""
    if any(row.columns.get(name) not in EMPTY for name in SOURCES):
        return row
    return replace(row, columns={**row.columns, CONVERSATIONS[0]: [{"role": "user", "content": ""}]})


class JsonLines:
    """The rows of a JSONL file. One pass finds the lines; each row is read from the open file when it is used.

    Empty lines are not rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bounds = array("q")  # three numbers per row: its line, and the line's start and end in bytes
        self._names: dict[str, None] = {}
        self._floats = set[str]()
        try:
            self._file = path.open("rb")
            weakref.finalize(self, self._file.close)
            end = 0
            # Only a newline ends a line; `str.splitlines` would also split at U+2028, which JSON does not escape.
            for number, line in enumerate(self._file):
                begin = end
                end = end + len(line)
                if line.strip():
                    self._bounds.extend((number, begin, end))
                    self._note_columns(number, line)
        except OSError as error:
            raise PromptError(f"cannot read the prompts {path}: {_cause(error, path)}") from error

    def __len__(self) -> int:
        return len(self._bounds) // 3

    def row(self, index: int) -> PromptRow:
        """Read row `index`, from 0. Raises PromptError if it is malformed or nested too deep."""
        number, begin, end = self._bounds[3 * index : 3 * index + 3]
        where = f"{self.path}:{number + 1}"
        columns = {**dict.fromkeys(self._names), **self._columns(number, begin, end, where)}
        values = {name: plain_value(where, name, value, self._floats.__contains__) for name, value in columns.items()}
        return PromptRow(number + 1, where, values)

    def _columns(self, number: int, begin: int, end: int, where: str) -> dict[str, Any]:
        try:
            text = os.pread(self._file.fileno(), end - begin, begin).decode(_encoding(number))
            columns = json.loads(text, object_pairs_hook=partial(_object_without_duplicates, where))
        except (OSError, UnicodeDecodeError) as error:
            hint = "; decompress the file" if self.path.suffix.lower() in COMPRESSED else ""
            raise PromptError(f"cannot read the prompts {where}: {_cause(error, self.path)}{hint}") from error
        except PromptError:
            raise
        except (ValueError, RecursionError) as error:  # ValueError also for a number with thousands of digits
            what = f"not JSON: {error}" if text.lstrip()[:1] in ("{", "[") else f"{text.strip()[:80]!r} is not JSON"
            raise PromptError(f"{where}: {'a JSON array' if text.strip() == '[' else what}{JSONL_HINT}") from error
        if not isinstance(columns, dict):
            what = "a JSON array" if isinstance(columns, list) else repr(text.strip()[:80])
            raise PromptError(f"{where}: {what}{JSONL_HINT}")
        return columns

    def _note_columns(self, number: int, line: bytes) -> None:
        """Record the columns of a row, and which columns or nested keys hold floats."""
        floats = list[str]()

        def parsed(text: str) -> float:
            floats.append(text)
            return float(text)

        with contextlib.suppress(ValueError, RecursionError):  # raised again when the row is used
            columns = json.loads(line.decode(_encoding(number)), parse_float=parsed, parse_constant=parsed)
            if isinstance(columns, dict):
                self._names |= dict.fromkeys(columns)
                for name, value in columns.items() if floats else ():
                    self._floats.update(_float_names(name, value))


def _encoding(line: int) -> str:
    return "utf-8" if line else "utf-8-sig"


def _object_without_duplicates(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises PromptError if a key occurs twice, because JSON does not say which one counts."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PromptError(f"{where}: the key {twice!r:.80} occurs twice; remove one of them")
    return unique


def _float_names(name: str, value: Any) -> Iterator[str]:
    """Yield the name of each float in a column's value; nested names as in `plain_value`."""
    if isinstance(value, float):
        yield name
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _float_names(f"{name}.{key}", inner)
    for inner in value if isinstance(value, list) else ():
        yield from _float_names(name, inner)


class TableRows:
    """The rows of Parquet and Arrow files. Arrow is memory-mapped; decoded row groups of Parquet are cached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        groups = [group for shard in (_shards(path) if path.is_dir() else [path]) for group in _row_groups(shard)]
        self._read = [read for _, read in groups]
        self._starts = np.cumsum([0, *(count for count, _ in groups)])
        self._cache: dict[int, Any] = {}  # row groups by number, least recently used first

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> PromptRow:
        """Read row `index`, from 0. Raises PromptError if it is unreadable or JSON cannot represent a column."""
        where = f"{self.path}, row {index + 1}"
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        try:
            group = self._row_group(number)
            if len({*group.column_names}) < group.num_columns:
                raise ValueError(f"a column occurs twice: {', '.join(group.column_names)}")
            columns = group.slice(index - int(self._starts[number]), 1).to_pylist(maps_as_pydicts="strict")[0]
        except Exception as error:  # pyarrow's errors have many bases, and extension types may raise anything
            raise PromptError(f"cannot read the prompts {where}: {_cause(error, self.path)}") from error
        return PromptRow(index + 1, where, {name: plain_value(where, name, value) for name, value in columns.items()})

    def _row_group(self, number: int) -> Any:
        """Return row group `number`, an Arrow table or record batch, from the cache if possible."""
        group = self._cache.pop(number) if number in self._cache else self._read[number]()
        while self._cache and group.nbytes + sum(other.nbytes for other in self._cache.values()) > CACHED_BYTES:
            self._cache.pop(next(iter(self._cache)))
        self._cache[number] = group
        return group


def _cause(error: Exception, path: Path) -> str:
    return reason_of(error).removeprefix(f"{path}: ")


def _shards(folder: Path) -> list[Path]:
    """Return the Arrow files of a dataset folder, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in folder.glob("*/state.json"))
        raise PromptError(f"{folder} contains several splits; choose one of its subfolders: {', '.join(splits)}")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / shard["filename"] for shard in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PromptError(
            f"cannot read the prompts {folder}: not a folder written by datasets' save_to_disk "
            f"({reason_of(error).removeprefix(f'{folder}/')})"
        ) from error


def _row_groups(path: Path) -> list[tuple[int, Callable[[], Any]]]:
    """Return, for each row group or record batch of a file, its number of rows and a function that reads it."""
    try:
        import pyarrow as pa  # deferred: a large library that JSONL does not need
        from pyarrow import parquet
    except ImportError as error:
        raise PromptError(
            f"cannot read the prompts {path}: {error}; install pyarrow, or convert them to JSONL"
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            file = parquet.ParquetFile(path)
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            return [(count, partial(file.read_row_group, i)) for i, count in enumerate(counts)]
        mapped = pa.memory_map(str(path))
        if mapped.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
            reader = pa.ipc.open_file(mapped)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        else:
            mapped.seek(0)
            batches = list(pa.ipc.open_stream(mapped))
        return [(batch.num_rows, partial(batches.__getitem__, i)) for i, batch in enumerate(batches)]
    except Exception as error:  # as above
        raise PromptError(f"cannot read the prompts {path}: {_cause(error, path)}") from error
