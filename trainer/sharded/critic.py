"""The critic in training, sharded over several ranks.

All ranks have the same objects and call the same methods in the same order: rank 0 announces each call, and the other
ranks execute it in `follow_rank_0`. Files are shared by all ranks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from python_backend.checkpoints.inspection import (
    ADAPTERS_KEY,
    CheckpointError,
    Constants,
    StoredAdapters,
    inspect_checkpoint,
)
from python_backend.models.adapters import describe_adapters, trained_tensors
from python_backend.models.modeling import CriticModel, write_config
from python_backend.models.precision import in_float32, use_bfloat16
from python_backend.models.token_head import head_of
from python_backend.store.weights import WeightsStore
from python_backend.training.ranks import RankFailed, Ranks
from python_backend.training.sharding import all_finite, differing, gathered_as_stored, shard, write_checkpoint
from trainer.sharded.merged_slices import MergedSlices
from trainer.trained_critic import TrainedCritic, write_adapters


class ShardedCritic(CriticModel):
    """A critic of which each rank holds a slice of every tensor."""

    def __init__(self, critic: CriticModel, ranks: Ranks, precision: str) -> None:
        """Shard the weights of `critic`, which all ranks have loaded, to train it in `precision`; collective."""
        super().__init__(critic.model, constants=Constants(critic.mean, critic.std), note=critic.note, like=critic)
        if self._token_head.one_by_one:  # FSDP gathers weights in each, and ranks would not run equally many
            raise CheckpointError(
                f"each row needs a forward pass of its own in {type(self.model).__name__}, which several ranks do not "
                "support; set trainer.ranks: 1"
            )
        self.ranks, self.stored_as = ranks, critic.stored_as
        self._token_head.lean = None  # it reads the weights of the layers, which are not gathered for it
        outputs = self._token_head
        self.model.token_outputs = types.MethodType(
            lambda _, ids, attention: outputs(ids, attention).clone(),  # FSDP needs an output that is not a view
            self.model,
        )
        # Frozen matrices are rounded layer by layer, so that no rank has a copy of all of them.
        head, in_bfloat16 = head_of(self.model), precision == "bfloat16"
        shard(
            self.model,
            ranks,
            methods=["token_outputs"],
            prepare=lambda module: use_bfloat16(module, head) if in_bfloat16 else None,
            precision=precision,
        )
        adapters = critic.adapters if isinstance(critic, TrainedCritic) else None
        self._adapters = adapters and describe_adapters(self.model, base=adapters.base)  # with what is rounded now

    def own_weights(self) -> None:
        """Do nothing: the slices are copies."""

    def outputs(self, ids: Tensor, attention: Tensor) -> Tensor:
        return self.model.token_outputs(ids, attention)

    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Return the values of token rows, computed in float32; all ranks compute the same."""
        self.ranks.announce("values", rows=[row.tolist() for row in rows], width=width)
        with gathered_as_stored(self.model), in_float32(self.model):
            values = super().values(rows, width)
        self.model.reshard()
        return values

    def write(self, folder: Path) -> dict[str, str] | None:
        """Write a version: a Hugging Face checkpoint with one file per rank, or the adapters, which rank 0 writes.

        Returns the sha256 of each weights file and of their index, if there are several.
        """
        self.ranks.announce("write_version", folder=str(folder))
        if self._adapters is not None:
            self._write_adapters(folder, self._adapters)
            return None
        weights = MergedSlices(self.model, self.stored_as, head_of(self.model))
        digests = write_checkpoint(weights.shapes(), weights.__getitem__, folder, self.ranks)
        if self.ranks.rank == 0:
            write_config(self, folder)
        return digests

    def verify(self, store: WeightsStore, version: int) -> None:
        """Verify that a version holds the weights of this critic, bit for bit, and that they are finite.

        Each rank compares its own slices. Together these are all bytes that `write` has hashed for the manifest, so
        that hashing them once more, which takes longer than the rest of a publish, would find nothing else. The base
        of adapters is hashed once.

        Raises:
            WeightsError, CheckpointError, RankFailed: a check failed on this or another rank.
        """
        self.ranks.announce("verify", root=str(store.root), version=version)
        weights = MergedSlices(self.model, self.stored_as, head_of(self.model))

        def verify() -> None:
            if self._adapters is not None:
                store.verify_hashes(store.manifest(version), part=self.ranks.rank, parts=self.ranks.size)
            if not all_finite(self.model.parameters()):
                raise CheckpointError("the weights are not finite")
            if wrong := self._differing(weights, store.folder(version)):
                raise CheckpointError(f"{wrong[0]} differs from the trained weights")

        self.ranks.together(verify)

    def holds(self, store: WeightsStore, version: int) -> bool:
        """Return whether a version has the weights of this critic, bit for bit."""
        self.ranks.announce("holds", root=str(store.root), version=version)
        weights = MergedSlices(self.model, self.stored_as, head_of(self.model))
        try:
            same = self.ranks.together(lambda: not self._differing(weights, store.folder(version)))
            return all(self.ranks.gather(same))
        except (CheckpointError, RankFailed):  # a file is damaged
            return False

    def _write_adapters(self, folder: Path, adapters: StoredAdapters) -> None:
        trained = trained_tensors(self.model)
        is_writer = self.ranks.rank == 0
        self.ranks.together(lambda: write_adapters(self, trained, adapters, folder) if is_writer else None)

    def _differing(self, weights: MergedSlices, folder: Path) -> list[str]:
        """Return what differs between this critic and a version: names of tensors, or the adapters' description."""
        info = inspect_checkpoint(folder)
        if info.adapters is None:
            return differing(weights, info)
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return [ADAPTERS_KEY] if info.adapters != self._adapters else differing(trained, info)


def critic_operations(critic: Callable[[], ShardedCritic]) -> dict[str, Callable[..., Any]]:
    """Return what ranks above 0 execute for each announced operation of a `ShardedCritic`."""
    store = functools.cache(lambda root: WeightsStore(Path(root)))  # remembers the base that it has verified
    return {
        "values": lambda rows, width: critic().values([np.asarray(row, np.int64) for row in rows], width),
        "write_version": lambda folder: critic().write(Path(folder)),
        "verify": lambda root, version: critic().verify(store(root), version),
        "holds": lambda root, version: critic().holds(store(root), version),
    }
