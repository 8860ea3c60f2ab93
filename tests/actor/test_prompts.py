"""`actor.data.prompts` and the JSONL files around it: every line is a prompt, nothing is lost."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import ADDED, CHATS, make_text_tokenizer

from actor.data.prompts import PromptError, PromptReader, read_prompts
from actor.data.rollout import Prompt
from actor.run.metrics import MetricsLog
from python_backend.checkpoints.tokenization import encode_text
from python_backend.store.jsonl import drop_steps_from, each_line, read_jsonl, write_jsonl
from tests.support.prompts import bytewise

ODD = "line\u2028separator, next\x85line, form\x0cfeed, file\x1cseparator"


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes("\n".join(texts).encode())
    return path


def read(path: Path, limit: int | None = None, **limits: Any) -> list[Prompt]:
    return read_prompts(path, PromptReader(bytewise, **{"max_tokens": 100, **limits}), limit=limit)


def test_lines_become_prompts(tmp_path: Path):
    path = write(tmp_path, {"text": "ab"}, "", "  ", {"text": "é", "prompt_id": 7, "topic": "x", "n": 1}, "")
    first, second = read(path)
    assert (first.prompt_id, first.text, first.tokens.tolist(), first.metadata) == ("1", "ab", [97, 98], {})
    assert (second.prompt_id, second.tokens.tolist()) == ("7", [195, 169])
    assert second.metadata == {"topic": "x", "n": 1}
    assert first.tokens.dtype == np.int64


def test_a_line_ends_only_where_jsonl_says(tmp_path: Path):
    """str.splitlines would cut at U+2028 and at U+0085, which JSON does not escape."""
    assert [prompt.text for prompt in read(write(tmp_path, {"text": ODD}, {"text": "b"}))] == [ODD, "b"]


def test_the_limit_takes_the_first_and_does_not_read_on(tmp_path: Path):
    path = write(tmp_path, {"text": "a"}, {"text": "b"}, "broken")
    assert [prompt.text for prompt in read(path, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "{"], "prompts.jsonl:2: not JSON"),
        (["", "[1]"], "prompts.jsonl:2: must have a text, messages or prompt column, got '[1]'"),
        (['{"question": "a"}'], "prompts.jsonl:1: must have a text, messages or prompt column, got"),
        (['{"prompt": {"a": 1}}'], "prompts.jsonl:1: prompt: must be a string, got {'a': 1}"),
        (['{"text": 3}'], "prompts.jsonl:1: text: must be a string, got 3"),
        (['{"text": ""}'], "prompts.jsonl:1: 0 tokens, but a prompt must have 1 to 5 (actor.prompts.max_tokens)"),
        (['{"text": "abcdef"}'], "prompts.jsonl:1: 6 tokens, but a prompt must have 1 to 5 (actor.prompts.max_tokens)"),
        ([], "prompts.jsonl has no prompts"),
        (["", " "], "prompts.jsonl has no prompts"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, lines: list[str], message: str):
    with pytest.raises(PromptError, match=re.escape(message)):
        read(write(tmp_path, *lines), max_tokens=5)


class Chat:
    """A tokenizer with a template that refuses what real ones refuse."""

    chat_template = "roles and contents"

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return bytewise(text, **options)

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in messages) + "<a>"


@pytest.mark.parametrize(
    ("tokenizer", "messages", "message"),
    [
        (
            bytewise,
            [],
            "prompts.jsonl:1: messages: the policy's tokenizer has no chat template; use a text prompt instead",
        ),
        (Chat(), [{"content": "x"}], "prompts.jsonl:1: messages cannot be rendered: 'role'"),
        (Chat(), 3, "prompts.jsonl:1: messages cannot be rendered: 'int' object is not iterable"),
    ],
)
def test_messages_that_cannot_be_rendered(tmp_path: Path, tokenizer: Any, messages: Any, message: str):
    with pytest.raises(PromptError, match=re.escape(message)):
        read_prompts(write(tmp_path, {"messages": messages}), PromptReader(tokenizer, 100))


@pytest.mark.parametrize("family", sorted(CHATS))
def test_a_text_begins_as_the_tokenizer_begins_it_and_a_chat_as_its_template_does(tmp_path: Path, family: str):
    """The response follows, so no [SEP] and no EOS; `sentences` begin with the same tokens (`encode_text`)."""
    tokenizer = make_text_tokenizer(family, added=("<s>", "</s>") if family == "llama" else None)
    text, chat = "the words of a text", [{"role": "user", "content": "the words"}]
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    start, _ = ADDED.get(family, ("", ""))
    before = tokenizer.convert_tokens_to_ids([start] if start else [])
    rows = [{"text": text}, {"text": start + text}, {"prompt": chat}, {"prompt": text}]
    path = write(tmp_path, *rows)
    plain, given, rendered, other = (
        prompt.tokens.tolist() for prompt in read_prompts(path, PromptReader(tokenizer, 99))
    )
    assert plain == other == [*before, *bare]
    assert plain == encode_text(tokenizer, text, 99)[: len(plain)]
    assert given == encode_text(tokenizer, start + text, 99)[: len(given)]
    assert given[:1] + given[1:].count(given[0]) * ["twice"] == plain[:1]
    assert rendered == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    none = read_prompts(path, PromptReader(tokenizer, 99, add_special_tokens=False))
    assert none[0].tokens.tolist() == bare
    cut = read_prompts(path, PromptReader(tokenizer, 3, "truncate"))
    size = 3 - len(before)
    assert [prompt.tokens.tolist() for prompt in cut[:2]] == [[*before, *bare[-size:]]] * 2
    assert cut[2].tokens.tolist() == rendered[-3:]
    with pytest.raises(PromptError, match="0 tokens"):
        read_prompts(write(tmp_path, {"text": ""}), PromptReader(tokenizer, 99))


def test_long_prompts_are_skipped_or_cut_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path, {"text": "abcdef"}, {"text": "ab"}, {"text": "uvwxyz!"})
    assert [prompt.text for prompt in read(path, max_tokens=4, too_long="skip")] == ["ab"]
    assert caplog.messages == [f"{path}: 2 prompts of more than 4 tokens were skipped: rows 1 (6 tokens), 3 (7 tokens)"]
    cut = read(path, max_tokens=4, too_long="truncate")
    assert [bytes(prompt.tokens.tolist()).decode() for prompt in cut] == ["cdef", "ab", "xyz!"]
    assert "2 prompts of more than 4 tokens were truncated to their last tokens" in caplog.messages[-1]
    with pytest.raises(PromptError, match="has no prompts of at most 1 tokens"):
        read(path, max_tokens=1, too_long="skip")


def test_unreadable_files_are_named(tmp_path: Path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "latin.jsonl"):
        with pytest.raises(PromptError, match=re.escape(f"cannot read the prompts {path}")):
            read(path)


# ---- metrics.jsonl and samples.jsonl ----


def test_jsonl_comes_back_as_it_was_written(tmp_path: Path):
    lines = [{"text": ODD}, {"text": "b", "n": 1.5}]
    write_jsonl(tmp_path / "x.jsonl", lines)
    assert read_jsonl(tmp_path / "x.jsonl") == lines
    assert read_jsonl(tmp_path / "none.jsonl") == []
    write_jsonl(tmp_path / "x.jsonl", [])
    assert read_jsonl(tmp_path / "x.jsonl") == []


def test_a_last_line_cut_short_is_left_out_and_any_other_is_an_error(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_bytes('{"step": 1}\n{"text": "é'.encode()[:-1])  # within a letter
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_jsonl(path)


def test_a_resumed_run_drops_the_steps_it_repeats(tmp_path: Path):
    log = MetricsLog(tmp_path, first_step=1)
    for step in (1, 2, 3):
        log.write(step, {"a": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # killed while writing
    log = MetricsLog(tmp_path, first_step=3)
    log.write(3, {"a": 30.0})
    log.close()
    assert [(line["step"], line["a"]) for line in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 30)]


def test_a_resume_holds_no_file_in_memory(tmp_path: Path):
    """After a month metrics.jsonl has hundreds of megabytes."""
    path = tmp_path / "x.jsonl"
    write_jsonl(path, ({"step": step, "text": "x" * 1000} for step in range(1, 20_001)))
    tracemalloc.start()
    try:
        drop_steps_from(19_001, path)
        lines = sum(1 for _ in each_line(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == 19_000
    assert peak < path.stat().st_size / 4
