"""Tests of `actor.data`: prompts from JSONL, Parquet, Arrow and saved datasets; their order, weights, and resuming."""

import datetime
import gzip
import json
import re
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from messages import assistant, user
from prompts import bytewise, inputs_of, prompts_of, write_prompts
from pyarrow import parquet
from tiny_tokenizers import ADDED, CHATS, PLAIN_CHAT, make_text_tokenizer

from rlhf_triton.actor.data.prompt_files import PromptError, read_rows
from rlhf_triton.actor.data.prompt_reader import PromptReader, read_prompts
from rlhf_triton.actor.data.prompts import Positions
from rlhf_triton.checkpoints.tokenization import encode_text
from rlhf_triton.config.actor import PromptFileSection
from rlhf_triton.store.jsonl import drop_steps_from, each_line, write_jsonl

ODD = "line\u2028separator, next\x85line, form\x0cfeed, file\x1cseparator"


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes("\n".join(texts).encode())
    return path


def read(path, *, limit=None, tokenizer=bytewise, **limits):
    return read_prompts(path, PromptReader(tokenizer=tokenizer, **{"max_tokens": 100, **limits}), limit=limit)


class PanicException(BaseException):
    """The exception that the Rust code of `tokenizers` raises when it panics."""


class Chat:
    """A tokenizer with a template that refuses what real ones refuse."""

    chat_template = "roles and contents"

    def __call__(self, text, **options):
        if text == "raise":
            raise TypeError("TextEncodeInput must be Union")
        if text == "panic":
            raise PanicException("no entry found for key")
        return bytewise(text, **options)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **options):
        assert (tokenize, add_generation_prompt) == (False, True)
        assert options.keys() <= {"tools"}
        if messages[0]["content"] == "refuse":
            raise ValueError("no")
        shown = [message for message in messages if message["role"] != "tool"]
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in shown) + "<a>"


# ---- JSONL ----


def test_jsonl_lines_become_prompts_with_metadata(tmp_path):
    """A line ends only where JSONL says: str.splitlines would cut at U+2028 and at U+0085, which JSON leaves alone."""
    rows = [{"text": "ab"}, "", "  ", {"text": "é", "prompt_id": 7, "topic": "x", "n": 1}, "", {"text": ODD}, "broken"]
    first, second, third = read(write(tmp_path, *rows), limit=3)  # and does not read on
    assert (first.prompt_id, first.text, first.tokens.tolist(), first.metadata) == (
        "1",
        "ab",
        [97, 98],
        {"topic": None, "n": None},
    )
    assert (second.prompt_id, second.tokens.tolist(), second.metadata) == ("7", [195, 169], {"topic": "x", "n": 1})
    assert third.text == ODD
    assert first.tokens.dtype == np.int64


