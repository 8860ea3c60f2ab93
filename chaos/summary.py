"""Statistics of the crash test: recovery time after each kill, outages, and failed requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from chaos.traffic import RequestRecord

OUTAGE_S = 1.0


def outages(record: RequestRecord) -> list[dict[str, float]]:
    """Return the gaps between scoring answers that are longer than OUTAGE_S."""
    times = sorted(when for when, _ in record.latencies)
    return [
        {"time_s": round(before, 3), "seconds": round(after - before, 3)}
        for before, after in pairwise(times)
        if after - before > OUTAGE_S
    ]


def kills_with_recovery(kills: Sequence[dict[str, Any]], record: RequestRecord) -> list[dict[str, Any]]:
    """Return the kills with the seconds until the next scoring answer and until the next acknowledged step.

    The keys are `scored_after_s` and `trained_after_s`; the value is None if there was no such answer.
    """
    scored = sorted(when for when, _ in record.latencies)
    trained = [when for _, when, _ in record.trained]
    return [
        kill | {"scored_after_s": _next(scored, kill["time_s"]), "trained_after_s": _next(trained, kill["time_s"])}
        for kill in kills
    ]


def summary(record: RequestRecord, kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts, latencies and outages of a run."""
    latencies = [seconds for _, seconds in record.latencies]
    gaps = outages(record)
    failed = Counter(who for _, who, _ in record.failures)
    return {
        "kills": sum(kill["hit"] and kill.get("way", "killed") == "killed" for kill in kills),
        "stops": sum(kill["hit"] and kill.get("way", "killed") != "killed" for kill in kills),
        "steps": len(record.trained),
        "steps_repeated": len(record.repeated),
        "saves": len(record.saved),
        "rewinds": len(record.rewound),
        "scoring_requests": len(latencies),
        "scoring_requests_given_up": failed["scorer"],
        "training_attempts_given_up": failed["writer"],
        "scoring_p50_ms": float(np.median(latencies)) * 1e3 if latencies else None,
        "outages": len(gaps),
        "longest_outage_s": max((gap["seconds"] for gap in gaps), default=0.0),
        "longest_until_trained_s": max((kill["trained_after_s"] or 0.0 for kill in kills), default=0.0),
    }


def _next(times: Sequence[float], after: float) -> float | None:
    """Return the seconds from `after` to the next of the ascending `times`; None if there is none."""
    index = int(np.searchsorted(times, after, side="right"))
    return round(times[index] - after, 3) if index < len(times) else None
