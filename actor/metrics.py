"""What a run writes about itself: metrics.jsonl, TensorBoard events, samples.jsonl, and how long each phase took.
Given: the run's folder. Returns: files that reports and dashboards read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actor.trackers import Trackers
from python_backend.durable import replace_file

Metric = float | dict[str, int]  # a number, or how often each whole number occurred


@dataclass(frozen=True)
class Text:
    """A row of the table that people read to see what the rewards mean."""

    step: int
    prompt: str
    response: str
    reward: float | None  # None: unavailable


class Timers:
    """Seconds per phase of one step, as `timers/<name>`; phases may overlap. When each began and ended goes along."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []  # phase, begin, end; seconds since the epoch
        self._start = time.monotonic()
        self._epoch = time.time() - self._start

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.note(name, start, time.monotonic())

    def note(self, name: str, start: float, end: float) -> None:
        """Add what was measured elsewhere, by `time.monotonic`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        self.spans.append((name, self._epoch + start, self._epoch + end))

    def include(self, other: Timers) -> None:
        """Take in the phases of another part of the step."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.spans += other.spans

    def metrics(self) -> dict[str, float]:
        """All phases, and the whole step as `timers/step_time`."""
        phases = {**self.seconds, "step_time": time.monotonic() - self._start}
        return {f"timers/{name}": value for name, value in phases.items()}


class MetricsLog:
    """metrics.jsonl, TensorBoard events and trackers of one run; a resumed run drops the lines of steps it repeats."""

    def __init__(self, run_dir: Path, *, first_step: int, trackers: Trackers | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        drop_steps_from(first_step, self._path)
        self._trackers = trackers
        self._texts_path = run_dir / "rollouts.jsonl"
        drop_steps_from(first_step, self._texts_path)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """One line, and one point per curve."""
        append_jsonl(self._path, [{"step": step, "time": time.time(), **metrics}])
        self.chart(metrics, step)

    def chart(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Points for TensorBoard and the trackers alone; counts become a histogram."""
        for name, value in metrics.items():
            if isinstance(value, dict):
                self._board.add_histogram(name, np.repeat(list(map(int, value)), list(value.values())), step)
            else:
                self._board.add_scalar(name, value, step)
        self._board.flush()
        if self._trackers is not None:
            self._trackers.log({name: value for name, value in metrics.items() if not isinstance(value, dict)}, step)

    def add_texts(self, texts: Sequence[Text]) -> None:
        """Rows of rollouts.jsonl, of TensorBoard's texts and of the trackers' tables."""
        append_jsonl(self._texts_path, map(asdict, texts))
        for i, text in enumerate(texts):
            shown = f"reward {text.reward}\n\n**{text.prompt}**{text.response}"
            self._board.add_text(f"train_rollouts/text_{i}", shown, text.step)
        if self._trackers is not None and texts:
            self._trackers.add_texts([asdict(text) for text in texts])

    def close(self) -> None:
        """Finish the event file, and the trackers."""
        self._board.close()
        if self._trackers is not None:
            self._trackers.finish()


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one by one: those of a run of months are more than memory should hold.

    A last line cut short by a crash is left out, a missing file is empty.
    """
    for line, _ in _parsed_lines(path):
        yield line


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """As `each_line`, of a small file."""
    return list(each_line(path))


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace `path` by one JSON object a line."""
    replace_file(path, map(_line, lines))


def append_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add one JSON object a line."""
    with path.open("ab") as file:
        file.writelines(map(_line, lines))


def drop_steps_from(first_step: int, path: Path) -> None:
    """Leave out the lines of steps that a resumed run repeats; makes the file if there is none."""
    replace_file(path, (raw for line, raw in _parsed_lines(path) if line["step"] < first_step))


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _parsed_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each object, and its line as it stands in the file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                yield json.loads(raw), raw if raw.endswith(b"\n") else raw + b"\n"
            except ValueError:  # cut short, perhaps within a letter
                if file.read().strip():  # and not the last one
                    raise
