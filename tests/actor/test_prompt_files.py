"""`actor.data.prompt_files`: the same prompts from JSONL, Parquet, Arrow and a folder as `datasets` saves it."""

from __future__ import annotations

import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_prompts import Chat

from actor.data.prompts import PromptError, PromptReader, read_prompts
from actor.data.rollout import Prompt
from tests.support.prompts import bytewise

ROWS: list[dict[str, Any]] = [
    {"text": "ab", "prompt_id": "x", "answer": {"value": 3, "unit": None}, "tags": ["a", "b"], "weight": 0.5},
    {"text": "é", "prompt_id": "y", "answer": {"value": None, "unit": "m"}, "tags": [], "weight": None},
    {"text": "c", "prompt_id": "z", "answer": None, "tags": None, "weight": 1.0},
]


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet", row_group_size=2)
    return folder / "prompts.parquet"


def arrow_stream(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_arrow(folder / "stream.arrow", pa.Table.from_pylist(rows), pa.ipc.new_stream)


def arrow_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_arrow(folder / "file.arrow", pa.Table.from_pylist(rows), pa.ipc.new_file)


def saved_dataset(folder: Path, rows: list[dict[str, Any]], name: str = "dataset") -> Path:
    """Two shards, named in state.json, beside one that it does not name."""
    root = folder / name
    root.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    shards = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for shard, part in zip(shards, (table.slice(0, 2), table.slice(2)), strict=True):
        write_arrow(root / shard, part, pa.ipc.new_stream)
    write_arrow(root / "cache-1.arrow", table, pa.ipc.new_stream)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": shard} for shard in shards]}))
    (root / "dataset_info.json").write_text("{}")
    return root


def write_arrow(path: Path, table: pa.Table, new: Any) -> Path:
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


WRITERS = [parquet_file, arrow_stream, arrow_file, saved_dataset]


def content(prompts: list[Prompt]) -> list[tuple[Any, ...]]:
    return [(prompt.prompt_id, prompt.text, prompt.tokens.tolist(), prompt.metadata) for prompt in prompts]


@pytest.mark.parametrize("write", WRITERS)
def test_tables_hold_what_jsonl_holds(tmp_path: Path, write: Any):
    expected = content(read_prompts(jsonl(tmp_path, ROWS), PromptReader(bytewise, 100)))
    assert [prompt[0] for prompt in expected] == ["x", "y", "z"]
    path = write(tmp_path, ROWS)
    assert content(read_prompts(path, PromptReader(bytewise, 100))) == expected
    assert content(read_prompts(path, PromptReader(bytewise, 100), limit=1)) == expected[:1]


@pytest.mark.parametrize("write", [jsonl, *WRITERS])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_chats(tmp_path: Path, write: Any, column: str):
    """Arrow gives every message the keys of all: one that is absent stays absent."""
    chats = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be", "name": "n"}, {"role": "user", "content": "!"}],
    ]
    found = read_prompts(write(tmp_path, [{column: chat, "n": 1} for chat in chats]), PromptReader(Chat(), 100))
    assert [prompt.text for prompt in found] == ["<u>hi<a>", "<s>be<u>!<a>"]
    assert [prompt.metadata for prompt in found] == [{"messages": chat, "n": 1} for chat in chats]


def test_the_first_of_text_messages_and_prompt_that_a_row_has_counts(tmp_path: Path):
    rows = [
        {"prompt": "p", "completion": "c"},
        {"text": "t", "prompt": "p"},
        {"text": None, "prompt": "q"},
        {"messages": [{"role": "user", "content": "m"}], "prompt": "p"},
    ]
    found = read_prompts(jsonl(tmp_path, rows), PromptReader(Chat(), 100))
    assert [prompt.text for prompt in found] == ["p", "t", "q", "<u>m<a>"]
    assert [prompt.metadata for prompt in found[:3]] == [{"completion": "c"}, {"prompt": "p"}, {}]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": datetime.date(2026, 1, 2)}, "tags: datetime.date(2026, 1, 2) is a date, which JSON cannot represent"),
        (
            {"answer": {"value": b"x"}},
            "answer.value: b'x' is a bytes, which JSON cannot represent; remove the column",
        ),
        ({"text": None}, "must have a text, messages or prompt column"),
        ({"text": "too long"}, "8 tokens, but a prompt must have 1 to 5 (actor.prompts.max_tokens)"),
    ],
)
def test_errors_name_file_row_and_field(tmp_path: Path, write: Any, change: dict[str, Any], message: str):
    (field,) = change
    rows = [{name: row[name] for name in {"text", field}} for row in ROWS]
    if field != "text":
        rows = [{**row, field: None} for row in rows]
    path = write(tmp_path, [*rows[:2], {**rows[2], **change}])
    with pytest.raises(PromptError, match=re.escape(f"{path}, row 3: {message}")):
        read_prompts(path, PromptReader(bytewise, 5))


def test_folders_and_files_that_are_something_else(tmp_path: Path):
    saved_dataset(tmp_path / "all", ROWS, "train")
    saved_dataset(tmp_path / "all", ROWS, "test")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    broken = saved_dataset(tmp_path, ROWS)
    (broken / "data-00001-of-00002.arrow").unlink()
    for name in ("broken.parquet", "broken.arrow"):
        (tmp_path / name).write_bytes(b"neither of them")
    for path, message in (
        (tmp_path / "all", f"{tmp_path / 'all'} contains several splits; choose one of its subfolders: test, train"),
        (tmp_path, f"cannot read the prompts {tmp_path}: not a folder written by datasets' save_to_disk"),
        (broken, f"cannot read the prompts {broken / 'data-00001-of-00002.arrow'}: "),
        (tmp_path / "broken.parquet", f"cannot read the prompts {tmp_path / 'broken.parquet'}: "),
        (tmp_path / "broken.arrow", f"cannot read the prompts {tmp_path / 'broken.arrow'}: "),
        (tmp_path / "none.parquet", f"cannot read the prompts {tmp_path / 'none.parquet'}: "),
    ):
        with pytest.raises(PromptError, match=re.escape(message)):
            read_prompts(path, PromptReader(bytewise, 100))


def test_without_pyarrow_jsonl_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines, table = jsonl(tmp_path, ROWS), parquet_file(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert len(read_prompts(lines, PromptReader(bytewise, 100))) == 3
    with pytest.raises(PromptError, match="install pyarrow, or convert them to JSONL"):
        read_prompts(table, PromptReader(bytewise, 100))
