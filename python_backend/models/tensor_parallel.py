"""Splits a model's layers over the ranks of a group on one host, by the plan that transformers has for the family.

Embeddings and heads stay whole on every rank. Forward passes only, and each runs on all ranks at the same time.
"""

import contextlib
import copy
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.distributed.utils import TransformersDeviceMesh

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.tensor_parallel import plan_key
from rlhf_triton.errors import RankFailed

# All ranks start a forward pass together, so waiting this long means that one of them hangs.
FORWARD_TIMEOUT = timedelta(seconds=120)
# For a vote, ranks wait for the slowest one to load its part.
VOTE_TIMEOUT = timedelta(hours=1)
VOTE_BYTES = 1000  # of the reason why a rank refuses
MESH = ("pp", "dp_replicate", "fsdp", "tp")  # transformers' names; only the last dimension has more than one rank


class RankGroup:
    """This process's membership in a group of ranks, and the layout of the model that the group has loaded."""

    _depth = 0  # of nested `together`
    _voted_down = False

    def __init__(self, rank: int, size: int, device: str, rendezvous: Path) -> None:
        """Join the group; returns once all ranks have joined.

        Args:
            device: of this rank, `cpu` or `cuda:N`.
            rendezvous: a file in a private folder, the same for all ranks; it must exist as long as the group.

        Raises:
            CheckpointError: this host has no such device.
        """
        self.size = size
        self.device = existing(device)
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
        # A group of its own: votes are taken in another thread than forward passes, and wait for slow loads.
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
        self._plan: dict[str, str] = {}
        self._parts: dict[str, DtensorShardOperation] = {}  # parameter -> how to cut this rank's part out of it

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
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
        """Return `kind.from_pretrained` with this rank's part of each layer, and transformers' loading report.

        transformers creates new process groups for every model; this reuses the group's own.
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
        with self.together():
            model, report = Split.from_pretrained(
                None, distributed_config=DistributedConfig(tp_size=self.size), output_loading_info=True, **arguments
            )
        model.__class__ = kind
        self._make_local(model)
        return model, report

    def skeleton(self, model: Any) -> Any:
        """Return a copy of the loaded model without weights, to make others from by `attach`.

        Copying the model itself would be a race with its forward pass, which takes biases away from layers for a while.
        """
        memo: dict[int, Tensor] = {id(buffer): buffer for buffer in model.buffers()}
        memo |= {id(each): nn.Parameter(torch.empty_like(each, device="meta"), False) for each in model.parameters()}
        return copy.deepcopy(model, memo)

    def attach(self, module: Any) -> None:
        """Give the layers of a copied model forward functions of their own.

        `copy.deepcopy` copies functions by reference, and those of the layers use the original's weights.
        """
        for name, each in module.named_modules():
            each.__dict__.pop("forward", None)
            if style := self._plan.get(plan_key(name)):
                ALL_PARALLEL_STYLES[style].install_forward(each, self._mesh.get_mesh("tp"))

    def part(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Return this rank's part of the parameter `name` on its device."""
        cut = self._parts.get(name)
        return (
            tensor.to(self.device, dtype) if cut is None else cut.shard_tensor(tensor, device=self.device, dtype=dtype)
        )

    def _make_local(self, model: Any) -> None:
        """Replace each distributed tensor by this rank's part of it: the layers compute with the parts in any case."""
        self._plan = dict(model.tp_plan)
        model._mesh_manager = model._device_mesh = None  # so that the model can be copied
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self._parts[f"{path}.{name}"] = DtensorShardOperation(parameter)
                    module._parameters[name] = nn.Parameter(parameter.to_local().detach(), requires_grad=False)

    def _gather_reasons(self, reason: str) -> dict[int, str]:
        """Return the reasons of all ranks that gave one; every rank calls this with its own, "" for success."""
        own = torch.zeros(VOTE_BYTES, dtype=torch.uint8)
        text = " ".join(reason.split()).encode()[:VOTE_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        votes = [torch.empty_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(votes, own, group=self._voters)
        except RuntimeError as error:
            raise RankFailed(str(error)) from error
        texts = [bytes(vote.tolist()).rstrip(b"\0").decode(errors="replace") for vote in votes]
        return {rank: text for rank, text in enumerate(texts) if text}


def existing(device: str) -> torch.device:
    """Return the device. Raises CheckpointError if this host has no such one."""
    found = torch.device(device)
    if found.type == "cuda" and found.index >= torch.cuda.device_count():
        raise CheckpointError(
            f"a rank needs the device {device}, but there are {torch.cuda.device_count()}; lower tensor_parallel, or "
            "change device"
        )
    return found


def release(model: nn.Module) -> None:
    """Free the memory of a split model that is no longer used.

    Its layers and their forward functions refer to each other, so it would stay until the next garbage collection.
    """
    for module in model.modules():
        module.__dict__.pop("forward", None)
        module._parameters.clear()
