"""The critic in training, sharded over several ranks.

All ranks have the same objects and call the same methods in the same order: rank 0 announces each call, and the other
ranks execute it in `follow_rank_0`. Files are shared by all ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from python_backend.checkpoints.inspection import CheckpointError, Constants, inspect_checkpoint
from python_backend.models.modeling import CriticModel, write_config
from python_backend.parallel.ranks import RankFailed, Ranks
from python_backend.parallel.sharding import all_finite, differing, shard, write_checkpoint
from python_backend.store.weights import WeightsStore


class ShardedCritic(CriticModel):
    """A critic of which each rank holds a slice of every tensor."""

    def __init__(self, critic: CriticModel, ranks: Ranks) -> None:
        """Shard the weights of `critic`, which all ranks have loaded; collective."""
        super().__init__(critic.model, constants=Constants(critic.mean, critic.std), note=critic.note, like=critic)
        self.ranks = ranks
        self._token_head.lean = None  # it reads the weights of the layers, which are not gathered for it
        outputs = self._token_head
        self.model.token_outputs = types.MethodType(
            lambda _, ids, attention: outputs(ids, attention).clone(),  # FSDP needs an output that is not a view
            self.model,
        )
        shard(self.model, methods=["token_outputs"])

    def own_weights(self) -> None:
        """Do nothing: the slices are copies."""

    def outputs(self, ids: Tensor, attention: Tensor) -> Tensor:
        return self.model.token_outputs(ids, attention)

    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Return the values of token rows; all ranks compute the same."""
        self.ranks.announce("values", rows=[row.tolist() for row in rows], width=width)
        values = super().values(rows, width)
        self.model.reshard()
        return values

    def write(self, folder: Path) -> dict[str, str]:
        """Write a Hugging Face checkpoint, one file per rank; return the sha256 of each weights file and the index."""
        self.ranks.announce("write_version", folder=str(folder))
        digests = write_checkpoint(self.model.state_dict(), folder, self.ranks)
        if self.ranks.rank == 0:
            write_config(self, folder)
        return digests

    def verify(self, store: WeightsStore, version: int) -> None:
        """Verify that a version holds the weights of this critic, bit for bit, and that they are finite.

        Each rank compares its own slices. Together these are all bytes that `write` has hashed for the manifest, so
        that hashing them once more, which takes longer than the rest of a publish, would find nothing else.

        Raises:
            CheckpointError, RankFailed: a check failed on this or another rank.
        """
        self.ranks.announce("verify", root=str(store.root), version=version)

        def verify() -> None:
            if not all_finite(self.model.parameters()):
                raise CheckpointError("the weights are not finite")
            if wrong := self._differing(store.folder(version)):
                raise CheckpointError(f"{wrong[0]} differs from the trained weights")

        self.ranks.together(verify)

    def holds(self, store: WeightsStore, version: int) -> bool:
        """Return whether a version has the weights of this critic, bit for bit."""
        self.ranks.announce("holds", root=str(store.root), version=version)

        def compare() -> bool:
            return not self._differing(store.folder(version))

        try:
            return all(self.ranks.gather(self.ranks.together(compare)))
        except (CheckpointError, RankFailed):  # a file is damaged
            return False

    def _differing(self, folder: Path) -> list[str]:
        return differing(self.model.state_dict(), inspect_checkpoint(folder))


def critic_operations(critic: Callable[[], ShardedCritic]) -> dict[str, Callable[..., Any]]:
    """Return what ranks above 0 execute for each announced operation of a `ShardedCritic`."""
    return {
        "values": lambda rows, width: critic().values([np.asarray(row, np.int64) for row in rows], width),
        "write_version": lambda folder: critic().write(Path(folder)),
        "verify": lambda root, version: critic().verify(WeightsStore(Path(root)), version),
        "holds": lambda root, version: critic().holds(WeightsStore(Path(root)), version),
    }
