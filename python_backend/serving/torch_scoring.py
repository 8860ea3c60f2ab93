"""Base of the scoring models whose forwards run in torch: allocator, threads, and how a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from python_backend.models.modeling import quiet_transformers
from python_backend.serving.allocator import use_allocator
from python_backend.serving.scoring import ScoringModel
from python_backend.serving.triton import Parameters, refuse_numpy_2


class TorchScoringModel(ScoringModel):
    """Has `parameters`, and in `loading` the arguments that every loader takes, once `set_up_torch` was called."""

    def set_up_torch(self, args: Mapping[str, str]) -> None:
        """Read Triton's arguments and prepare this process for forwards; the first step of `initialize`."""
        refuse_numpy_2()
        quiet_transformers()
        self.parameters = Parameters(args)
        self.set_up(self.parameters)
        use_allocator(self.parameters.text("allocator"))
        self.prepare_worker()
        self.loading: dict[str, Any] = {
            "device": self.parameters.text("device"),
            "dtype": self.parameters.text("dtype"),
            "compile_forward": self.parameters.text("compile") == "true",
        }

    def prepare_worker(self) -> None:
        """Set torch's number of threads, a part of which torch keeps per thread."""
        torch.set_num_threads(self.parameters.number("threads"))
