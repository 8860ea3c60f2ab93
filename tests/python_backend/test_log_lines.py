"""Log lines as JSON: their fields, the position of the process, and what a process prints or dies of."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from python_backend.config.sections import RunSection
from python_backend.monitoring import log_lines
from python_backend.monitoring.log_lines import JsonFormatter, parsed, say, set_log_position


@pytest.fixture(autouse=True)
def _fresh_position() -> Iterator[None]:
    with mock.patch.dict(log_lines._position, step=None, version=None):
        yield


def line(message: str = "hello", *args: Any, rank: int = 0, **attributes: Any) -> dict[str, Any]:
    """What the formatter writes for a record."""
    record = logging.LogRecord(
        "actor.loop", logging.WARNING, "loop.py", 1, message, args, attributes.pop("error", None)
    )
    record.created = 1_700_000_000.25
    vars(record).update(attributes)
    text = JsonFormatter("actor", "my-run", rank).format(record)
    assert "\n" not in text
    assert text.isascii()
    return dict(json.loads(text))


def test_the_fields_of_a_line() -> None:
    assert line("%d of %d", 3, 8) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "WARNING",
        "process": "actor",
        "run": "my-run",
        "step": None,
        "version": None,
        "logger": "actor.loop",
        "message": "3 of 8",
    }
    assert line("zwei\nZeilen – \ud800")["message"] == "zwei\nZeilen – \ud800"
    assert line(rank=2)["rank"] == 2


def test_the_position_stays_until_it_changes() -> None:
    set_log_position(step=7, version=3)
    set_log_position(step=8)
    assert (line()["step"], line()["version"]) == (8, 3)
    set_log_position(version=0)
    assert (line()["step"], line()["version"]) == (8, 0)
    other = line(step=2, version=1)  # of a task that works on another step
    assert (other["step"], other["version"]) == (2, 1)


def test_a_line_is_parsed_again() -> None:
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, "no disk", (), None)
    assert parsed(JsonFormatter("actor", "run").format(record)) == ("ERROR", "no disk")
    for other in ("10:00:00 ERROR no disk", "", "[1]", "null", '{"level": "ERROR"}'):
        assert parsed(other) is None


def run_logging(script: str, log_format: str) -> tuple[int, list[str]]:
    """Run a script in a process that logs in this format; return its exit code and the lines of its stderr."""
    start = (
        "import logging, sys, threading, warnings\n"
        "from python_backend.config.command_line import log_to_stderr, report\n"
        "from python_backend.config.sections import RunSection\n"
        "from python_backend.monitoring.log_lines import say\n"
        f"log_to_stderr('sidecar', RunSection(run_id='r1', log_format={log_format!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", start + script], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


SCRIPT = """
logging.getLogger("a.b").info("an %s", "info")
logging.getLogger("a.b").debug("not logged")
warnings.warn("old")
say("  | warning: from the server", sys.stderr)
say("plain", sys.stderr)
report(ValueError("critic.checkpoint: missing"), 2)
type("Odd", (), {"__del__": lambda self: {}["gone"]})()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def test_whatever_a_process_writes_is_json() -> None:
    code, lines = run_logging(SCRIPT, "json")
    found = [json.loads(text) for text in lines]
    assert code == 1
    assert {(each["process"], each["run"]) for each in found} == {("sidecar", "r1")}
    assert [(each["level"], each["message"].partition(" <")[0]) for each in found if "old" not in each["message"]] == [
        ("INFO", "an info"),
        ("WARNING", "from the server"),
        ("INFO", "plain"),
        ("ERROR", "critic.checkpoint: missing"),
        ("ERROR", "exception ignored in"),
        ("CRITICAL", "uncaught exception"),
        ("CRITICAL", "uncaught exception"),
    ]
    assert [each["level"] for each in found if "old" in each["message"]] == ["WARNING"]
    assert [each["exception"].splitlines()[-1] for each in found[-2:]] == [
        "ZeroDivisionError: division by zero",
        "RuntimeError: the end",
    ]


def test_text_stays_as_it_was() -> None:
    _, lines = run_logging(SCRIPT, "text")
    assert lines[0].endswith(" INFO an info")
    assert "  | warning: from the server" in lines
    assert "error: critic.checkpoint: missing" in lines
    assert lines[-1] == "RuntimeError: the end"


def test_text_is_the_default_and_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert RunSection().log_format == "text"
    say("ready")
    assert capsys.readouterr().out == "ready\n"
