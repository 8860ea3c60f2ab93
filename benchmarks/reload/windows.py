"""Latencies of requests, and silences between answers, in windows of time: (begin, end) in seconds of one clock."""

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
    """float64 `[n]`, seconds."""
    end: np.ndarray
    """float64 `[n]`, seconds, ascending."""
    version: np.ndarray
    """int64 `[n]`, of the weights that answered."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Samples:
        """Return the samples of `start_s`, `latency_ms` and `version`, as result.json has them."""
        start = np.asarray(raw["start_s"], np.float64)
        end = start + np.asarray(raw["latency_ms"], np.float64) / 1e3
        order = np.argsort(end, kind="stable")
        return cls(start[order], end[order], np.asarray(raw["version"], np.int64)[order])

    @property
    def latency_ms(self) -> np.ndarray:
        """float64 `[n]`."""
        return (self.end - self.start) * 1e3

    def within(self, windows: Sequence[Window]) -> Samples:
        """Return the requests that began and ended within one window."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.start >= begin) & (self.end <= end)
        return Samples(self.start[chosen], self.end[chosen], self.version[chosen])

    def in_flight(self, windows: Sequence[Window]) -> np.ndarray:
        """Return latencies (ms) of the requests that were in flight at some moment of some window, each once."""
        chosen = np.zeros(self.start.size, bool)
        for begin, end in windows:
            chosen |= (self.end >= begin) & (self.start <= end)
        return self.latency_ms[chosen]

    def longest_silences(self, windows: Sequence[Window], *, margin_s: float) -> list[float]:
        """Return, for each window widened by `margin_s`, the longest time (ms) between two answers reaching into it.

        Gaps are not cut at the window's edges, so that a pause counts in full. Only meaningful for clients in a closed
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
    """Return as many windows as `like`, each as long as one of them, at random places of the `quiet` windows.

    Windows of equal lengths select requests alike: long requests are more likely to be in flight in any window.
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
