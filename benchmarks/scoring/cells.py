"""Cells of the scoring benchmark (rows per request, concurrency), and the number of requests that each cell sends."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.support.workload import ModelSize

HEADLINE_ROWS, HEADLINE_CONCURRENCY = 1, 64
HEADLINE_FACTOR = 3  # the headline cell is measured longer, since most targets are about it
MOST_ROWS_IN_FLIGHT = 256
CELL_LIMIT = 20  # all contenders together take at most this many times `seconds`, or one request per worker


@dataclass(frozen=True)
class Cell:
    """One point of the sweep, and the number of requests that it sends."""

    rows: int
    """Rows per request."""
    concurrency: int
    num_requests: int

    @property
    def num_rows(self) -> int:
        """Number of rows that the cell sends in all."""
        return self.rows * self.num_requests


@dataclass(frozen=True)
class Pace:
    """Speed of a contender with one-row requests."""

    row_s: float
    """Seconds per row with many requests in flight."""
    serial_row_s: float
    """Seconds per row with one request in flight."""

    def seconds_per_row(self, concurrency: int) -> float:
        """Estimate the seconds per row at this concurrency."""
        return max(self.row_s, self.serial_row_s / concurrency)


def plan_cells(settings: argparse.Namespace, size: ModelSize, paces: Mapping[str, Pace]) -> list[Cell]:
    """Return the cells of one model; each sends as many requests as time allows, the same number to all contenders."""
    return [
        Cell(rows, level, num_requests(rows, level, list(paces.values()), settings.seconds * size.effort))
        for rows in settings.rows
        for level in settings.concurrency
        if (not size.rows or rows in size.rows)
        and (not size.concurrency or level in size.concurrency)
        and rows * level <= MOST_ROWS_IN_FLIGHT
    ]


def num_requests(rows: int, concurrency: int, paces: Sequence[Pace], seconds: float) -> int:
    """Return how many requests a cell sends: two per worker, or as many as take the fastest contender `seconds`.

    The larger number counts, unless all contenders together would then take longer than `CELL_LIMIT` allows.
    """
    seconds *= HEADLINE_FACTOR if (rows, concurrency) == (HEADLINE_ROWS, HEADLINE_CONCURRENCY) else 1
    row_s = [pace.seconds_per_row(rows * concurrency) for pace in paces]
    wanted = max(2 * concurrency, seconds / min(row_s) / rows)
    affordable = CELL_LIMIT * seconds / sum(row_s) / rows
    return max(concurrency, 4, math.ceil(min(wanted, affordable)))