NO_COLUMN = "must have a text, messages or prompt column, got"
TOKENS = "tokens, but a prompt must have 1 to 5 (actor.prompts.max_tokens)"
TWO = "could each be the prompt; keep one of them, and remove or rename the others"
HALF = "is half a character (a lone surrogate), which UTF-8 cannot encode; fix or drop the row"
USER = user("x")
REPLY = assistant("y")
LEFT_OUT = (
    "the policy's chat template omits messages of the role 'tool'; give the message another role, or use a template"
)
IMAGE = {"type": "image", "image": "x.png"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "{"], "prompts.jsonl:2: not JSON"),
        (["", "[1]"], "prompts.jsonl:2: a JSON array; a JSONL file has one object per line"),
        (["text,answer", "hello,3"], "prompts.jsonl:1: 'text,answer' is not JSON; a JSONL file has one object per"),
        (['{"question": "a"}'], f"prompts.jsonl:1: {NO_COLUMN}"),
        (['{"prompt": {"a": 1}}'], "prompts.jsonl:1: prompt: must be a string, got {'a': 1}"),
        (['{"text": ""}'], "prompts.jsonl:1: text is empty"),
        (['{"messages": []}'], "prompts.jsonl:1: messages is empty"),
        (['{"prompt": "a", "text": 3}'], f"prompts.jsonl:1: text and prompt {TWO}"),
        ([{"messages": [USER, REPLY], "prompt": "a", "chosen": "b"}], f"prompts.jsonl:1: messages and prompt {TWO}"),
        ([{"prompt": [USER, REPLY]}], "prompts.jsonl:1: prompt ends with the assistant's answer; drop the last"),
        (['{"text": "a", "a": {"b": 1, "b": 2}}'], "prompts.jsonl:1: the key 'b' occurs twice; remove one of them"),
        (['{"text": "a", "n": ' + "9" * 5000 + "}"], "prompts.jsonl:1: not JSON: Exceeds the limit"),
        (['{"text": "a", "n": ' + "[" * 99999 + "]" * 99999 + "}"], "prompts.jsonl:1: not JSON: maximum recursion"),
        (['{"text": "a", "n": ' + "[" * 100 + "]" * 100 + "}"], "prompts.jsonl:1: n: nested more than 99 levels"),
        (['{"text": "a", "prompt_id": "\\ud83d"}'], f"prompts.jsonl:1: prompt_id: '\\ud83d' {HALF}"),
        (['{"text": "a"}', '{"text": "hello \\ud83d world"}'], f"prompts.jsonl:2: text: '\\ud83d' {HALF}"),
        ([json.dumps({"messages": [{**USER, "name": "\ud83d"}]})], f"prompts.jsonl:1: messages: '\\ud83d' {HALF}"),
        ([{"messages": [user("refuse")]}], "prompts.jsonl:1: messages cannot be rendered: no"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], f"prompts.jsonl:1: messages[0]: {LEFT_OUT}"),
        *(
            ([{name: text}], f"prompts.jsonl:1: {name} holds messages written as a text; store the list")
            for name, text in (
                ("prompt", json.dumps([USER])),
                ("prompt", str([USER])),
                ("text", json.dumps(json.dumps([USER]))),
            )
        ),
        ([{"messages": [USER, {"role": "gpt", "content": "Hi"}]}], "prompts.jsonl:1: messages ends with the assistant"),
        ([{"prompt": [USER], "tools": "search"}], "prompts.jsonl:1: tools: must be a list of JSON schemas for the"),
        ([{"prompt": [USER], "tools": [{}]}], "prompts.jsonl:1: prompt: the policy's chat template omits the to"),
        ([{"prompt": [USER], "chat_template_kwargs": 3}], "prompts.jsonl:1: chat_template_kwargs: must be an object"),
        (
            [{"prompt": [USER], "chat_template_kwargs": {"tokenize": True}}],
            "prompts.jsonl:1: chat_template_kwargs: 'tokenize' is reserved; remove it",
        ),
        (['{"text": "raise"}'], "prompts.jsonl:1: cannot be tokenised: TextEncodeInput must be Union"),
        (['{"text": "panic"}'], "prompts.jsonl:1: cannot be tokenised: no entry found for key"),
        (['{"text": "abcdef"}'], f"prompts.jsonl:1: 6 {TOKENS}"),
        ([{"messages": [{"from": "human", "value": "x"}]}], 'prompts.jsonl:1: messages[0]: must be {"role": …, '),
        ([{"messages": [USER, {"role": "user"}]}], "prompts.jsonl:1: messages[1].content: missing or null, must be a"),
        (
            [{"prompt": [{**USER, "content": [IMAGE]}]}],
            "prompts.jsonl:1: prompt[0].content: has a part of type 'image'",
        ),
        ([{"messages": 3}], 'prompts.jsonl:1: messages: must be a list of {"role": …, "content": …}, got 3'),
        (["", " "], "prompts.jsonl has no prompts"),
    ],
)
def test_bad_rows_are_refused_with_file_and_line(tmp_path, lines, message):
    with pytest.raises(PromptError, match=re.escape(message)):
        read(write(tmp_path, *lines), tokenizer=Chat(), max_tokens=5)


