"""Live display of a run in a terminal; where there is no terminal, prints plain lines.

Follows metrics.jsonl and critic_metrics.jsonl; text printed meanwhile stays above the display.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rlhf_triton.store.jsonl import NewLines
from rlhf_triton.store.run_lock import RUN_LOCK_FILE
from rlhf_triton.tools.report.data import (
    COMPONENT,
    PHASES,
    SHOWN_S,
    Thinned,
    components,
    formatted,
    number,
    phase_seconds,
)

BLOCKS = "▁▂▃▄▅▆▇█"
PHASE_STYLES = dict(zip(PHASES.values(), ("blue", "cyan", "green", "magenta", "red", "yellow", "white"), strict=True))
SPARKLINE_WIDTH = 24
NARROW_WIDTH = 66  # columns that the display needs beside the sparkline; with fewer, one figure a line
PLAIN_LINES = 100  # without a terminal, about this many lines are printed, one step each
ETA_STEPS = 20  # steps whose intervals the estimate uses


class RunDisplay:
    """Context manager that displays a run; call `refresh` a few times a second while it is open."""

    def __init__(self, run_dir: Path, total_steps: int, *, console: Console | None = None) -> None:
        # Decided here, since rich would also obey FORCE_COLOR on a CI machine.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._phase_file = Path(run_dir) / RUN_LOCK_FILE
        self._metrics = NewLines(Path(run_dir) / "metrics.jsonl")
        self._critic_metrics = NewLines(Path(run_dir) / "critic_metrics.jsonl")
        self._validations = NewLines(Path(run_dir) / "validations.jsonl")
        self._total = total_steps
        self._every = max(1, round(total_steps / PLAIN_LINES))
        self._recent: tuple[dict[str, Any], ...] = ()  # the last steps
        self._rewards = Thinned[float]()  # of all steps
        self._reloads: dict[str, dict[str, Any]] = {}
        self._num_reloads: Counter[str] = Counter()
        self._resumed_at = 0
        self._validated = -1  # step of the newest validation
        self._start = self._phase_start = time.monotonic()
        self._phase = ""
        self._mark: RenderableType = Spinner("dots")

    def __enter__(self) -> "RunDisplay":
        for row in self._read():  # steps from before a resume are not reported again
            self._resumed_at = row["step"]
        for _ in self._new_validations():
            pass
        if self._is_live:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                redirect_stderr=sys.stderr.isatty(),  # leave a redirected stderr alone
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.refresh()
        finally:
            if self._live is not None:
                stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
                self._mark = Text("✗", style="red") if kind and not stopped else Text("✓", style="green")
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()  # rich's proxy would lose an unfinished line
                self._live.stop()
                self._live = None

    def phase(self, text: str) -> None:
        """Show the phase that begins now; in a terminal, log the previous phase as done, with its seconds."""
        seconds = time.monotonic() - self._phase_start
        if self._is_live and self._phase:
            self.log(f"✓ {self._phase} ({seconds:.1f} s)")
        elif not self._is_live:
            self.log(f"[{_clock(time.monotonic() - self._start)}] {text}")
        self._phase, self._phase_start = text, time.monotonic()
        self._phase_file.write_text(text)  # for `rlhf-triton status`

    def log(self, text: str) -> None:
        """Print a line, which stays above the display."""
        if self._is_live:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def refresh(self) -> None:
        """Read the metrics that the actor and the sidecar have written since the last call; print lines if not live."""
        for row in self._read():
            step = row["step"]
            if not self._is_live and (step % self._every == 0 or step in (1, self._total)):
                self.log(self._plain_line(row))
        for line in self._new_validations():
            figures = [_format(line, "reward", "+.3f") or "unavailable", _format(line, "kl", ".2f", " nats of KL")]
            self.log(f"validation at step {line['step']}: reward {', '.join(filter(None, figures))}")

    def _new_validations(self) -> Iterator[dict[str, Any]]:
        """Yield the validations of later steps than any before; a run that resumes writes their file anew."""
        for line in self._validations.read_objects():
            if line["step"] > self._validated:
                self._validated = line["step"]
                yield line

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of new steps; each is part of the displayed state before it is yielded."""
        # rich's thread may be drawing from these objects: they are replaced or appended to, never changed otherwise.
        for row in self._critic_metrics.read_objects():
            kind = row.get("reload")
            if kind:
                self._reloads = self._reloads | {kind: row}
                self._num_reloads[kind] += 1
        known = 0
        for row in self._metrics.read_objects():
            step = row.get("step")
            if not isinstance(step, int):
                continue
            last = self._last().get("step", 0)
            if step <= last:  # a resumed run has rewritten the file
                known, self._recent, self._rewards = last, (row,), Thinned()
            else:
                self._recent = (*self._recent[-ETA_STEPS:], row)
            if (reward := number(row.get("train_rollouts/rewards"))) is not None:
                self._rewards.add(reward)
            if step > known:
                yield row

    def _last(self) -> dict[str, Any]:
        return self._recent[-1] if self._recent else {}

    def _eta(self) -> str:
        """Return the time left, from the median interval between the latest steps; ignores pauses before a resume."""
        rows = self._recent
        if not rows:
            return "-"
        new = [row for row in rows if row["step"] > self._resumed_at]
        gaps = [after["time"] - before["time"] for before, after in pairwise(new)]
        per_step = statistics.median(gaps) if gaps else number(rows[-1].get("timers/step_time"))
        return "-" if per_step is None else _clock(per_step * (self._total - rows[-1]["step"]))

    def _plain_line(self, row: dict[str, Any]) -> str:
        figures = (f"{name} {text}" for name, text in self._figures(row))
        parts = [f"step {row['step']}/{self._total}", *figures, _format(row, "timers/step_time", ".1f", " s")]
        return "  ".join([*parts, f"ETA {self._eta()}"])

    def _figures(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """Return (name, text) of the figures that the live display and the plain lines show, in order."""
        swap, triton = (self._reloads.get(kind, {}) for kind in ("swap", "triton"))
        newest = max((swap, triton), key=lambda reload: reload.get("time", 0.0))
        served = newest or {"weights_version": row.get("train_rollouts/weights_version")}
        figures = [
            ("reward", _format(row, "train_rollouts/rewards", "+.3f")),
            *((name, _format(row, f"{COMPONENT}{name}", "+.3f")) for name in components([row])),
            ("useful prompts", _format(row, "train_rollouts/useful_prompts", ".0%")),
            ("KL", _format(row, "train_rollouts/init_policy_kl_per_sequence", ".2f")),
            ("tokens/s", _format(row, "tokens_per_s", ",.0f")),
            ("critic explains", _format(row, "train_rollouts/explained_variance", ".2f")),
            ("weights version", _format(served, "weights_version", ".0f")),
            ("swap reload", _format(swap, "reload_ms", ",.0f", " ms")),
            ("triton reload", _format(triton, "reload_ms", ",.0f", " ms")),
            ("failed requests", _format(row, "client/failed_requests", ".0f")),
        ]
        return [(name, text) for name, text in figures if text]  # a run without a critic has no critic figures

    def _render(self) -> RenderableType:
        clock = Text(_clock(time.monotonic() - self._start), style="dim")
        lines = [_line(self._mark, Text(self._phase), clock)]
        if row := self._last():
            step, bar = row["step"], ProgressBar(self._total, row["step"])
            lines += [_line(f"step {step}/{self._total}", bar, f"ETA {self._eta()}"), Text()]
            lines += [self._table(row), Text(), *_step_time(row)]
        return Panel(Group(*lines), title="RLHF on Triton", title_align="left", border_style="blue", padding=(0, 1))

    def _table(self, row: dict[str, Any]) -> RenderableType:
        width = min(SPARKLINE_WIDTH, max(4, self._console.width - NARROW_WIDTH))
        extras = {
            "reward": Text(sparkline(self._rewards.rows, width), style="blue"),
            "KL": Text("nats/sequence", style="dim"),
            "swap reload": Text(f"×{self._num_reloads['swap']}", style="dim"),
            "triton reload": Text(f"×{self._num_reloads['triton']}", style="dim"),
        }
        cells = []
        for name, text in self._figures(row):
            style = "bold red" if name == "failed requests" and text != "0" else "bold"
            cells.append((Text(name, style="dim"), Text(text, style=style), extras.get(name, Text())))
        pairs = 2 if self._console.width >= NARROW_WIDTH else 1
        widest = max(text.cell_len for _, text, _ in cells)  # a figure is whole, whatever else is cut
        columns = [Column(no_wrap=True, min_width=minimum) for _ in range(pairs) for minimum in (None, widest, None)]
        grid = Table.grid(*columns, padding=(0, 2, 0, 0))
        rows = -(-len(cells) // pairs)
        for parts in zip_longest(cells[:rows], cells[rows:], fillvalue=()):
            grid.add_row(*(cell for part in parts for cell in part))
        return grid


def _line(left: RenderableType, middle: RenderableType, right: RenderableType) -> RenderableType:
    """Return a line whose middle takes the room that both sides leave."""
    wide = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid = Table.grid(Column(no_wrap=True), wide, Column(no_wrap=True), padding=(0, 1, 0, 0), expand=True)
    grid.add_row(left, middle, right)
    return grid


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Return the values as at most `width` block characters; if there are more values, each character shows a mean."""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BLOCKS[round((mean - low) / span * 7) if span else 3] for mean in means)


def _step_time(row: dict[str, Any]) -> list[RenderableType]:
    """Return a bar of the phases of a step, and its legend; [] for a step without timers."""
    seconds = {name: value for name, value in phase_seconds(row).items() if value >= SHOWN_S}
    total = sum(seconds.values())
    if not total:
        return []
    bar, legend = Text(), []
    for name, value in seconds.items():
        bar.append("━" * round(48 * value / total), style=PHASE_STYLES[name])
        legend.append(Text.assemble(("■", PHASE_STYLES[name]), f" {name} {value:.2f}"))
    head = Text(_format(row, "timers/step_time", ".1f", " s per step  "), style="dim")
    return [head.append_text(bar), Columns(legend, padding=(0, 2))]


def _format(row: dict[str, Any], key: str, spec: str, unit: str = "") -> str:
    value = number(row.get(key))
    return "" if value is None else formatted(value, spec) + unit


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
