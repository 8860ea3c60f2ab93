"""Kill points (stages of the system's work, recognised from outside by their files), and the plan of all kills."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from python_backend.config import RunConfig
from python_backend.store.journal import Journal
from python_backend.store.jsonl import JsonlTail

POLL_S = 0.001
VICTIMS = ("tritonserver", "critic", "critic_train", "critic_save", "reward_model", "sidecar")
POINTS = ("journal write", "training", "verify", "CURRENT", "reload", "checkpoint", "idle")
FIRST_GUESS_S = {"training": 0.3, "reload": 4.0}  # assumed durations, until the sidecar's metrics report them
NOTHING = "nothing"
RANK = "rank "  # and its number: a victim


def plan_kills(num_kills: int, seed: int, *, ranks: int = 1) -> list[tuple[str, str]]:
    """Return (victim, kill point) of each kill; for every seed, 42 kills cover each pair once.

    Args:
        ranks: number of ranks that train the critic; above 1, each is a victim, too.
    """
    generator = random.Random(seed)
    victims, points = [*VICTIMS, *(f"{RANK}{rank}" for rank in range(ranks) if ranks > 1)], list(POINTS)
    generator.shuffle(victims)
    generator.shuffle(points)
    # 6 victims (8 with two ranks) and 7 points have no common divisor, so stepping through both covers all pairs.
    return [(victims[i % len(victims)], points[i % len(points)]) for i in range(num_kills)]


class Points:
    """Waits for the kill points of one run."""

    def __init__(self, config: RunConfig, shared_memory: Path, region_prefix: str, generator: random.Random) -> None:
        self._journal = Journal(config.run.journal_dir, config.run.identity)
        self._entries = config.run.journal_dir / config.run.identity / "entries"
        self._weights = config.run.weights_dir
        self._checkpoints = config.run.dir / "checkpoints" / "critic"
        self._shared_memory = shared_memory
        self._prefix = region_prefix
        self._metrics = JsonlTail(config.run.dir / "critic_metrics.jsonl")
        self._spans = dict(FIRST_GUESS_S)
        self._random = generator

    def wait(self, point: str, timeout_s: float, give_up: threading.Event) -> str:
        """Wait for the kill point, and then for a random part of its duration; return a description of what was seen.

        Returns NOTHING if the point does not come within `timeout_s`, or once `give_up` is set.
        """
        look = self._observer(point)
        deadline = time.monotonic() + timeout_s
        while (seen := look()) is None:
            if time.monotonic() > deadline or give_up.is_set():
                return NOTHING
            time.sleep(POLL_S)
        self._measure()
        span = self._spans.get(point, 0.0)
        give_up.wait(self._random.uniform(0, span) + self._random.uniform(0, 0.02))
        return seen

    def _observer(self, point: str) -> Callable[[], str | None]:
        match point:
            case "journal write":
                return _new_name(self._entries, lambda name: True)
            case "training":
                return _new_name(self._entries, lambda name: name.endswith(".train"))
            case "verify":
                return _new_name(self._weights, lambda name: name.isdigit() or name.startswith(".staging-"))
            case "CURRENT":
                return _replaced(self._weights / "CURRENT")
            case "reload":
                return _new_name(self._shared_memory, lambda name: name.startswith(self._prefix))
            case "checkpoint":
                return _new_name(self._checkpoints, lambda name: name.isdigit() or name.startswith(".staging-"))
            case "idle":
                since = time.time()
                return lambda: self._idle(since)
        raise ValueError(f"unknown kill point {point!r}; known: {', '.join(POINTS)}")

    def _idle(self, since: float) -> str | None:
        heartbeat = self._journal.heartbeat()
        fresh = heartbeat is not None and heartbeat.time > since and heartbeat.state == "idle"
        return "heartbeat: idle" if fresh else None

    def _measure(self) -> None:
        """Read the durations of the last update and the last reload from the sidecar's metrics."""
        for line in self._metrics.read_new():
            if "train/step_time" in line:
                self._spans["training"] = float(line["train/step_time"])
            elif line.get("reason") == "save":
                self._spans["reload"] = float(line["reload_ms"]) / 1e3


def _new_name(folder: Path, counts: Callable[[str], bool]) -> Callable[[], str | None]:
    before = _names(folder)

    def look() -> str | None:
        fresh = sorted(name for name in _names(folder) - before if counts(name))
        return f"new: {fresh[0]}" if fresh else None

    return look


def _replaced(path: Path) -> Callable[[], str | None]:
    before = path.stat().st_ino, path.stat().st_mtime_ns

    def look() -> str | None:
        now = path.stat()
        return f"replaced: {path.name}" if (now.st_ino, now.st_mtime_ns) != before else None

    return look


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208 - names, a thousand times a second
