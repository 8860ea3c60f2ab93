"""Splits a model's layers over ranks on one host by transformers' tensor-parallel plan for its family.

Every rank has the full embeddings and heads. Supports forward passes only; each runs on all ranks at the same time.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.errors import RankFailed

# All ranks start a forward pass at the same time, so a rank that waits this long waits for one that hangs.
FORWARD_TIMEOUT = timedelta(seconds=120)
# In a vote, ranks wait for the slowest rank to load its part.
VOTE_TIMEOUT = timedelta(hours=1)
MESH = ("pp", "dp_replicate", "fsdp", "tp")  # transformers' names; only the last dimension has more than one rank


class RankGroup:
    """This process's membership in a group of ranks."""

    _depth = 0  # nesting of `run_on_all_ranks`
    _voted_down = False

    def __init__(self, rank: int, size: int, device: str, rendezvous: Path) -> None:
        """Join the group; return once all ranks have joined.

        Args:
            device: this rank's device, `cpu` or `cuda:N`.
            rendezvous: a file in a private folder, the same for all ranks; it must exist as long as the group.

        Raises:
            CheckpointError: this host has no such device.
        """
        self.size = size
        self.device = check_device(device)
        for backend in ("GLOO", "NCCL"):  # all ranks are on this host
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "nccl",
            store=dist.FileStore(str(rendezvous), size),
            rank=rank,
            world_size=size,
            timeout=FORWARD_TIMEOUT,
            device_id=self.device if self.device.type == "cuda" else None,  # connects now, on this GPU
        )
        # A separate group: votes run in another thread than forward passes and wait for slow loads.
        self._voters = dist.new_group(backend="gloo", timeout=VOTE_TIMEOUT)
        alone = dist.new_group([rank], use_local_synchronization=True)
        ranks = torch.arange(size).view(1, 1, 1, size)
        # `init_device_mesh` would create new groups with the default timeout of half an hour.
        everyone = dist.group.WORLD
        assert everyone is not None
        whole = DeviceMesh.from_group(
            [alone, alone, alone, everyone], self.device.type, mesh=ranks, mesh_dim_names=MESH
        )
        self._mesh = TransformersDeviceMesh(whole, whole)

    @contextlib.contextmanager
    def run_on_all_ranks(self) -> Iterator[None]:
        """Run the block on every rank; if it raises on one rank, raise on all of them. Blocks may be nested.

        Raises:
            CheckpointError: another rank failed; the message names the rank and the cause.
            RankFailed: the ranks could not agree.
        """
        failure: Exception | None = None
        self._depth += 1
        try:
            yield
        except Exception as error:
            failure = error
        self._depth -= 1
        if failure is not None and self._voted_down:  # in an inner block: the other ranks take no further vote
            self._voted_down = self._depth > 0
            raise failure
        others = self._gather_reasons("" if failure is None else str(failure) or type(failure).__name__)
        self._voted_down = self._depth > 0 and (failure is not None or bool(others))
        if failure is not None:
            raise failure
        if others:
            raise CheckpointError("; ".join(f"rank {rank}: {reason}" for rank, reason in others.items()))

    def from_pretrained(self, kind: Any, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Load this rank's part of each layer with `kind.from_pretrained`; return the model and transformers' report.

        transformers itself would create new process groups for every model; this method reuses the existing ones.
        """
        group = self

        class Split(kind):
            __module__ = kind.__module__  # to transformers, a model of any other module is custom code

            @classmethod
            def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
                return distributed_config, group.device, group._mesh

            @classmethod
            def maybe_distribute_model(cls, model: Any, *more: Any) -> Any:
                model.tp_plan = {name: style for name, style in model.tp_plan.items() if ".*." in name}
                return super().maybe_distribute_model(model, *more)

        Split.__name__ = kind.__name__  # transformers looks up conversions of tensors by the class's name
        with self.run_on_all_ranks():
            model, report = Split.from_pretrained(
                None, distributed_config=DistributedConfig(tp_size=self.size), output_loading_info=True, **arguments
            )
        model.__class__ = kind
        for module in model.modules():  # the layers' forward functions compute with the local parts anyway
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    module._parameters[name] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)
        return model, report

    def _gather_reasons(self, reason: str) -> dict[int, str]:
        """Exchange the ranks' reasons for failure, "" for success; return the reasons of the failed ranks, by rank."""
        votes = [""] * self.size
        try:
            dist.all_gather_object(votes, reason, group=self._voters)
        except RuntimeError as error:
            raise RankFailed(str(error)) from error
        return {rank: " ".join(vote.split()) for rank, vote in enumerate(votes) if vote}


def check_device(device: str) -> torch.device:
    """Return the device. Raises CheckpointError if this host does not have it."""
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and torch_device.index >= torch.cuda.device_count():
        raise CheckpointError(
            f"a rank needs the device {device}, but this host has {torch.cuda.device_count()}; lower tensor_parallel, "
            "or change device"
        )
    return torch_device


def release(model: nn.Module) -> None:
    """Free the memory of a split model that is no longer used.

    Its layers and their forward functions refer to each other, so it would stay until the next garbage collection.
    """
    for module in model.modules():
        module.__dict__.pop("forward", None)
        module._parameters.clear()
