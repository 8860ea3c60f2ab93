"""The critic update on several ranks: micro-batches are dealt to the ranks, gradients are averaged over them.

Rank 0 reads payloads and decides; the other ranks follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from python_backend.config import TrainerSection
from python_backend.models.batching import plan_micro_batches
from python_backend.models.modeling import write_config
from python_backend.models.sharded_tensors import whole
from python_backend.store.sealed_folder import DamagedCheckpoint, hashes, verify_folder
from python_backend.training.adamw import named_state
from python_backend.training.ranks import RankFailed, Ranks
from python_backend.training.sharding import sync_gradients, write_slices
from python_backend.wire.training_payload import TrainPayload
from trainer.critic_update import MAX_ROWS, CriticUpdate, TrainingRow, UpdateReport
from trainer.sharded.critic import ShardedCritic, critic_operations
from trainer.trained_critic import build_critic


class ShardedUpdate(CriticUpdate):
    """A critic with its optimizer, sharded over the ranks."""

    critic: ShardedCritic

    def __init__(self, settings: TrainerSection, seed: int, ranks: Ranks, folder: Path) -> None:
        """Load the critic in `folder`, of which each rank keeps its slices, and create its optimizer; collective.

        Args:
            seed: of torch's random state.
        """
        ranks.announce("load", folder=str(folder))
        torch.manual_seed(seed)
        # The weights are mapped from the file and sharded layer by layer, so that no rank has a copy of all of them.
        mapped = settings.model_copy(update={"device": "cpu", "precision": "float32"})
        critic = ranks.together(lambda: build_critic(folder, mapped, seed=seed))
        super().__init__(ShardedCritic(critic, ranks, settings.precision), settings)
        self._ranks = ranks

    def train(
        self, payload: TrainPayload | None, progress: Callable[[int], None], skip: Collection[int] | None = None
    ) -> UpdateReport:
        """Train on the payload of rank 0; the other ranks pass None."""
        self._ranks.announce("train", skip=skip)
        arrays = {} if payload is None else vars(payload)
        sent = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        received = self._ranks.broadcast(sent or None)
        return super().train(TrainPayload(**{name: each.numpy() for name, each in received.items()}), progress, skip)

    def write(self, folder: Path) -> dict[str, str]:
        """Write weights, optimizer and random state, each rank its slices; return the sha256 of each file."""
        self._ranks.announce("write", folder=str(folder))
        state = named_state(self.optimizer, self.parameters)
        write_slices({**self._stored_weights(), **state, **self._random_state()}, folder)
        if self._ranks.rank == 0 and not self.settings.lora_rank:
            write_config(self.critic, folder)
        own = self._ranks.together(lambda: hashes(folder, part=self._ranks.rank, parts=self._ranks.size))
        parts = self._ranks.gather(own)
        return {name: digest for part in parts for name, digest in part.items()}

    def read(self, folder: Path, optimizer_step: int) -> None:
        """Load what any number of ranks wrote. Raises as `CriticUpdate.read`."""
        self._ranks.announce("read", folder=str(folder), optimizer_step=optimizer_step)
        try:
            self._ranks.together(lambda: verify_folder(folder, part=self._ranks.rank, parts=self._ranks.size))
        except RankFailed as error:
            raise DamagedCheckpoint(str(error)) from error
        self._read_slices(folder)
        self.optimizer_step = optimizer_step

    def _micro_batches(self, batch: list[TrainingRow]) -> Iterator[list[TrainingRow]]:
        """Yield this rank's micro-batches, the same number on every rank; one without targets if there are too few."""
        rank, size = self._ranks.rank, self._ranks.size
        lengths = [row.tokens.size for row in batch]
        max_rows = min(MAX_ROWS, -(-len(batch) // size))  # at least one micro-batch for each rank, if possible
        plan = plan_micro_batches(lengths, token_budget=self.settings.token_budget, max_rows=max_rows)
        for i in range(0, len(plan), size):
            sync_gradients(self.critic.model, is_last=i + size >= len(plan))
            if i + rank < len(plan):
                yield [batch[row] for row in plan[i + rank]]
            else:
                shortest = batch[plan[0][0]]
                yield [replace(shortest, mask=np.zeros_like(shortest.mask))]

    def _backward(self, loss: Tensor) -> None:
        (loss * self._ranks.size).backward()  # gradients are averaged over the ranks

    def _total(self, loss: float) -> float:
        total = torch.tensor(loss, dtype=torch.float64, device=self._ranks.device)
        dist.all_reduce(total)
        return float(total)

    def _clip(self) -> Tensor:
        return whole(super()._clip())


def follow_rank_0(settings: TrainerSection, seed: int, ranks: Ranks) -> None:
    """Execute what rank 0 announces until it ends the job. Raises RankLost if it dies."""
    update: ShardedUpdate

    def load(folder: str) -> None:
        nonlocal update
        update = ShardedUpdate(settings, seed, ranks, Path(folder))

    ranks.operations.follow(
        {
            "load": load,
            "train": lambda skip: update.train(None, lambda _: None, skip),
            "write": lambda folder: update.write(Path(folder)),
            "read": lambda folder, optimizer_step: update.read(Path(folder), optimizer_step),
            **critic_operations(lambda: update.critic),
        }
    )
