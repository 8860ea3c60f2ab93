"""Latencies of requests, and silences between answers, in time windows: (begin, end) in seconds on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Window = tuple[float, float]


@dataclass(frozen=True)
class Samples:
    """Answered requests, in the order of their answers."""

    start: np.ndarray
    """float64 `[n]`, time of sending in seconds."""
    end: np.ndarray
    """float64 `[n]`, time of the answer in seconds, ascending."""
    version: np.ndarray
    """int64 `[n]`, version of the weights that computed the answer."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Samples:
        """Return the samples for `start_s`, `latency_ms` and `version` in `raw`, as stored in result.json."""
        start = np.asarray(raw["start_s"], np.float64)
        end = start + np.asarray(raw["latency_ms"], np.float64) / 1e3
        order = np.argsort(end, kind="stable")
        return cls(start[order], end[order], np.asarray(raw["version"], np.int64)[order])

    @property
    def latency_ms(self) -> np.ndarray:
        """Latency of each request in ms, float64 `[n]`."""
        return (self.end - self.start) * 1e3

    def within(self, windows: Sequence[Window]) -> Samples:
        """Return the requests that began and ended within the same window."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.start >= begin) & (self.end <= end)
        return Samples(self.start[chosen], self.end[chosen], self.version[chosen])

    def in_flight(self, windows: Sequence[Window]) -> np.ndarray:
        """Return the latency (ms) of each request that was in flight at any moment of any window, each request once."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.end >= begin) & (self.start <= end)
        return self.latency_ms[chosen]

    def longest_silences(self, windows: Sequence[Window], *, margin_s: float) -> list[float]:
        """Return the longest time (ms) between successive answers that overlaps each window, widened by `margin_s`.

        Gaps are not cut at the window's edges, so that a pause counts in full. Meaningful only for clients in a closed
        loop, which have a request in flight at any time.
        """
        return [self._silence_ms(begin - margin_s, end + margin_s) for begin, end in windows]

    def _silence_ms(self, begin: float, end: float) -> float:
        first = max(0, int(np.searchsorted(self.end, begin)) - 1)
        last = int(np.searchsorted(self.end, end, side="right"))
        between = np.diff(self.end[first : last + 1])
        return float(between.max() * 1e3) if between.size else 0.0


def p99(latencies: np.ndarray) -> float | None:
    """Return the 99th percentile; None for an empty array."""
    return float(np.percentile(latencies, 99)) if latencies.size else None


def quiet_windows(like: Sequence[Window], quiet: Sequence[Window], *, margin_s: float, seed: int = 0) -> list[Window]:
    """Return, for each window in `like`, one of the same length at a random place within the `quiet` windows.

    A window that fits nowhere is left out. The lengths must be equal: long requests are more likely to be in flight in
    a window, and how much more depends on its length.
    """
    generator = np.random.default_rng(seed)
    found = []
    for begin, end in like:
        length = end - begin
        rooms = [(b + margin_s, e - margin_s - length) for b, e in quiet if e - b > length + 2 * margin_s]
        if not rooms:
            continue
        sizes = np.asarray([e - b for b, e in rooms])
        room = rooms[int(generator.choice(len(rooms), p=sizes / sizes.sum()))]
        start = float(generator.uniform(*room))
        found.append((start, start + length))
    return found


def ratio(one: float | None, other: float | None) -> float | None:
    """Return `one / other`; None if either is None or `other` is 0."""
    return one / other if one is not None and other else None
