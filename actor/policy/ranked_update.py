"""The policy update on several ranks: rank 0 announces it and sends the batch, and each rank trains on its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from actor.data.rollout import PPOBatch
from actor.policy.update import PolicyUpdate
from python_backend.training.ranks import Ranks


class RankedUpdate(PolicyUpdate):
    """This rank's part of the policy update."""

    def __init__(self, *args: Any, ranks: Ranks, **others: Any) -> None:
        """Arguments as of `PolicyUpdate`; the policy must be a `ShardedPolicy`."""
        super().__init__(*args, **others)
        self._ranks = ranks

    def run(self, batch: PPOBatch | None, *, seed: int, kl_coef: float) -> dict[str, float]:
        """Train as `PolicyUpdate.run` does; collective. Other ranks than 0 pass no batch."""
        self._ranks.announce("update", seed=seed, kl_coef=kl_coef)
        names = [field.name for field in dataclasses.fields(PPOBatch)]
        given = None if batch is None else {name: getattr(batch, name) for name in names}
        sent = self._ranks.broadcast(given and {name: tensor for name, tensor in given.items() if tensor is not None})
        return super().run(PPOBatch(**{name: sent.get(name) for name in names}), seed=seed, kl_coef=kl_coef)  # type: ignore[arg-type]
