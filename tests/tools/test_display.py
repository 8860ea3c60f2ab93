"""`tools.report.display` in a terminal and without one, and the reader that follows a file being written.
Given files that grow here as the actor's and the sidecar's do.
"""

import gc
import io
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from python_backend.store.jsonl import JsonlTail
from tools.report.data import MOST_DRAWN, Thinned
from tools.report.display import RunDisplay, sparkline


def step_row(step: int, **more: float) -> dict[str, Any]:
    return {
        "step": step,
        "time": 100.0 + 2 * step,
        "train_rollouts/rewards": 0.1 * step,
        "train_rollouts/init_policy_kl_per_sequence": 0.5,
        "tokens_per_s": 1234.5,
        "client/failed_requests": 0,
        "timers/generate": 1.0,
        "timers/train_time": 0.5,
        "timers/step_time": 2.0,
        **more,
    }


def append(path: Path, *rows: dict[str, Any], torn: str = "") -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + torn)


SWAP = {"step": 1, "time": 103.0, "weights_version": 1, "reload": "swap", "reload_ms": 12.4}
TRITON = {
    "step": 1,
    "time": 104.0,
    "weights_version": 1,
    "reload": "triton",
    "reload_ms": 2345.0,
    "reason": "save",
}


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ={"TERM": "xterm"})


def last_frame(display: RunDisplay, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, _environ={})
    console.print(display._render())
    return console.file.getvalue().splitlines()


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some CI machines do
    with RunDisplay(tmp_path, 4) as display:
        display.phase("starting [bold]tritonserver[/bold]")
        display.refresh()  # no file yet
        append(tmp_path / "critic_metrics.jsonl", SWAP, TRITON)
        append(tmp_path / "metrics.jsonl", step_row(1), step_row(2), torn='{"step": 3, ')
        print("a message")
        display.refresh()
        display.log("another")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.splitlines()[:2] == ["[0:00] starting [bold]tritonserver[/bold]", "a message"]
    first, second = out.splitlines()[2:4]
    assert first.startswith("step 1/4  reward +0.100  KL 0.50  tokens/s 1,234  weights version 1  swap reload 12 ms")
    assert "swap reload 12 ms  triton reload 2,345 ms  failed requests 0  2.0 s  ETA 0:04" in second
    assert out.splitlines()[4:] == ["another"]


def test_the_eta_of_a_resumed_run_knows_no_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append(tmp_path / "metrics.jsonl", step_row(1))
    with RunDisplay(tmp_path, 4) as display:
        append(tmp_path / "metrics.jsonl", step_row(2) | {"time": 10_000.0})
        display.refresh()
        append(tmp_path / "metrics.jsonl", step_row(3) | {"time": 10_003.0})
    second, third = capsys.readouterr().out.splitlines()
    assert second.endswith("2.0 s  ETA 0:04")
    assert third.endswith("2.0 s  ETA 0:03")


OF_THE_CRITIC = ("critic", "version", "reload", "×", "waiting for", " -")


def test_a_run_without_a_critic_has_no_words_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunDisplay(tmp_path, 4) as display:
        append(tmp_path / "metrics.jsonl", step_row(1, **{"timers/score_wait": 0.001}))
        display.refresh()
        frame = "\n".join(last_frame(display, 80))
    line = "step 1/4  reward +0.100  KL 0.50  tokens/s 1,234  failed requests 0  2.0 s  ETA 0:06"
    assert capsys.readouterr().out.splitlines() == [line]
    assert "failed requests" in frame
    assert not [word for word in OF_THE_CRITIC if word in frame]


def test_a_kl_that_rounds_to_0_has_no_minus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunDisplay(tmp_path, 1) as display:
        append(
            tmp_path / "metrics.jsonl",
            step_row(1, **{"train_rollouts/init_policy_kl_per_sequence": -0.003, "train_rollouts/rewards": -0.0002}),
        )
        display.refresh()
    assert "reward +0.000  KL 0.00" in capsys.readouterr().out


def test_many_steps_print_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunDisplay(tmp_path, 1000) as display:
        append(tmp_path / "metrics.jsonl", *(step_row(k) for k in range(1, 1001)))
        display.refresh()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 101
    assert lines[-1].startswith("step 1000/1000")


def test_what_a_resumed_run_finds_is_not_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append(tmp_path / "metrics.jsonl", step_row(1), step_row(2))
    with RunDisplay(tmp_path, 4):
        append(tmp_path / "metrics.jsonl", step_row(3))  # read on leaving, at the latest
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["step 3/4"]


def test_a_resumed_actor_writes_the_file_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    append(tmp_path / "metrics.jsonl", *(step_row(k) for k in range(1, 6)))
    with RunDisplay(tmp_path, 8) as display:
        append(tmp_path / "new", *(step_row(k) for k in range(1, 4)))  # steps 4 and 5 are repeated
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
        display.refresh()
        append(tmp_path / "metrics.jsonl", step_row(4))
        display.refresh()
        frame = "\n".join(last_frame(display, 80))
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["step 4/8"]
    assert "step 4/8" in frame


