"""The LLM judge against a scripted endpoint (no model: `chat_server`). Whatever goes wrong is no score, never 0."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer

from python_backend.rewards import chat_endpoint, verdict
from python_backend.rewards.counts import take_counts
from python_backend.rewards.function import FunctionError, Sample, load_function
from python_backend.rewards.judge import Judge
from python_backend.rewards.verdict import NoVerdict, VerdictReader

SPEC = "python_backend.rewards.judge:Judge"
KEY = "sk-very-secret-0123456789"


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE_S", 0.001)
    take_counts()


def judge(server: ChatServer, *, timeout_s: float = 30.0, **options: Any) -> Any:
    """A judge whose whole message is the response."""
    options = {"model": "m", "base_url": server.url, "rubric": "{{ response }}", **options}
    return load_function(SPEC, options, timeout_s=timeout_s)


def row(response: str, prompt: str | None = "Why?", **metadata: Any) -> Sample:
    texts = {"response": response, **({} if prompt is None else {"prompt": prompt})}
    return Sample(f"{prompt}{response}", [], {**metadata, **texts})


def test_an_answer_of_slashes_is_read_at_once() -> None:
    """A step for each of its characters, not for each three of them: a cubic pattern would not end here."""
    for between in ("/" * 100_000 + "x", " " * 50_000 + "/" * 50_000 + "x ", "of " * 30_000 + "x", "-" * 100_000 + "x"):
        assert VerdictReader(1, 10).read(f"8 {between} 10") == 10


@pytest.mark.parametrize("pattern", ["_OF_SCALE", "_RANGE"])
def test_the_linear_patterns_accept_what_the_short_ones_do(pattern: str) -> None:
    """The oracle: easy to read, with several ways to split the same characters."""
    oracle = {
        "_OF_SCALE": r"\W*(?:points?|stars?)?\W*(?:/|out of|of)\W*",
        "_RANGE": r"\s*(?:\([^()]*\)\s*)?(?:[-–—]|to|or)\s*|.*(?:/|\bof)\W*",
    }[pattern]
    parts = ("/", " ", "-", "(", ")", "point", "stars", "of", "out of", "x", "\n")
    flags = re.IGNORECASE | (re.DOTALL if pattern == "_RANGE" else 0)
    for length in range(5):
        for chosen in itertools.product(parts, repeat=length):
            text = "".join(chosen)
            ours = getattr(verdict, pattern).fullmatch(text)
            assert (ours is None) == (re.fullmatch(oracle, text, flags) is None), text


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("7", 7),
        ("Score: 8/10", 8),
        ("**Score: 8**/10", 8),
        ("8.5 out of 10.", 8.5),
        ("8 points (out of 10)", 8),
        ("1. Good. 2. Bad.\nGrade: 3", 3),
        ("10/10", 10),
        ("from 1 to 10: 4", 4),
        ("$\\boxed{9}$", 9),
        ("+5", 5),
        ("no score", "has no number"),
        ("", "has no number"),
        ("11", "score 11 is outside 1 to 10"),
        ("0", "score 0 is outside 1 to 10"),
        ("-3", "score -3 is outside"),
        ("4/5", "ends with '4/5'"),
        ("7-8", "ends with '7-8'"),
        ("7 to 8", "ends with '7 to 8'"),
        ("1 (worst) to 10 (best)", "not one score"),
        ("8,5", "score '8,5' is not a number"),
        ("9 on a scale of 100", "not one score"),
        ("8/10 (80%)", "score 80 is outside"),
        ("9" * 400, "score inf"),
    ],
)
def test_the_last_number_on_the_scale(answer: str, score: float | str) -> None:
    reader = VerdictReader(1, 10)
    if not isinstance(score, str):
        assert reader.read(answer) == score
    else:
        with pytest.raises(NoVerdict, match=re.escape(score)) as caught:
            reader.read(answer)
        assert " ".join(answer.split())[-50:] in str(caught.value)  # the excerpt


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"grade": 4}', 4),
        ('```json\n{"grade": "4.5", "why": "{x}"}\n```', 4.5),
        ('{"grade": 2} {"grade": 3}', 3),
        ('{"a": {"b": 1}, "grade": 5} {"other": 1}', 5),
        ("4", "no JSON object with 'grade'"),
        ('{"grade": null}', "score None is not"),
        ('{"grade": true}', "score True is not"),
        ('{"grade": NaN}', "nan"),
        ('{"grade": ', "no JSON object"),
        ("{" * 9999, "no JSON object"),
        ('{"grade": [4]}', "score [4] is not"),
    ],
)
def test_a_score_in_json(answer: str, score: float | str) -> None:
    reader = VerdictReader(1, 10, json_key="grade")
    if not isinstance(score, str):
        assert reader.read(answer) == score
    else:
        with pytest.raises(NoVerdict, match=re.escape(score)):
            reader.read(answer)


def test_a_score_by_pattern() -> None:
    reader = VerdictReader(0, 1, re.compile(r"VERDICT: (\w+)"))
    assert reader.read("VERDICT: 1 or rather VERDICT: 0 2") == 0
    for answer, cause in (("1", "does not match options.pattern"), ("VERDICT: yes", "'yes' is not a number")):
        with pytest.raises(NoVerdict, match=cause):
            reader.read(answer)


def test_what_is_sent(server: ChatServer) -> None:
    options = {
        "temperature": 0.5,
        "max_tokens": 7,
        "body": {"top_p": 0.9, "max_tokens": None, "max_completion_tokens": 7},
    }
    rubric = "{{ metadata.answer }}|{{ prompt }}|{{ low }}-{{ high }}\n{{ response }}"
    assert judge(server, rubric=rubric, scale=[0, 5], **options)(row("{{ 7 * 7 }} Score: 5", answer="é")) == 5
    sent = server.requests[-1]
    message = "é|Why?|0-5\n{{ 7 * 7 }} Score: 5"
    assert sent == {
        "model": "m",
        "messages": [{"role": "user", "content": message}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 7,
    }
    assert "Authorization" not in server.headers


def test_the_shipped_rubric_has_both_texts(server: ChatServer) -> None:
    with pytest.raises(NoVerdict, match="not one score"):  # the server repeats the rubric's last line
        Judge(model="m", base_url=server.url, timeout_s=30.0)(row("Because.", "Why not?"))
    message = server.requests[-1]["messages"][0]["content"]
    assert "# Prompt\nWhy not?\n\n# Response\nBecause.\n" in message
    assert message.endswith("a number from 1 to 10.")


@pytest.mark.parametrize("what", ["busy once", "broken once", "half once", "slow once"])
def test_a_fault_that_passes_is_retried(server: ChatServer, what: str) -> None:
    assert judge(server, request_timeout_s=1.0 if what == "slow once" else 60.0)(row(what)) == 7
    counts = take_counts()
    assert (counts["requests"], counts["retries"]) == (2, 1)
    assert "failures" not in counts


@pytest.mark.parametrize(
    ("what", "requests", "cause"),
    [
        ("broken", 3, "HTTP 503: overloaded; gave up after 3 attempts"),
        ("garbage", 3, "not a chat completion: <html>Bad gateway</html>; gave up"),
        ("hang", 3, "timed out; gave up after 3 attempts"),
        ("wrong", 1, "HTTP 400: max_tokens is too large"),
        ("gone", 1, "HTTP 404: no such model"),
        ("redirect", 1, "HTTP 302"),
        ("no text", 1, "the reply has no text"),
        ("cut", 1, "the judge's answer reached max_tokens (512): 'Score: 1'"),
        ("no grade at all", 1, "the judge's answer has no number: 'no grade at all'"),
    ],
)
def test_a_fault_that_stays_is_no_score(server: ChatServer, what: str, requests: int, cause: str) -> None:
    before = len(server.requests)
    with pytest.raises(NoVerdict, match=re.escape(cause)):
        judge(server, max_retries=2, request_timeout_s=0.2 if what == "hang" else 60.0)(row(what))
    counts = take_counts()
    assert (counts["requests"], counts["failures"]) == (requests, 1)
    assert len(server.requests) == before + requests


def test_no_attempt_begins_after_the_deadline(server: ChatServer) -> None:
    for header in ("3600", formatdate(time.time() + 3600, usegmt=True)):
        server.retry_after = header
        with pytest.raises(NoVerdict, match="no time for another attempt after 1"):
            judge(server)(row("broken"))
    server.retry_after = "0"
    with pytest.raises(NoVerdict, match="no time for another attempt after 1"):
        judge(server, timeout_s=0.5, request_timeout_s=30.0)(row("hang"))
    assert take_counts()["requests"] == 3


def test_a_dead_endpoint_is_no_score() -> None:
    server = ChatServer()
    server.stop()
    with pytest.raises(NoVerdict, match="ConnectionRefusedError"):
        judge(server, max_retries=1)(row("7"))
    assert take_counts()["requests"] == 2


def test_the_mean_of_several_answers_and_what_they_cost(server: ChatServer) -> None:
    asked = judge(server, samples=3, prompt_price=2.0, completion_price=10.0)
    assert asked(row("Score: 6")) == 6
    counts = take_counts()
    assert counts.pop("request_seconds") > 0
    assert counts == {"requests": 3, "prompt_tokens": 300, "completion_tokens": 30, "cost": pytest.approx(9e-4)}


def test_the_key_is_sent_and_never_shown(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    asked = judge(server, api_key_env="JUDGE_KEY")
    assert asked(row("Score: 3")) == 3
    assert server.headers["Authorization"] == f"Bearer {KEY}"
    with pytest.raises(NoVerdict, match=re.escape("HTTP 401: Incorrect API key: Bearer ***")) as caught:
        asked(row("echo the key"))
    with pytest.raises(NoVerdict, match=r"x Bearer \*\*\*") as cut:  # before the message is truncated
        asked(row("echo the key late"))
    assert KEY[:3] not in str(cut.value)
    before = len(server.requests)
    with pytest.raises(NoVerdict):
        asked(row("redirect"))  # urllib would send the key along
    assert len(server.requests) == before + 1
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    with pytest.raises(FunctionError, match="JUDGE_KEY has spaces or characters") as refused:
        judge(server, api_key_env="JUDGE_KEY")
    shown = "".join([repr(asked), str(asked), str(caught.value), str(refused.value), *capfd.readouterr()])
    assert KEY not in shown


def test_a_row_without_what_the_rubric_needs_costs_no_request(server: ChatServer) -> None:
    before = len(server.requests)
    shipped = Judge(model="m", base_url=server.url, timeout_s=30.0)
    for sample, cause in ((Sample("x"), "'prompt' is undefined"), (row("x", None), "'prompt' is undefined")):
        with pytest.raises(NoVerdict, match=cause):
            shipped(sample)
    with pytest.raises(NoVerdict, match="has no attribute 'answer'"):
        judge(server, rubric="{{ metadata.answer }}")(row("x"))
    with pytest.raises(NoVerdict, match="unsafe"):
        judge(server, rubric="{{ response.__class__.__mro__ }}")(row("x"))
    assert len(server.requests) == before


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"modle": "m"}, "options.modle: unknown; did you mean model?"),
        ({"zzz": 1}, "options.zzz: unknown; the options: model, base_url, rubric,"),
        ({"base_url": None}, "options.base_url: None, must be a text"),
        ({"base_url": "ftp://host/v1"}, "options.base_url: 'ftp://host/v1', must be http://host/v1 or https://host/v1"),
        ({"base_url": "file:///etc/passwd"}, "options.base_url: 'file:///etc/passwd', must be http"),
        ({"base_url": "host:8000/v1"}, "options.base_url: 'host:8000/v1', must be http"),
        ({"base_url": "http://h/é"}, "options.base_url: 'http://h/é', must be http"),
        ({"base_url": "http://h:99999/v1"}, "options.base_url: not an address: Port out of range"),
        ({"base_url": f"http://user:{KEY}@h/v1"}, "options.base_url: has a user, a password or a query"),
        ({"model": ""}, "options.model: '', must be a text"),
        ({"temperature": -1}, "options.temperature: -1, must be a number of at least 0"),
        ({"temperature": True}, "options.temperature: True"),
        ({"max_tokens": 1.5}, "options.max_tokens: 1.5, must be an integer of at least 1"),
        ({"samples": 0}, "options.samples: 0, must be an integer of at least 1"),
        ({"scale": [5, 1]}, "options.scale: [5, 1], must be two numbers"),
        ({"scale": 10}, "options.scale: 10, must be two numbers"),
        ({"pattern": "("}, "options.pattern: '(': missing )"),
        ({"pattern": "a"}, "options.pattern: 'a', must be a regular expression with one group"),
        ({"pattern": "(a)", "json_key": "b"}, "options.pattern: set together with json_key"),
        ({"rubric": "{{ respons }}"}, "options.rubric: no field 'respons'; the fields: prompt, response, text"),
        ({"rubric": "a\n{% if %}"}, "options.rubric: line 2: "),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "the environment variable NO_SUCH_VARIABLE is not set"),
        ({"request_timeout_s": 0}, "options.request_timeout_s: 0, must be a number above 0"),
        ({"body": [1]}, "options.body: [1], must be a mapping"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(FunctionError, match=re.escape(cause)) as caught:
        load_function(SPEC, {"model": "m", "base_url": "http://h/v1", **options}, timeout_s=1.0)
    assert KEY not in str(caught.value)


def test_a_missing_option_is_one_sentence() -> None:
    with pytest.raises(FunctionError, match=re.escape(f"{SPEC}: options.base_url: missing")):
        load_function(SPEC, {"model": "m"}, timeout_s=1.0)


def test_the_documentation_has_every_option() -> None:
    (table,) = re.findall(r"\| option \|.*?\n\n", Path("docs/llm-judge.md").read_text(), re.DOTALL)
    documented = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == {field.name for field in dataclasses.fields(Judge)} - {"timeout_s"}
