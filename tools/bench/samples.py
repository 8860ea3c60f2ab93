"""The samples of a sweep by point and round, and what each says.
Given: samples, as in result.json. Returns: medians over rounds, ratios within them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Sample = dict[str, Any]
HEADLINE_ROWS, HEADLINE_CONCURRENCY = 1, 64
Point = tuple[str, int, int]  # model, rows per request, concurrency


class Rounds:
    """The sweep's samples by point, contender and repeat."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by: dict[Point, dict[str, dict[int, Sample]]] = {}
        for sample in samples:
            if sample["purpose"] == "sweep":
                point = (sample["model"], sample["rows"], sample["concurrency"])
                self._by.setdefault(point, {}).setdefault(sample["contender"], {})[sample["repeat"]] = sample

    @property
    def points(self) -> list[Point]:
        """Every point that was measured, small models first."""
        return sorted(self._by, key=lambda point: (model_size(point[0]), *point[1:]))

    def contenders(self, point: Point) -> list[str]:
        """Who was measured there."""
        return list(self._by.get(point, {}))

    def samples(self, point: Point, contender: str) -> list[Sample]:
        """A contender's samples at a point, by repeat."""
        return [sample for _, sample in sorted(self._by.get(point, {}).get(contender, {}).items())]

    def median(self, point: Point, contender: str, value: Callable[[Sample], float | None]) -> float | None:
        """The median over the repeats, of those that have the value."""
        return median_of(value(sample) for sample in self.samples(point, contender))

    def matched(self, point: Point, one: str, other: str, compare: Callable[[Sample, Sample], float]) -> list[float]:
        """`compare(sample of one, sample of other)` for each repeat that has both."""
        at = self._by.get(point, {})
        ones, others = at.get(one, {}), at.get(other, {})
        return [compare(ones[repeat], others[repeat]) for repeat in sorted(ones.keys() & others.keys())]

    def speed_ratio(self, point: Point, one: str, other: str) -> float | None:
        """How many times as fast `one` is: median over matched rounds."""
        return median_of(self.matched(point, one, other, lambda a, b: throughput(a) / throughput(b)))


def model_size(model: str) -> float:
    """Millions of parameters by a model's name: 7 for `7m`, 0 for one without a number."""
    return float(model.removesuffix("m")) if model[:1].isdigit() else 0.0


def throughput(sample: Sample) -> float:
    """Tokens of the trace per second; padding does not count."""
    return float(sample["tokens"] / sample["seconds"])


def padding_share(sample: Sample) -> float | None:
    """Share of the computed positions that were padding."""
    return 1 - sample["forward_tokens"] / sample["computed_tokens"] if sample.get("computed_tokens") else None


def mean_batch(sample: Sample) -> float | None:
    """Rows per execution, by Triton's counters."""
    return sample["batch_rows"] / sample["executions"] if sample.get("executions") else None


def cpu_ms_per_token(sample: Sample) -> float:
    """Milliseconds of CPU, server and client together, per token of the trace."""
    return float((sample["server_cpu_s"] + sample["client_cpu_s"]) * 1e3 / sample["tokens"])


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
