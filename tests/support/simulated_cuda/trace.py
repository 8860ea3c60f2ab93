"""Counts kernels on the simulated GPUs, and the places where the host waits for a GPU."""

import threading
import traceback
from collections import Counter
from pathlib import Path

import simcuda
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROJECT = Path(__file__).resolve().parents[3]
SOURCES = tuple(str(PROJECT / folder) for folder in ("rlhf_triton", "actor", "trainer", "python_backend", "tools"))
# Operators that launch nothing, beside views.
LAUNCH_NOTHING = {
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
    "record_stream",
    "_pin_memory",
    "is_pinned",
}
# Operators whose result has a size that depends on the data, which the host must know.
SIZED_BY_DATA = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "equal",
    "bincount",
}
INDEXING = {"index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"}

_active = threading.local()


def host_waits(why):
    """Count a wait of this thread's host code in each active `Trace`."""
    for trace in getattr(_active, "traces", ()):
        trace.count_wait(why)


class Trace(TorchDispatchMode):
    """Kernels and host waits of the code in its block, on this thread and in backward passes that it starts.

    Args:
        places: find the line of the project that waits or launches; takes time.

    Attributes:
        kernels: number of kernels.
        ops: kernels by operator.
        streams: kernels by (GPU, id of the current stream); id 0 is the default stream.
        waits: host waits by their cause.
        where: host waits by (cause, line of the project).
    """

    def __init__(self, *, places=True):
        super().__init__()
        self._places = places
        self.ops = Counter()
        self.streams = Counter()
        self.waits = Counter()
        self.where = Counter()

    @property
    def kernels(self):
        return self.ops.total()

    @property
    def num_waits(self):
        return self.waits.total()

    def count_wait(self, why):
        self.waits[why] += 1
        if self._places:
            self.where[why, _place()] += 1

    def __enter__(self):
        _active.traces = [*getattr(_active, "traces", ()), self]
        return super().__enter__()

    def __exit__(self, *error):
        _active.traces = [trace for trace in _active.traces if trace is not self]
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        gpu = next((tensor.device.index for tensor in (*given, *made) if tensor.is_cuda), None)
        if gpu is None:
            return out
        if why := _cause(name, args, kwargs, given, made):
            self.count_wait(why)
        if not func.is_view and name not in LAUNCH_NOTHING:
            self.ops[name] += 1
            self.streams[gpu, simcuda.current_stream(gpu)] += 1
        return out


def _cause(name, args, kwargs, given, made):
    """Return why the host waits in this operator, or None if it does not."""
    if name == "_to_copy":
        return _copy_cause(args[0], made[0], kwargs.get("non_blocking"))
    if name == "copy_":
        return _copy_cause(args[1], args[0], kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    if not any(tensor.is_cuda for tensor in given):
        return None
    if name == "lift_fresh":  # all that is seen of `torch.tensor(..., device="cuda")`
        return "torch.tensor() on the device" if made[0].numel() else None
    if name == "_local_scalar_dense":
        return "item()/float()/bool()"
    if name in SIZED_BY_DATA or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return name
    if name in INDEXING:
        return _index_cause(name, args)
    return None


def _copy_cause(source, target, non_blocking):
    """Return why a copy waits: all but non-blocking ones from or into pinned memory of the host do."""
    if source.is_cuda == target.is_cuda:
        return None
    on_host = target if source.is_cuda else source
    way = "copy to the host" if source.is_cuda else "copy to the device"
    if not non_blocking:
        return way
    return None if on_host.is_pinned() else f"{way}, pageable memory"


def _index_cause(name, args):
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            return f"{name} with a mask"
        if index is not None and not index.is_cuda and args[0].is_cuda:
            return f"{name} with an index on the host"
    return None


def _place():
    """Return the innermost line of the project, or of transformers if there is none."""
    stack = traceback.extract_stack()
    for start in (SOURCES, None):
        for frame in reversed(stack):
            if frame.filename.startswith(start) if start else "/transformers/" in frame.filename:
                return f"{frame.filename.removeprefix(f'{PROJECT}/')}:{frame.lineno}: {frame.line}"
    return "?"
