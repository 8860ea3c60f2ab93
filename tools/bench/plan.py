"""What is measured, and how much of it: settings, the points of the sweep, requests per point.
Given: settings, each contender's pace. Returns: cells, the same for all contenders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.bench.running import Split
from tools.bench.samples import HEADLINE_CONCURRENCY, HEADLINE_ROWS
from tools.bench.trace import ModelSize

CELL_LIMIT = 20  # times the fastest contender's seconds; a cell takes longer only where a request per worker does
HEADLINE_FACTOR = 3  # the cell that most bars are about is measured longer


@dataclass(frozen=True)
class Settings:
    """What a person may change."""

    contenders: list[str]
    rows: list[int]
    concurrency: list[int]
    repeats: int
    seconds: float
    """Aimed at for the fastest contender in one cell."""
    splits: list[Split]
    token_budgets: list[int]
    queue_delay_us: int
    tuned_allocator: bool
    max_rows_under_way: int
    """Points with more, concurrency x rows per request, are left out."""
    scaling_tokens: list[int]
    """Sizes of the run that shows how cost grows; none: left out."""


@dataclass(frozen=True)
class Cell:
    """One point of the sweep."""

    rows: int
    """Rows per request."""
    concurrency: int
    num_requests: int

    @property
    def num_rows(self) -> int:
        """Rows of the trace that it sends."""
        return self.rows * self.num_requests


@dataclass(frozen=True)
class Pace:
    """How fast a contender is with one-row requests: many at once, and one after the other."""

    row_s: float
    """Seconds per row with many requests under way."""
    serial_row_s: float
    """Seconds per row with one request under way."""

    def seconds_per_row(self, concurrency: int) -> float:
        """About what a row takes at this concurrency."""
        return max(self.row_s, self.serial_row_s / concurrency)


def plan_cells(settings: Settings, size: ModelSize, paces: Mapping[str, Pace]) -> list[Cell]:
    """The cells of one model, each with as many requests as time allows, the same for all contenders."""
    settings = dataclasses.replace(settings, seconds=settings.seconds * size.effort)
    return [
        Cell(rows, concurrency, num_requests(rows, concurrency, list(paces.values()), settings))
        for rows in settings.rows
        for concurrency in settings.concurrency
        if (not size.rows or rows in size.rows)
        and (not size.concurrency or concurrency in size.concurrency)
        and rows * concurrency <= settings.max_rows_under_way
    ]


def num_requests(rows: int, concurrency: int, paces: Sequence[Pace], settings: Settings) -> int:
    """Two requests per worker or `seconds` of the fastest contender, fewer where all together would take too long."""
    headline = (rows, concurrency) == (HEADLINE_ROWS, HEADLINE_CONCURRENCY)
    seconds = settings.seconds * (HEADLINE_FACTOR if headline else 1)
    row_s = [pace.seconds_per_row(rows * concurrency) for pace in paces]
    wanted = max(2 * concurrency, seconds / min(row_s) / rows)
    affordable = CELL_LIMIT * seconds / sum(row_s) / rows
    return max(concurrency, 4, math.ceil(min(wanted, affordable)))


def cell_seconds(cell: Cell, paces: Mapping[str, Pace]) -> float:
    """About how long all contenders together take for one round of a cell."""
    return cell.num_rows * sum(pace.seconds_per_row(cell.rows * cell.concurrency) for pace in paces.values())
