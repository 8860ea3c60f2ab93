"""What leaves a model: text that Triton and terminals can take, one answer for each request, no exception.

What enters it is hidden from other users.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_python_backend_utils import Request

from python_backend.wire.contract import TRAINING_KEY_HEADER, ContractError, texts_array
from python_backend.wire.printable import printable

LONE = "\ud800"


@pytest.fixture
def serving() -> Any:
    """python_backend.serving.triton; Triton's module is the stand-in among the tests."""
    return importlib.import_module("python_backend.serving.triton")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, äöü 漢字 😀", "plain, äöü 漢字 😀"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        (f"a {LONE} b", "a \\ud800 b"),
        ("right \u202e left", "right \\u202e left"),
        ("x" * 11, "x" * 10 + " …"),
    ],
)
def test_texts_are_made_printable(text: str, shown: str) -> None:
    assert printable(text, limit=60 if text[0] != "x" else 10) == shown
    assert shown.encode()


@pytest.mark.parametrize("error", [ContractError(f"messages: {LONE}"), KeyError(LONE), RuntimeError("x" * 100_000)])
def test_an_error_of_any_text_is_sent_and_does_not_leave_execute(serving: Any, error: Exception) -> None:
    def handle(call: Any) -> None:
        raise error

    requests = [Request({}, ()), Request({}, ())]
    serving.answer_each([*map(serving.Call, requests)], handle)
    for request in requests:
        sent = request.responses.get_nowait().error
        assert sent is not None
        assert len(sent.encode()) < 5000
        assert "\\ud800" in sent or "xxx" in sent


def test_a_request_is_answered_once(serving: Any) -> None:
    request = Request({}, ("rewards",))

    def handle(call: Any) -> None:
        call.answer({"rewards": np.zeros((1, 1), np.float32)})
        raise RuntimeError("after the answer")

    serving.answer_each([serving.Call(request)], handle)
    assert request.responses.get_nowait().error is None
    assert request.responses.empty()


def test_a_sender_that_fails_raises_nothing(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to send response. Response sender has been closed.")

    monkeypatch.setattr(Request, "send", refuse)
    serving.answer_each([serving.Call(Request({}, ()))], lambda call: call.answer({}))


def test_an_answer_that_could_not_be_sent_becomes_an_error(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Request.send

    def once(*_: object, **__: object) -> None:
        monkeypatch.setattr(Request, "send", send)
        raise MemoryError("/dev/shm is full")

    monkeypatch.setattr(Request, "send", once)
    request = Request({}, ())
    serving.answer_each([serving.Call(request)], lambda call: call.answer({}))
    assert request.responses.get_nowait().error == "INTERNAL: MemoryError: /dev/shm is full"
    assert request.responses.empty()


def test_control_sequences_in_text_outputs_are_escaped(serving: Any) -> None:
    request = Request({}, ("reward_errors",))
    errors = texts_array(["\x1b[31mred", "", f"{LONE}"])
    serving.Call(request).answer({"reward_errors": errors})
    sent = request.responses.get_nowait().outputs["reward_errors"]
    assert sent.shape == (3, 1)
    assert sent[:, 0].tolist() == [b"\\x1b[31mred", b"", b"?"]


@pytest.mark.parametrize("value", [5, True, None, 1.5])
def test_a_key_that_is_no_text_is_no_key(serving: Any, value: object) -> None:
    """A client may send parameters of any JSON type in the body, under the header's name."""
    call = serving.Call(Request({}, (), json.dumps({TRAINING_KEY_HEADER: value})))
    assert call.header(TRAINING_KEY_HEADER) is None
    call = serving.Call(Request({}, (), json.dumps({TRAINING_KEY_HEADER.title(): "secret"})))
    assert call.header(TRAINING_KEY_HEADER) == "secret"


HIDE = """
import mmap, sys, tempfile
from pathlib import Path
from python_backend.serving.triton import _hide_requests

library = Path(sys.argv[1]).open("r+b")
with tempfile.NamedTemporaryFile(dir="/dev/shm") as region:
    region.write(bytes(10))
    region.flush()
    Path(region.name).chmod(0o644)
    mapped = [mmap.mmap(file.fileno(), 0) for file in (library, region)]
    _hide_requests()
    print(oct(Path(region.name).stat().st_mode & 0o777))
"""


def test_requests_are_hidden_wherever_libraries_were_loaded_from(tmp_path: Path) -> None:
    """A stub decodes as ASCII, also the names of its libraries' folders."""
    (tmp_path / "übung").write_bytes(b"a library")
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "support" / "stub"), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", HIDE, str(tmp_path / "übung")]
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout == "0o600\n"
