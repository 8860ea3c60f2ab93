"""Rounds that measure every contender once: order of the contenders, medians, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.support.benchmark import Record
from benchmarks.support.usage import timed

Sample = dict[str, Any]


def in_turn(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each round has every name once and starts with another name than the round before."""
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            yield number, name


def grouped(samples: Iterable[Sample], *keys: str) -> dict[tuple[Any, ...], list[Sample]]:
    """Group samples by the values of `keys`, in order of first appearance."""
    found: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        found.setdefault(tuple(sample[key] for key in keys), []).append(sample)
    return found


def select(samples: Iterable[Sample], **labels: Any) -> list[Sample]:
    """Return the samples that have all of the given labels."""
    return [sample for sample in samples if all(sample[key] == value for key, value in labels.items())]


def pairs(samples: Iterable[Sample], one: str, other: str, by: str = "contender") -> list[tuple[Sample, Sample]]:
    """Return (sample of `one`, sample of `other`) for each round that has both; `by` is the key that holds the name."""
    of = {(sample[by], sample["round"]): sample for sample in samples}
    return [
        (sample, of[other, number]) for (name, number), sample in of.items() if name == one and (other, number) in of
    ]


def ratio(samples: Iterable[Sample], one: str, other: str, key: str, by: str = "contender") -> float | None:
    """Return the median over the rounds of `one`'s `key` divided by `other`'s; None if no round has both."""
    return median_of(a[key] / b[key] for a, b in pairs(samples, one, other, by))


def medians(samples: Sequence[Sample], *keys: str) -> dict[str, float]:
    """Return the median of the samples for each key."""
    return {key: statistics.median(sample[key] for sample in samples) for key in keys}


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there is no such value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def time_in_turn(record: Record, contenders: Mapping[str, Callable[[], Any]], num_rounds: int, **labels: Any) -> None:
    """Time every contender once in each round; each sample has `labels`, `round`, `contender` and `seconds`."""
    for number, name in in_turn(list(contenders), num_rounds):
        seconds, _ = timed(contenders[name])
        record.add({**labels, "round": number, "contender": name, "seconds": seconds})
        record.say(f"{' '.join(map(str, labels.values()))}  round {number}  {name}: {seconds:.2f} s")


def speeds(samples: Iterable[Sample], against: str, *cell: str) -> list[Sample]:
    """Return tokens/s of each contender in each cell, and `speed_up`: how many times as fast as `against` it is."""
    return [
        {
            **{key: own[0][key] for key in cell},
            "contender": name,
            "tokens_per_s": median_of(sample["tokens"] / sample["seconds"] for sample in own),
            "speed_up": ratio(matched, against, name, "seconds"),
        }
        for matched in grouped(samples, *cell).values()
        for (name,), own in grouped(matched, "contender").items()
    ]
