"""Base of the scoring models that compute in torch: sets up allocator and threads, and loads the model.

A model with `tensor_parallel` above 1 is loaded and run by several processes, of which this one is rank 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from python_backend.models.modeling import quiet_transformers
from python_backend.serving.allocator import keep_freed_memory
from python_backend.serving.ranks.loaders import load_model
from python_backend.serving.scoring import ScoringModel
from python_backend.serving.triton import Parameters, Unavailable, log_error, refuse_numpy_2
from python_backend.wire.contract import LOST_RANK

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from python_backend.serving.ranks.controller import ServingRanks

EXIT_WITHIN_S = 5  # after unloading a model whose threads may hang in a collective


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
        self._ranks: ServingRanks | None = None
        size = self.parameters.number("tensor_parallel")
        if size > 1:
            from python_backend.serving.ranks.controller import ServingRanks

            self._ranks = ServingRanks(size, self.loading["device"], self.parameters.number("threads"), self._end)

    def load(self, loader: str, folder: Path, served: Any = None, **options: Any) -> Any:
        """Load a model, on all ranks if there are several; see `load_model`."""
        options |= self.loading
        if self._ranks is None:
            return load_model(loader, folder, served, options)
        return self._ranks.load(loader, folder, served, options)

    def on_all_ranks(self, model: Any, rows: list[np.ndarray], width: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for a forward pass of `model`, in which the other ranks, if any, run theirs."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.forward(model, rows, width)

    def stop_loading(self, *, waits: bool = True) -> None:
        """Hook to stop whatever calls `load`: at unload, when no request is left, or when the model has lost a rank.

        `waits`: until it has ended, which it may never do once a rank is lost.
        """

    def finalize(self) -> None:
        """Triton's entry point at unload."""
        if self._refusal is not None:  # no thread is worth waiting for; the default action of the signal ends them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            signal.alarm(EXIT_WITHIN_S)
            return
        super().finalize()
        self.stop_loading()
        if self._ranks is not None:
            self._ranks.close()

    def prepare_worker(self) -> None:
        """Set torch's number of threads. Needed in every worker thread: part of that setting is thread-local."""
        torch.set_num_threads(self.parameters.number("threads"))

    def _end(self, reason: str) -> None:
        """Fail the requests in flight, and all later ones at once, because the model has lost a rank.

        Whoever supervises the server loads the model again. Until then this process must not end: Triton needs up to
        three seconds to answer a request whose process has ended. Only before the model has started, when there are no
        requests, does it end at once.
        """
        log_error(f"{self.parameters.model} {LOST_RANK}: {reason}; it refuses requests until it is loaded again")
        if not self._started:
            os._exit(1)
        self.refuse_all(Unavailable(f"{self.parameters.model} {LOST_RANK}: {reason}"))
        self.stop_loading(waits=False)