def held_bytes(display: RunDisplay, folder: Path, steps: range) -> int:
    """What the display keeps when it has shown these steps, in bytes of Python objects."""
    for step in steps:
        append(folder / "metrics.jsonl", step_row(step))
        display.refresh()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(steps.stop, steps.stop + 1000):
        append(folder / "metrics.jsonl", step_row(step))
        display.refresh()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def test_a_run_of_months_takes_no_more_memory_than_one_of_hours(tmp_path: Path):
    with RunDisplay(tmp_path, 10**6) as display:
        tracemalloc.start()
        try:
            grown = held_bytes(display, tmp_path, range(1, 1001))
        finally:
            tracemalloc.stop()
        assert grown < 100_000, "a thousand steps more"
        assert "step 2000/1000000" in "\n".join(last_frame(display, 80))


def test_the_curve_of_a_run_of_months_keeps_its_shape():
    curve = Thinned[float]()
    for value in range(100_000):
        curve.add(float(value))
    assert len(curve.rows) <= MOST_DRAWN
    assert sparkline(curve.rows, 8) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("width", [80, 120])
def test_terminal_frame(tmp_path: Path, width: int):
    append(tmp_path / "metrics.jsonl", *(step_row(k) for k in range(1, 51)))
    append(tmp_path / "critic_metrics.jsonl", SWAP, TRITON)
    with RunDisplay(tmp_path, 75, console=terminal(width)) as display:
        display.phase("PPO, and a phase whose text is far too long for the line that it has to stand in" * 2)
        frame = last_frame(display, width)
    assert {len(line) for line in frame} == {width}
    text = "\n".join(frame)
    # 25 steps of 2 s are left.
    for expected in (
        "step 50/75",
        "ETA 0:50",
        "+5.000",
        "1,234",
        "12 ms",
        "2,345 ms",
        "×1",
        "failed requests",
        "█",
    ):
        assert expected in text
    assert "generate 1.00" in text
    assert "other 0.50" in text


def test_nothing_printed_meanwhile_is_lost(tmp_path: Path):
    console = terminal()
    with RunDisplay(tmp_path, 3, console=console) as display:
        display.phase("preparing")
        print("to stdout")
        display.log("logged [red]as it is[/red]")
        display.phase("PPO")
        append(tmp_path / "metrics.jsonl", step_row(1))
        display.refresh()
        kept = sys.stdout  # as a logging handler does; else garbage collection would flush it
        print("without an end", end="")
    out = console.file.getvalue()
    for expected in (
        "to stdout",
        "logged [red]as it is[/red]",
        "✓ preparing (",
        "without an end",
        "step 1/3",
    ):
        assert expected in out
    assert out.rindex("without an end") < out.rindex("╰")  # above the last frame, not after it
    assert hasattr(kept, "rich_proxied_file")
    assert not hasattr(sys.stdout, "rich_proxied_file")


def test_an_error_leaves_a_usable_terminal(tmp_path: Path):
    console = terminal()

    def die() -> None:
        with RunDisplay(tmp_path, 3, console=console) as display:
            display.phase("PPO")
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        die()
    assert "✗" in console.file.getvalue()
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_failed_requests_stand_out(tmp_path: Path):
    append(tmp_path / "metrics.jsonl", step_row(1, **{"client/failed_requests": 3}))
    display = RunDisplay(tmp_path, 3, console=terminal())
    display.refresh()
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(display._render())
    assert "\x1b[1;31m3" in console.file.getvalue()


def test_tail_waits_for_the_end_of_a_line(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert list(tail.read_new()) == []
    append(path, {"a": 1}, torn='{"a": ')
    assert list(tail.read_new()) == [{"a": 1}]
    assert list(tail.read_new()) == []
    with path.open("a") as file:
        file.write("2}\n[3]\nno json\n")
    assert list(tail.read_new()) == [{"a": 2}]


def test_tail_follows_a_file_that_was_replaced_or_cut(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    append(path, {"a": 1}, {"a": 2})
    tail = JsonlTail(path)
    assert next(tail.read_new()) == {"a": 1}
    assert next(tail.read_new()) == {"a": 2}, "what was not taken comes next"
    append(tmp_path / "new", {"a": 1}, {"a": 2}, {"a": 3})
    (tmp_path / "new").replace(path)
    assert list(tail.read_new()) == [{"a": 1}, {"a": 2}, {"a": 3}]
    path.write_text('{"a": 4}\n')
    assert list(tail.read_new()) == [{"a": 4}]


def test_sparkline():
    assert sparkline([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0, 7.0, 7.0], width=2) == "▁█"