def test_messages_need_a_chat_template(tmp_path):
    message = "prompts.jsonl:1: messages: the policy's tokenizer has no chat template; use a text prompt instead"
    with pytest.raises(PromptError, match=re.escape(message)):
        read(write(tmp_path, {"messages": [USER]}))


@pytest.mark.parametrize("family", sorted(CHATS))
def test_tokenizer_adds_bos_to_texts_and_the_template_to_chats(tmp_path, family):
    """A response follows, so there is no [SEP] and no EOS; `sentences` start with the same tokens (`encode_text`)."""
    tokenizer = make_text_tokenizer(family, added=("<s>", "</s>") if family == "llama" else None)
    text = "the words of a text"
    chat = [user("the words")]
    start = ADDED.get(family, ("",))[0]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    before = tokenizer.convert_tokens_to_ids([start] if start else [])
    path = write(tmp_path, {"text": text}, {"text": start + text}, {"prompt": chat}, {"prompt": text})
    plain, given, rendered, other = (prompt.tokens.tolist() for prompt in read(path, tokenizer=tokenizer))
    assert plain == other == [*before, *bare] == encode_text(tokenizer, text)[: len(plain)]
    assert given == encode_text(tokenizer, start + text)[: len(given)]
    assert given[:1] + given[1:].count(given[0]) * ["twice"] == plain[:1]
    assert rendered == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert read(path, tokenizer=tokenizer, add_special_tokens=False)[0].tokens.tolist() == bare
    cut = [prompt.tokens.tolist() for prompt in read(path, tokenizer=tokenizer, max_tokens=3, too_long="truncate")]
    begins = [token for token in rendered[:1] if token in (tokenizer.bos_token_id, tokenizer.cls_token_id)]
    assert cut[:3] == [[*before, *bare[len(before) - 3 :]]] * 2 + [[*begins, *rendered[len(begins) - 3 :]]]
    assert bool(begins) == (CHATS[family] != PLAIN_CHAT)
    with pytest.raises(PromptError, match="text is empty"):
        read(write(tmp_path, {"text": ""}), tokenizer=tokenizer)


def test_long_prompts_are_skipped_or_cut_and_reported(tmp_path, caplog):
    path = write(tmp_path, {"text": "abcdef"}, {"text": "ab"}, {"text": "uvwxyz!"})
    assert [prompt.text for prompt in read(path, max_tokens=4, too_long="skip")] == ["ab"]
    assert caplog.messages == [f"{path}: 2 prompts of more than 4 tokens were skipped: rows 1 (6 tokens), 3 (7 tokens)"]
    cut = read(path, max_tokens=4, too_long="truncate")
    assert [bytes(prompt.tokens.tolist()).decode() for prompt in cut] == ["cdef", "ab", "xyz!"]
    assert [prompt.text for prompt in cut] == ["cdef", "ab", "xyz!"]  # what the policy reads is what is scored
    assert "2 prompts of more than 4 tokens were truncated to their last tokens" in caplog.messages[-1]
    with pytest.raises(PromptError, match="has no prompts of at most 1 tokens"):
        read(path, max_tokens=1, too_long="skip")


