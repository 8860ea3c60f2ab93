"""Base of the scoring models that compute in torch: sets up allocator and threads, and reads the loading options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from python_backend.models.modeling import quiet_transformers
from python_backend.serving.allocator import keep_freed_memory
from python_backend.serving.scoring import ScoringModel
from python_backend.serving.triton import Parameters, refuse_numpy_2


class TorchScoringModel(ScoringModel):
    """A scoring model that runs torch.

    `set_up_torch` sets `parameters` and `loading`, which are the keyword arguments shared by all checkpoint loaders.
    """

    def set_up_torch(self, args: Mapping[str, str]) -> None:
        """Read Triton's arguments and prepare this process for forward passes; call it first in `initialize`."""
        refuse_numpy_2()
        quiet_transformers()
        self.parameters = Parameters(args)
        self.set_up(self.parameters)
        keep_freed_memory()
        self.prepare_worker()
        self.loading: dict[str, Any] = {
            "device": self.parameters.text("device"),
            "dtype": self.parameters.text("dtype"),
            "compile_forward": self.parameters.text("compile") == "true",
        }

    def prepare_worker(self) -> None:
        """Set torch's number of threads. Needed in every worker thread: part of that setting is thread-local."""
        torch.set_num_threads(self.parameters.number("threads"))
