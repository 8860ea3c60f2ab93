"""What a run is doing, live in a terminal; one plain line per step where the output is no terminal.
Given a run folder whose metrics.jsonl and critic_metrics.jsonl other processes are writing.
Returns nothing: `phase`, `log` and `refresh` show; what is printed meanwhile stays above the display.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tools.jsonl_tail import JsonlTail
from tools.report_data import PHASES, number, phase_seconds

BLOCKS = "▁▂▃▄▅▆▇█"
PHASE_STYLES = dict(
    zip(PHASES.values(), ("blue", "cyan", "green", "magenta", "red", "yellow", "white"), strict=True)
)
SPARKLINE_WIDTH = 24
PLAIN_LINES = 100  # at most about so many steps are printed where there is no terminal
ETA_STEPS = 20


class RunDisplay:
    """A context manager; call `refresh` a few times a second while it is open."""

    def __init__(self, run_dir: Path, total_steps: int, *, console: Console | None = None) -> None:
        # Decided here, since rich would also believe a FORCE_COLOR of a CI machine.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._metrics = JsonlTail(Path(run_dir) / "metrics.jsonl")
        self._critic_metrics = JsonlTail(Path(run_dir) / "critic_metrics.jsonl")
        self._total = total_steps
        self._every = max(1, round(total_steps / PLAIN_LINES))
        self._rows: dict[int, dict[str, Any]] = {}
        self._reloads: dict[str, dict[str, Any]] = {}
        self._num_reloads: Counter[str] = Counter()
        self._start = self._phase_start = time.monotonic()
        self._phase = ""
        self._spinner = Spinner("dots")

    def __enter__(self) -> "RunDisplay":
        self._read()  # what an earlier part of a resumed run wrote is no news
        if self._is_live:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                redirect_stderr=sys.stderr.isatty(),  # one that goes to a file keeps going there
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        if self._live is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # a line without its end would be lost with rich's proxy
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Says what happens now; the phase before is ticked off with its seconds."""
        seconds = time.monotonic() - self._phase_start
        if self._is_live and self._phase:
            self.log(f"✓ {self._phase} ({seconds:.1f} s)")
        elif not self._is_live:
            self.log(f"[{_clock(time.monotonic() - self._start)}] {text}")
        self._phase, self._phase_start = text, time.monotonic()
        self._spinner.update(text=Text(text))

    def log(self, text: str) -> None:
        """Prints a line that stays."""
        if self._is_live:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def refresh(self) -> None:
        """Takes in what the actor and the sidecar wrote since the last call."""
        for row in self._read():
            step = row["step"]
            if not self._is_live and (step % self._every == 0 or step in (1, self._total)):
                self.log(self._plain_line(row))

    def _read(self) -> list[dict[str, Any]]:
        for row in self._critic_metrics.read_new():
            kind = row.get("reload")
            if kind:
                self._reloads[kind] = row
                self._num_reloads[kind] += 1
        rows = [row for row in self._metrics.read_new() if isinstance(row.get("step"), int)]
        # A new dict, since rich's thread may be drawing from the old one.
        self._rows = self._rows | {row["step"]: row for row in rows}
        return rows

    def _last(self) -> dict[str, Any]:
        return self._rows[max(self._rows)] if self._rows else {}

    def _eta(self) -> str:
        """Counts wall time between lines: saves and waits between the steps are part of it."""
        rows = [self._rows[step] for step in sorted(self._rows)[-ETA_STEPS - 1 :]]
        if not rows:
            return "-"
        steps = rows[-1]["step"] - rows[0]["step"]
        per_step = (
            (rows[-1]["time"] - rows[0]["time"]) / steps if steps else number(rows[0].get("timers/step_time"))
        )
        return "-" if per_step is None else _clock(per_step * (self._total - rows[-1]["step"]))

    def _plain_line(self, row: dict[str, Any]) -> str:
        parts = [
            f"step {row['step']}/{self._total}",
            *(f"{name} {text}" for name, text in self._figures(row)),
        ]
        return "  ".join([*parts, f"{_format(row, 'timers/step_time', '.1f')} s", f"ETA {self._eta()}"])

    def _figures(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """What both displays say, in this order."""
        return [
            ("reward", _format(row, "train_rollouts/rewards", "+.3f")),
            ("KL", _format(row, "train_rollouts/init_policy_kl_per_sequence", ".2f")),
            ("tokens/s", _format(row, "tokens_per_s", ",.0f")),
            ("weights version", _format(self._newest_reload(row), "weights_version", ".0f")),
            ("swap ms", _format(self._reloads.get("swap", {}), "reload_ms", ",.0f")),
            ("triton reload ms", _format(self._reloads.get("triton", {}), "reload_ms", ",.0f")),
            ("failed requests", _format(row, "client/failed_requests", ".0f")),
        ]

    def _newest_reload(self, row: dict[str, Any]) -> dict[str, Any]:
        served = max(self._reloads.values(), key=lambda reload: reload["time"], default=None)
        return served or {"weights_version": row.get("train_rollouts/weights_version")}

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = [self._head()]
        if self._rows:
            lines += [self._progress(), Text(), self._table(self._last()), Text(), *_step_time(self._last())]
        return Panel(
            Group(*lines), title="PPO on Triton", title_align="left", border_style="blue", padding=(0, 1)
        )

    def _head(self) -> RenderableType:
        head = Table.grid(expand=True)
        head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right")
        head.add_row(self._spinner, Text(_clock(time.monotonic() - self._start), style="dim"))
        return head

    def _progress(self) -> RenderableType:
        step = max(self._rows)
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(f"step {step}/{self._total}", ProgressBar(self._total, step), f"ETA {self._eta()}")
        return bar

    def _table(self, row: dict[str, Any]) -> RenderableType:
        figures = dict(self._figures(row))
        rewards = [number(r.get("train_rollouts/rewards")) for _, r in sorted(self._rows.items())]
        failed = figures["failed requests"]
        extras = {
            "reward": Text(sparkline([r for r in rewards if r is not None]), style="blue"),
            "KL": Text("nats/sequence", style="dim"),
            "weights version": Text(
                f"{self._num_reloads['swap']} swaps, {self._num_reloads['triton']} triton", style="dim"
            ),
            "triton reload ms": Text(str(self._reloads.get("triton", {}).get("reason", "")), style="dim"),
        }
        cells = [
            (Text(name, style="dim"), Text(text, style="bold"), extras.get(name, Text("")))
            for name, text in figures.items()
        ]
        cells[-1][1].stylize("bold green" if failed in ("0", "-") else "bold red")
        explains = _format(row, "train_rollouts/explained_variance", ".2f")
        cells.insert(3, (Text("critic explains", style="dim"), Text(explains, style="bold"), Text("")))
        grid = Table.grid(padding=(0, 2, 0, 0))
        for left, right in zip(cells[:4], cells[4:], strict=True):
            grid.add_row(*left, *right)
        return grid


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Returns the values as blocks, at most `width` of them: means where there are more values."""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BLOCKS[round((mean - low) / span * 7) if span else 3] for mean in means)


def _step_time(row: dict[str, Any]) -> list[RenderableType]:
    """A bar cut by phase, and what its colours mean."""
    seconds = {name: value for name, value in phase_seconds(row).items() if value > 0}
    total = sum(seconds.values())
    if not total:
        return []
    bar, legend = Text(), Text()
    for name, value in seconds.items():
        bar.append("━" * round(48 * value / total), style=PHASE_STYLES[name])
        legend.append("■ ", style=PHASE_STYLES[name]).append(f"{name} {value:.2f}   ")
    return [Text.assemble((f"{_format(row, 'timers/step_time', '.1f')} s per step  ", "dim"), bar), legend]


def _format(row: dict[str, Any], key: str, spec: str) -> str:
    value = number(row.get(key))
    return "-" if value is None else format(value, spec)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