def test_huge_jsonl_files_are_not_held_in_memory(tmp_path):
    """After a month, metrics.jsonl has hundreds of megabytes."""
    path = tmp_path / "x.jsonl"
    write_jsonl(path, ({"step": step, "text": "x" * 1000} for step in range(1, 20_001)))
    tracemalloc.start()
    drop_steps_from(19_001, path)
    lines = sum(1 for _ in each_line(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == 19_000
    assert peak < path.stat().st_size / 4


# ---- tables ----

ROWS = [
    {"text": "ab", "prompt_id": "x", "answer": {"value": 3, "unit": None}, "tags": ["a", "b"], "weight": 0.5},
    {"text": "é", "prompt_id": "y", "answer": {"value": None, "unit": "m"}, "tags": [], "weight": None},
    {"text": "c", "prompt_id": "z", "answer": None, "tags": None, "weight": 1.0},
]


def jsonl(folder, rows):
    return write(folder, *rows)


def table_of(rows):
    """A table with the columns of all rows, as `datasets` makes it; pyarrow takes those of the first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.Table.from_pylist([{**names, **row} for row in rows])


def parquet_file(folder, rows):
    parquet.write_table(table_of(rows), folder / "prompts.PARQUET", row_group_size=2)
    return folder / "prompts.PARQUET"


def arrow_stream(folder, rows):
    return write_arrow(folder / "stream.arrow", table_of(rows), pa.ipc.new_stream)


def arrow_file(folder, rows):
    return write_arrow(folder / "file.arrow", table_of(rows), pa.ipc.new_file)


def saved_dataset(folder, rows, name="dataset"):
    """Two shards, named in state.json, beside one that it does not name."""
    root = folder / name
    table = table_of(rows)
    root.mkdir(parents=True)
    shards = {"data-00000-of-00002.arrow": table.slice(0, 2), "data-00001-of-00002.arrow": table.slice(2)}
    for shard, part in {**shards, "cache-1.arrow": table}.items():
        write_arrow(root / shard, part, pa.ipc.new_stream)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": shard} for shard in shards]}))
    (root / "dataset_info.json").write_text("{}")
    return root


def write_arrow(path, table, new):
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


WRITERS = [parquet_file, arrow_stream, arrow_file, saved_dataset]


def content(prompts):
    return [(prompt.prompt_id, prompt.text, prompt.tokens.tolist(), prompt.metadata) for prompt in prompts]


def called(call_id=None, content=None, **arguments):
    """A chat whose assistant calls a tool."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    own = {} if call_id is None else {"id": call_id}
    asked = assistant(content, tool_calls=[{**call, **own}])
    return [USER, asked, {"role": "tool", "content": "7"}]


class Verbatim(Chat):
    """A tokenizer whose template shows every key."""

    def apply_chat_template(self, messages, **_):
        return json.dumps(messages, sort_keys=True)


UNEVEN = [
    # a row; the messages and the metadata that it gives in every format
    ({"prompt": called(city="Rom")}, called(city="Rom"), {}),
    ({"prompt": called("c1", "", to="Oslo", days=[1, 2])}, called("c1", "", to="Oslo", days=[1.0, 2.0]), {}),
    ({"prompt": called(days=[0.5], at={"x": {"y": 1}})}, called(days=[0.5], at={"x": {"y": 1}}), {}),
    ({"prompt": called(city=None, at={"x": {"y": None}})}, called(at={"x": {}}), {}),
    ({"prompt": [{**USER, "content": None, "tool_calls": None}]}, None, {}),
    ({"prompt": [{**USER, "tool_calls": []}]}, [USER], {}),
    ({"prompt": [USER], "task": "code", "tests": ["t", None]}, [USER], {"task": "code", "tests": ["t", None]}),
    ({"prompt": [USER], "task": "math", "answer": 5}, [USER], {"task": "math", "answer": 5.0}),
    ({"prompt": [USER], "answer": 5.5, "extra": {"a": None, "b": []}}, [USER], {"answer": 5.5, "extra": {"b": []}}),
    ({"prompt": [USER], "extra": {"a": [{"c": 1}, {"d": "x"}]}}, [USER], {"extra": {"a": [{"c": 1}, {"d": "x"}]}}),
    ({"prompt": [USER], "extra": {}, "prompt_id": None, "big": 2**62}, [USER], {"extra": {}, "big": 2**62}),
    ({"prompt": None, "messages": [USER], "nan": float("nan")}, [USER], {"nan": float("nan")}),
]
COLUMNS = ("task", "tests", "answer", "extra", "big", "nan")


@pytest.mark.parametrize("write_table", [jsonl, *WRITERS])
def test_every_file_format_gives_the_same_prompts_and_metadata(tmp_path, write_table):
    """Arrow and `datasets` give every row and every nested object the keys of all, and mixed numbers are floats."""
    path = write_table(tmp_path, [row for row, _, _ in UNEVEN])
    reader = PromptReader(tokenizer=Verbatim(), max_tokens=1000)
    for row, (_, messages, metadata) in zip(read_rows(path), UNEVEN, strict=True):
        if messages is None:
            with pytest.raises(PromptError, match=re.escape(f"{row.where}: prompt[0].content: missing or null, must")):
                reader.prompt(row)
            continue
        prompt = reader.prompt(row)
        assert (prompt.text, prompt.prompt_id) == (json.dumps(messages, sort_keys=True), str(row.number))
        expected = {**dict.fromkeys(COLUMNS), **metadata, "messages": messages}
        assert json.dumps(prompt.metadata, sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_late_row_that_adds_a_column_and_floats_is_read_like_parquet(tmp_path):
    """It alone has a column, and floats in another one and in a nested key."""
    rows = [{"text": "a", "n": 1, "of": {"x": 2}} for _ in range(3000)]
    rows[2001] = {"text": "a", "n": 0.5, "of": {"x": 2.5}, "late": "y"}
    parquet.write_table(table_of(rows), table := tmp_path / "prompts.parquet")
    first = '{"late": null, "n": 1.0, "of": {"x": 2.0}, "text": "a"}'
    late = json.dumps(rows[2001], sort_keys=True)
    for path in (jsonl(tmp_path, rows), table):
        found = [json.dumps(row.columns, sort_keys=True) for row in read_rows(path)]
        assert Counter(found) == {first: 2999, late: 1}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": "hi", "text": ""}, "hi"),
        ({"text": None, "messages": [], "prompt": "hi"}, "hi"),
        ({"text": "hi", "messages": [], "prompt": None}, "hi"),
        ({"prompt": "", "messages": [USER]}, "<u>x<a>"),
    ],
)
def test_empty_prompt_columns_are_ignored(tmp_path, columns, text):
    assert read(write(tmp_path, columns), tokenizer=Chat())[0].text == text
    assert read(write(tmp_path, columns), tokenizer=Chat(), has_environment=True)[0].text == text
    begun = dict.fromkeys(columns, "")
    assert read(write(tmp_path, begun), tokenizer=Chat(), has_environment=True)[0].text == "<u><a>"


def test_arrow_map_becomes_an_object_and_duplicate_columns_are_refused(tmp_path):
    path = tmp_path / "types.arrow"
    maps = pa.array([[("x", 1)], [("y", None)]], pa.map_(pa.string(), pa.int64()))
    write_arrow(path, pa.table({"text": ["a", "b"], "map": maps}), pa.ipc.new_stream)
    assert [prompt.metadata["map"] for prompt in read(path)] == [{"x": 1}, {}]
    twice = pa.record_batch([["a"], ["b"]], names=["text", "text"])
    with pytest.raises(PromptError, match="row 1: a column occurs twice: text, text"):
        read(write_arrow(path, pa.Table.from_batches([twice]), pa.ipc.new_file))
    keys = pa.array([[(1, "a")]], pa.map_(pa.int64(), pa.string()))
    with pytest.raises(PromptError, match="row 1: map: the key 1 is not a string; store it as a string"):
        read(write_arrow(path, pa.table({"text": ["a"], "map": keys}), pa.ipc.new_file))


def test_byte_order_mark_and_crlf_are_stripped_from_rows(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert [(prompt.text, prompt.prompt_id) for prompt in read(path)] == [("a", "1"), ("b", "3")]


@pytest.mark.parametrize("write_table", WRITERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tags": datetime.date(2026, 1, 2)}, "tags: datetime.date(2026, 1, 2) is a date, which JSON cannot represent"),
        ({"answer": {"value": b"x"}}, "answer.value: b'x' is a bytes, which JSON cannot represent; remove the column"),
        ({"text": None}, "must have a text, messages or prompt column"),
        ({"text": "too long"}, f"8 {TOKENS}"),
    ],
)
def test_prompt_errors_name_file_row_and_field(tmp_path, write_table, change, message):
    rows = [{"text": row["text"], **{field: None for field in change if field != "text"}} for row in ROWS]
    path = write_table(tmp_path, [*rows[:2], {**rows[2], **change}])
    with pytest.raises(PromptError, match=re.escape(f"{path}, row 3: {message}")):
        read(path, max_tokens=5)


def test_unreadable_prompt_files_and_folders_are_reported_by_path(tmp_path):
    for name in ("train", "test"):
        saved_dataset(tmp_path / "all", ROWS, name)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    missing = saved_dataset(tmp_path, ROWS) / "data-00001-of-00002.arrow"
    missing.unlink()
    for name in ("broken.parquet", "broken.arrow", "latin.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "\xe9"}')
    names = ("broken.parquet", "broken.arrow", "none.parquet", "none.jsonl", "latin.jsonl")
    compressed = tmp_path / "prompts.jsonl.gz"
    compressed.write_bytes(gzip.compress(b'{"text": "a"}'))
    for path, message in {
        compressed: f"cannot read the prompts {compressed}:1: it is not UTF-8 (byte 1); decompress the file",
        tmp_path / "all": f"{tmp_path / 'all'} contains several splits; choose one of its subfolders: test, train",
        tmp_path: f"cannot read the prompts {tmp_path}: not a folder written by datasets' save_to_disk",
        missing.parent: f"cannot read the prompts {missing}: ",
        **{tmp_path / name: f"cannot read the prompts {tmp_path / name}:" for name in names},
    }.items():
        with pytest.raises(PromptError, match=re.escape(message)):
            read(path)


# ---- the prompts of each step ----


def drawn(inputs, *steps, count=4):
    return [prompt.prompt_id for step in steps for prompt in prompts_of(inputs, step, count)]


def numbered(tmp_path, name, count):
    return write_prompts(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(count)])


def resumed(inputs, step, then):
    """Return `then`, continued from the checkpoint that `inputs` writes for `step`."""
    if step not in inputs.positions:
        prompts_of(inputs, step)
    then.restore(step, json.loads(json.dumps(inputs.state(step))))
    return then


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_single_file_is_permuted_once_per_epoch(tmp_path, seed):
    """The rule of the first version, which read the whole file: position -> (epoch, index) -> permutation."""
    inputs = inputs_of(numbered(tmp_path, "a", 7), seed=seed)
    epochs = [[f"a{i}" for i in np.random.default_rng([seed, epoch]).permutation(7)] for epoch in range(5)]
    assert drawn(inputs, *range(1, 11), count=3) == [name for epoch in epochs for name in epoch][:30]
    assert [inputs.epoch(step) for step in (8, 9, 10)] == [3, 3, 4]


def test_prompt_file_weights_hold_over_every_window(tmp_path):
    weights = {"a": 5.0, "b": 3.0, "c": 2.0}
    files = [PromptFileSection(path=numbered(tmp_path, name, 11), weight=weight) for name, weight in weights.items()]
    prompts = drawn(inputs_of(*files), *range(1, 101), count=7)
    for name, weight in weights.items():
        for end in (10, 70, 333, 700):
            assert abs(sum(prompt[0] == name for prompt in prompts[:end]) - end * weight / 10) < 2
        own = [prompt for prompt in prompts if prompt[0] == name]  # each file has its own epochs
        assert all(len(set(own[start : start + 11])) == 11 for start in range(0, len(own) - 11, 11))


@pytest.mark.parametrize("limits", [{}, {"too_long": "skip", "max_tokens": 2}])
def test_resumed_prompt_stream_continues_where_its_checkpoint_was(tmp_path, limits):
    weights = {"a": 3.0, "b": 1.0, "c": 0.5}
    files = [PromptFileSection(path=numbered(tmp_path, name, 9), weight=each) for name, each in weights.items()]
    write_prompts(files[1].path, [f"b{i}" for i in (1, 10, 2, 20, 3, 30, 4, 5)])  # some of 3 tokens
    uninterrupted = inputs_of(*files, **limits)
    whole = drawn(uninterrupted, *range(1, 13))
    for last in range(1, 12):
        first = inputs_of(*files, **limits)
        before = drawn(first, *range(1, last + 1))
        prompts_of(first, last + 1)  # in flight: the checkpoint is that of `last`
        second, other_size = (resumed(first, last, inputs_of(*files, **limits)) for _ in range(2))
        assert before + drawn(second, *range(last + 1, 13)) == whole
        assert second.state(12) == uninterrupted.state(12)
        assert before + drawn(other_size, last + 1, count=len(whole) - len(before)) == whole


def test_prompt_file_changes_since_the_checkpoint_are_logged(tmp_path, caplog):
    path = numbered(tmp_path, "a", 7)
    other = numbered(tmp_path, "b", 7)
    first = inputs_of(path)
    moved = path.rename(tmp_path / "moved.jsonl")
    assert drawn(resumed(first, 2, inputs_of(moved)), 3) == drawn(first, 3)
    assert not caplog.messages
    with moved.open("a") as file:
        file.write('{"text": "new"}\n')
    resumed(first, 2, inputs_of(moved))
    numbered(tmp_path, "a", 7)
    resumed(first, 2, inputs_of(path, other))
    changed, added = caplog.messages
    assert f"{moved} has changed since the checkpoint: after 8 rows the run" in changed
    assert added == f"{other} is not in the checkpoint; its prompts are taken from the beginning"


def test_skipped_prompt_is_replaced_by_the_next_row(tmp_path, caplog):
    texts = ["a", "long", "b", "longer", "c"]
    path = write_prompts(tmp_path / "a.jsonl", texts)
    rows = [texts[i] for i in np.random.default_rng([0, 0]).permutation(5)]
    short = {i: row for i, row in enumerate(rows, 1) if len(row) == 1}
    inputs = inputs_of(path, max_tokens=2, too_long="skip")
    assert drawn(inputs, 1, 2, 3, count=1) == [*short.values()]
    assert [inputs.positions[step].rows[str(path)] for step in (1, 2, 3)] == [*short]
    (message,) = caplog.messages  # the first one, not each
    assert "more than actor.prompts.max_tokens (2); 1 such prompts of this file were skipped" in message
    with pytest.raises(PromptError, match=re.escape(f"{path} has no prompts of at most 0 tokens")):
        prompts_of(inputs_of(path, max_tokens=0, too_long="skip"), 1)
    cut = prompts_of(inputs_of(path, max_tokens=2, too_long="truncate"), 1, 5)
    assert sorted(bytes(prompt.tokens.tolist()) for prompt in cut) == [b"a", b"b", b"c", b"er", b"ng"]


def test_only_short_prompt_is_found_in_whatever_order_the_epochs_have_it(tmp_path):
    """Where two epochs meet, as many rows as the file has need not be all of its rows."""
    path = write_prompts(tmp_path / "a.jsonl", ["a", "long"])
    inputs = inputs_of(path, max_tokens=2, too_long="skip")
    short = [epoch * 2 + [*np.random.default_rng([0, epoch]).permutation(2)].index(0) for epoch in range(20)]
    assert max(np.diff(short)) > 2
    prompts = inputs.read(20, Positions())
    assert [positions.rows[str(path)] - 1 for _, positions in prompts] == short
