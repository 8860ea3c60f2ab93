"""What one role of a run needs, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

GIB = 1 << 30
# glibc's heap keeps gaps between the blocks of a forward and backward pass, and kernels use scratch memory. Measured
# on a policy and a critic of 10 million parameters; docs/benchmarks.md has the ratios of other sizes.
CPU_HEAP = 1.45
# Estimates for a GPU, beside the tensors: none of them was measured on one.
CONTEXT = int(0.6 * GIB)  # of each process on each GPU: the CUDA context, kernels and cuBLAS's workspaces
NCCL_BUFFERS = GIB // 2  # of each rank of a group
FRAGMENTATION = 0.05  # of the tensors: gaps between the allocator's blocks


@dataclass(frozen=True)
class Sizes:
    """Memory of one role on each of its devices, in bytes."""

    weights: int = 0
    copies: int = 0
    """Further weights: the reference, the sampler, a version that is about to be served or verified."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Largest working memory of a forward and backward pass."""
    cache: int = 0
    """Keys and values of generation."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Role:
    """A model of the run, in one use."""

    key: str
    """Section of the configuration."""
    sizes: Sizes
    model: str = ""
    parameters: int = 0
    trained: int = 0
    """Number of parameters that are trained."""
    precision: str = ""
    devices: tuple[str, ...] = ("cpu",)
    """Those of one node. Each of them needs `sizes`; `cpu` may occur several times."""
    processes: int = 1
    """On all nodes."""
    nodes: int = 1
    node: str = ""
    """Name of its nodes, if the roles of the run have nodes of their own."""
    contexts: int = 1
    """Most processes at the same time that use each device."""
    has_group: bool = False
    """Its processes exchange tensors."""
    notes: tuple[str, ...] = ()

    def at(self, device: str) -> str:
        """Return the name of a device of its node in the whole plan."""
        return f"{self.node} {device}".strip()


def on_heap(sizes: Sizes, device: str) -> Sizes:
    """Return `sizes` with the memory that activations occupy on this device."""
    return replace(sizes, activations=int(sizes.activations * CPU_HEAP)) if device == "cpu" else sizes
