"""The process of a scoring model in torch: sets up allocator and threads, loads models and launches forward passes.

If `tensor_parallel` is above 1, several processes load and run the model; this one is rank 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf_triton.models.device_errors import is_device_error
from rlhf_triton.models.gpu import staging, use_own_stream
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.models.out_of_memory import MemoryBudget, gpu_bytes
from rlhf_triton.models.placement import device_of
from rlhf_triton.monitoring.metrics import GPU_MEMORY
from rlhf_triton.process import keep_freed_memory
from rlhf_triton.python_backend.serving.loaders import load_model, loader_of
from rlhf_triton.python_backend.serving.scoring import Forward, Wait
from rlhf_triton.python_backend.serving.triton import Gauge, MetricCounters, Unavailable, log_error, parameters_of
from rlhf_triton.python_backend.serving.versions.follower import Version
from rlhf_triton.wire.contract import UNTIL_LOADED, TokenRow

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.python_backend.serving.ranks.controller import ServingRanks

FAILURES = {
    "rlhf_lost_processes_total": "Processes of the model that lost their device or a rank, and had to be replaced",
    "rlhf_out_of_memory_total": "Forward passes halved because they did not fit into the device's memory",
}
EXIT_WITHIN_S = 5  # after unloading a model whose threads may hang in a collective


class TorchProcess:
    """This process, with one model on its device."""

    def __init__(self, args: Mapping[str, str]) -> None:
        """Prepare the process for forward passes. `args`: the arguments of Triton's `initialize`."""
        quiet_transformers()
        self.args, self.parameters = args, parameters_of(args)
        keep_freed_memory()
        device = self.parameters.text("device")
        size = self.parameters.number("tensor_parallel")
        if device == "cuda" and size == 1:  # Triton has chosen a GPU for each instance
            device = device_of(device, int(args.get("model_instance_device_id", "0")))
        self.device = torch.device(device_of(device, 0))
        self._threads = threads_of(self.parameters.text("threads"))
        self.prepare_thread()
        self._memory = MemoryBudget(f"token_budget of {self.parameters.model}", remedy="lower the model's max_length")
        self._failures = MetricCounters(self.parameters.model, FAILURES)
        self._gauges: dict[str, Gauge] = {}
        self.passes_in_flight = 2 if self.device.type == "cuda" and size == 1 else 1
        if self.device.type == "cuda":
            instance = args.get("model_instance_name", "")
            model = self.parameters.model
            self._gauges = {
                spec.name: Gauge(model, f"rlhf_{spec.name}", spec.help, instance=instance) for spec in GPU_MEMORY
            }
        self._loader, options = loader_of(self.parameters)
        self._options = {**options, "device": device, "dtype": self.parameters.text("dtype")}
        self.stop_loading: Callable[[bool], None] = lambda waits: None
        """Stops the thread that calls `load`; with True, waits until it has ended, which it may never do once a rank is
        lost."""
        self.refuse_all: Callable[[Exception], None] | None = None
        self._is_lost = False
        self._ranks: ServingRanks | None = None
        if size > 1:
            from rlhf_triton.python_backend.serving.ranks.controller import ServingRanks

            self._ranks = ServingRanks(
                size,
                device,
                self._threads,
                functools.partial(self._end, "has lost a rank"),
            )

    def load(self, folder: Path, served: Any = None) -> Any:
        """Load the model, on all ranks if there are several; see `load_model`."""
        if self._ranks is not None:
            return self._ranks.load(self._loader, folder, served, self._options)
        with staging(self.device):
            return load_model(self._loader, folder, served, self._options)

    def launch(self, forward: Forward, version: Version, rows: Sequence[TokenRow], width: int) -> Wait:
        """Launch a forward pass, in halves if it does not fit into the device's memory, and on all ranks."""
        if self._ranks is not None:
            with self.on_all_ranks(version.model, rows, width):
                outputs = forward(version.model, rows, width)()
            return lambda: outputs
        parts = self._memory.run_in_parts(lambda part: forward(version.model, part, width), rows)
        if halved := self._memory.new_halvings():
            self._failures.add((0, halved))
            self._failures.publish()
        return lambda: [output for part in parts for output in part()]

    def handle_failure(self, error: BaseException | None) -> None:
        """Take the model out of service if the error, or one of its causes, means that the device is unusable."""
        while error is not None:
            if is_device_error(error):
                self._end("has lost its device", f"{type(error).__name__}: {str(error).splitlines()[0]}")
                return
            error = error.__cause__

    @contextlib.contextmanager
    def loading_version(self) -> Iterator[None]:
        """Run the block, which loads a version. If the device is lost, never return: the version is not to blame."""
        try:
            yield
        except Exception as error:
            if self.refuse_all is not None:
                self.handle_failure(error)
            if self._is_lost:
                threading.Event().wait()
            raise

    def publish(self) -> None:
        """Publish the device's memory use."""
        for name, value in gpu_bytes(self.device).items():
            self._gauges[name].show(value)

    def on_all_ranks(self, model: Any, rows: Sequence[TokenRow], width: int) -> contextlib.AbstractContextManager[None]:
        """Return the context for a forward pass of `model`, during which the other ranks, if any, run theirs."""
        if self._ranks is None:
            return contextlib.nullcontext()
        return self._ranks.forward(model, [row.tokens for row in rows], width)

    def close(self) -> None:
        """Stop loading and stop the other ranks; if the device or a rank is lost, let a signal end this process."""
        if self._is_lost:  # the threads may hang; the default action of the signal ends the process
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            signal.alarm(EXIT_WITHIN_S)
            return
        self.stop_loading(True)
        if self._ranks is not None:
            self._ranks.close()

    def prepare_thread(self) -> None:
        """Set torch's number of threads, device and stream; needed in every thread that computes."""
        torch.set_num_threads(self._threads)
        use_own_stream(self.device)

    def _end(self, loss: str, reason: str) -> None:
        """Fail all requests in flight and all later ones, because the model has lost a rank or its device.

        The server's supervisor reloads the model. Until then this process must not end: Triton needs up to three
        seconds to answer a request whose process has ended. Before the model has started, when there are no requests,
        the process ends at once.
        """
        if self._is_lost:  # another thread has met the same error
            return
        error = Unavailable(f"{self.parameters.model} {loss}: {reason}; it {UNTIL_LOADED}")
        log_error(str(error))
        if self.refuse_all is None:
            os._exit(1)
        self._is_lost = True
        self.refuse_all(error)
        self._failures.add((1, 0))
        self._failures.publish()
        self.stop_loading(False)


def threads_of(setting: str) -> int:
    """Parse the parameter `threads`, such as `3`, or `1/2` for half of the cores; return the number of threads."""
    number, _, parts = setting.partition("/")
    return max(1, len(os.sched_getaffinity(0)) // int(parts)) if parts else int(number)


def forward_tokens(model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
    """Launch a forward pass of a model that reads only the tokens of a row."""
    return model.launch([row.tokens for row in rows], width)
