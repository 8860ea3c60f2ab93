"""What the parts of the GPU check share: device, sizes and models."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import KINDS, config_of, make_checkpoints
from benchmarks.support.benchmark import Target
from benchmarks.support.workload import LONGEST, SEED, trace_lengths
from python_backend.config import RunConfig

SMALL, LARGE, HUGE = "tiny", "1b", "8b"
Found = Iterator[Target | dict[str, Any]]
"""Numbers of a part, and facts for the head of the report."""


class Skipped(Exception):
    """Raised by a part that cannot run here; the message says why."""


@dataclass(frozen=True)
class Job:
    """How a part is to run."""

    device: str
    """`cpu` or `cuda`."""
    small: bool
    """Whether to use tiny models."""
    scratch: str
    """Folder for checkpoints, which all parts share."""
    tests: str

    @property
    def model(self) -> str:
        """Model of most parts."""
        return SMALL if self.small else LARGE

    @property
    def budget(self) -> int:
        """Tokens in one forward pass."""
        return 1024 if self.small else 16_384

    def config(self, *, model: str = "", dtype: str = "bfloat16", **others: Any) -> RunConfig:
        """Return a run with models of this size on the device, after making their checkpoints if they are missing.

        Reward, critic, policy and trainer compute in `dtype`; `others`: further arguments of `config_of`.
        """
        folder = Path(self.scratch) / (model or self.model)
        if not folder.is_dir():
            unfinished = Path(tempfile.mkdtemp(dir=self.scratch))
            kinds = ("reward",) if model == HUGE else KINDS
            make_checkpoints(folder.name, unfinished, device=self.device, kinds=kinds)
            unfinished.rename(folder)
        served = {"device": self.device, "dtype": dtype, "micro_batch_rows": 512, **others.pop("served", {})}
        trained = {"device": self.device, "precision": dtype, **others.pop("trained", {})}
        return config_of(folder, self.budget, served=served, trained=trained, **others)

    def rows(self, count: int) -> list[np.ndarray]:
        """Return token rows of mixed length, up to half of the positions of a large model."""
        generator = np.random.default_rng(SEED)
        lengths = trace_lengths(count) * (1 if self.small else 2048 // LONGEST)
        return [generator.integers(3, 4096, length) for length in lengths]

    def synchronise(self) -> None:
        """Wait until the device has done everything."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()


def main(parts: Mapping[str, Callable[[Job], Found]]) -> None:
    """Run the part and the job in `sys.argv`; print each number as a line of JSON, and all else to stderr."""
    from python_backend.models.modeling import quiet_transformers

    lines, sys.stdout = sys.stdout, sys.stderr
    quiet_transformers()
    try:
        for found in parts[sys.argv[1]](Job(**json.loads(sys.argv[2]))):
            line = found if isinstance(found, dict) else dataclasses.asdict(found)
            print(json.dumps(line), file=lines, flush=True)
    except Skipped as why:
        print(json.dumps({"skipped": str(why)}), file=lines, flush=True)
