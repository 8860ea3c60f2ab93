"""What every contender is: a server of one model, started with one split of the cores.
Given: a name, a `Setup`, a `Split`. Returns: a `Running` that says where to send requests and what to watch.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tools.bench.snapshot import Watched


@dataclass(frozen=True)
class Split:
    """How a contender uses the cores."""

    instances: int
    threads: int

    def __str__(self) -> str:
        return f"{self.instances}x{self.threads}"


@dataclass(frozen=True)
class Setup:
    """What is the same for all contenders of one model."""

    checkpoint: Path
    folder: Path
    """Where servers keep repositories, logs and counters."""
    token_budget: int
    overhead_tokens: int
    """What a forward costs beyond its tokens, in tokens."""
    queue_delay_us: int
    tuned_allocator: bool


class Running:
    """A started contender."""

    plain = False
    """It speaks the plain protocol of `bench_one_forward`, not Triton's."""
    width = 0
    """Clients pad to so many tokens."""

    def __init__(self, name: str, setup: Setup, split: Split) -> None:
        self.name = name
        self.split = split
        self.setup = setup
        self.folder = setup.folder / f"{name}-{split}"
        self.counters = self.folder / "counters"
        self.counters.mkdir(parents=True, exist_ok=True)

    @property
    def urls(self) -> list[str]:
        """`host:port` of each address that takes requests."""
        raise AssertionError("defined by the subclass")

    @property
    def pids(self) -> list[int]:
        """Processes whose trees are the contender."""
        raise AssertionError("defined by the subclass")

    @property
    def metrics_url(self) -> str | None:
        """`host:port` of Triton's metrics; None for a contender without Triton."""
        return None

    @property
    def watched(self) -> Watched:
        """Where its counters are."""
        return Watched(self.pids, str(self.counters), self.metrics_url)

    def stop(self) -> None:
        """End its processes."""
        raise AssertionError("defined by the subclass")

    def with_budget(self, token_budget: int) -> Running:
        """The same processes, asked for another budget; only `ideal` follows one that it was not started with."""
        other = copy.copy(self)
        other.setup = dataclasses.replace(self.setup, token_budget=token_budget)
        return other

    def _arguments(self) -> list[str]:
        return [
            "--checkpoint", str(self.setup.checkpoint), "--counters", str(self.counters),
            "--threads", str(self.split.threads), "--tuned", str(int(self.setup.tuned_allocator)),
        ]  # fmt: skip
