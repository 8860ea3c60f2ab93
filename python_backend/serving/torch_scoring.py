"""Base of the scoring models that compute in torch: sets up allocator and threads, and loads the model.

A model with `tensor_parallel` above 1 is loaded and run by several processes, of which this one is rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from python_backend.models.card.errors import is_device_error
from python_backend.models.card.memory import Halving, card_bytes
from python_backend.models.card.placement import device_of
from python_backend.models.card.streams import staging, use_own_stream
from python_backend.models.modeling import quiet_transformers
from python_backend.monitoring.metrics import CARD
from python_backend.serving.allocator import keep_freed_memory
from python_backend.serving.ranks.loaders import load_model
from python_backend.serving.scoring import ScoringModel
from python_backend.serving.triton import Gauge, MetricCounters, Parameters, Unavailable, log_error, refuse_numpy_2
from python_backend.wire.contract import UNTIL_LOADED

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from python_backend.serving.ranks.controller import ServingRanks

Launch = Callable[[Sequence[np.ndarray], int], Callable[[], Sequence[np.ndarray]]]
"""Launches the forward pass of rows at a width; returns a function that waits for an output array per row."""
TROUBLES = {
    "rlhf_lost_processes_total": "Processes of the model that lost their device or a rank, and had to be replaced",
    "rlhf_out_of_memory_total": "Forward passes halved because they did not fit into the device's memory",
}
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
        device, size = self.parameters.text("device"), self.parameters.number("tensor_parallel")
        if device == "cuda" and size == 1:  # Triton has chosen a card for each instance
            device = device_of(device, int(args.get("model_instance_device_id", "0")))
        self.device = torch.device(device_of(device, 0))
        self.prepare_worker()
        self._memory = Halving(f"token_budget of {self.parameters.model}", remedy="lower the model's max_length")
        self._troubles = MetricCounters(self.parameters.model, TROUBLES)
        self._gauges: dict[str, Gauge] = {}
        if self.device.type == "cuda":
            self.passes_in_flight = 2 if size == 1 else 1
            instance, model = args.get("model_instance_name", ""), self.parameters.model
            self._gauges = {spec.name: Gauge(model, f"rlhf_{spec.name}", spec.help, instance=instance) for spec in CARD}
        self.loading: dict[str, Any] = {
            "device": device,
            "dtype": self.parameters.text("dtype"),
            "compile_forward": self.parameters.text("compile") == "true",
        }
        self._ranks: ServingRanks | None = None
        if size > 1:
            from python_backend.serving.ranks.controller import ServingRanks

            self._ranks = ServingRanks(
                size,
                self.loading["device"],
                self.parameters.number("threads"),
                functools.partial(self._end, "has lost a rank"),
            )

    def load(self, loader: str, folder: Path, served: Any = None, **options: Any) -> Any:
        """Load a model, on all ranks if there are several; see `load_model`."""
        options |= self.loading
        if self._ranks is not None:
            return self._ranks.load(loader, folder, served, options)
        with staging(self.device):
            return load_model(loader, folder, served, options)

    @abstractmethod
    def forward_of(self, model: Any) -> Launch:
        """Return the method of the served model that launches its forward pass."""

    def launch(self, model: Any, rows: list[np.ndarray], width: int) -> Callable[[], list[np.ndarray]]:
        halved, forward = self._memory.count, self.forward_of(model)
        if self._ranks is not None:
            with self.on_all_ranks(forward.__self__, rows, width):  # type: ignore[attr-defined]
                found = forward(rows, width)()
            return lambda: list(found)
        parts = self._memory.in_parts(lambda part: forward(part, width), rows)
        if self._memory.count > halved:
            self._troubles.add((0, self._memory.count - halved))
            self._troubles.publish()
        return lambda: [output for part in parts for output in part()]

    def failed(self, error: BaseException | None) -> None:
        """End this process if the error, or one that it was raised from, leaves the device unusable."""
        while error is not None:
            if is_device_error(error):
                self._end("has lost its device", f"{type(error).__name__}: {str(error).splitlines()[0]}")
                return
            error = error.__cause__

    @contextlib.contextmanager
    def blaming_the_device(self) -> Iterator[None]:
        """Run the block, which loads a version; if the device is lost, do not return: the version may be good."""
        try:
            yield
        except Exception as error:
            if self._started:
                self.failed(error)
            if self._refusal is not None:
                threading.Event().wait()
            raise

    def publish(self) -> None:
        super().publish()
        for name, value in card_bytes(self.device).items():
            self._gauges[name].show(value)

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
        """Set torch's number of threads, device and stream. Needed in every worker thread: they are thread-local."""
        torch.set_num_threads(self.parameters.number("threads"))
        use_own_stream(self.device)

    def _end(self, loss: str, reason: str) -> None:
        """Fail the requests in flight, and all later ones at once, because the model has lost a rank or its device.

        Whoever supervises the server loads the model again. Until then this process must not end: Triton needs up to
        three seconds to answer a request whose process has ended. Only before the model has started, when there are no
        requests, does it end at once.
        """
        if self._refusal is not None:  # another thread has met the same error
            return
        error = Unavailable(f"{self.parameters.model} {loss}: {reason}; it {UNTIL_LOADED}")
        log_error(str(error))
        if not self._started:
            os._exit(1)
        self.refuse_all(error)
        self._troubles.add((1, 0))
        self._troubles.publish()
        self.stop_loading(waits=False)
