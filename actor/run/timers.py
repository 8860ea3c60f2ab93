"""Times the phases of a step, for metrics, traces and timeline.jsonl."""

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_triton.monitoring.tracing import span
from rlhf_triton.store.jsonl import append_jsonl

TIMELINE_FILE = "timeline.jsonl"


class Timers:
    """Durations and time spans of the phases of one step; phases may overlap."""

    def __init__(self, step: int | None = None) -> None:
        self._step = step
        self.spans: list[tuple[str, float, float]] = []  # phase, start, end; `time.monotonic` values
        self._start = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the block to phase `name`, and trace it."""
        start = time.monotonic()
        try:
            with span(name, of_step=self._step):
                yield
        finally:
            self.add_span(name, start, time.monotonic())

    def add_span(self, name: str, start: float, end: float) -> None:
        """Add a span measured elsewhere; `start` and `end` are `time.monotonic` values."""
        self.spans.append((name, start, end))

    def append_spans(self, run_dir: Path) -> None:
        """Append the phases of the step to `TIMELINE_FILE` in `run_dir`; times in seconds since the epoch."""
        epoch = time.time() - time.monotonic()
        lines = (
            {"step": self._step, "phase": name, "start": epoch + start, "end": epoch + end}
            for name, start, end in self.spans
        )
        append_jsonl(run_dir / TIMELINE_FILE, lines)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase as `timers/<name>`, and of the whole step as `timers/step_time`."""
        phases = collections.defaultdict[str, float](float)
        for name, start, end in self.spans:
            phases[name] += end - start
        phases["step_time"] = time.monotonic() - self._start
        return {f"timers/{name}": seconds for name, seconds in phases.items()}
