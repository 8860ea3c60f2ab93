"""Publishes the weights of a critic that is sharded over several ranks.

No rank holds the whole critic: each writes a part of the version and checks its own slices. An instance that stages the
version checks its forward pass: it must reproduce the values of the canary row in the manifest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.modeling import CriticModel, RewardModel
from python_backend.store.weights import Manifest, WeightsError
from python_backend.training.ranks import RankFailed
from trainer.publish import WAIT_POLL_S, Publisher
from trainer.sharded.critic import ShardedCritic
from trainer.verification import VersionRejected, rejected

logger = logging.getLogger(__name__)


class ShardedPublisher(Publisher):
    """Publishes versions that all ranks write; used on rank 0."""

    def canary(self, expected: np.ndarray) -> list[float] | None:
        return expected.tolist()

    def verify(self, version: int, model: CriticModel | RewardModel, expected: np.ndarray | None = None) -> None:
        assert isinstance(model, ShardedCritic)
        try:
            model.verify(self._store, version)
        except (WeightsError, CheckpointError, RankFailed) as error:
            raise rejected(version, error) from error

    def holds_weights(self, critic: CriticModel, version: int) -> bool:
        assert isinstance(critic, ShardedCritic)
        return critic.holds(self._store, version)

    def await_staging(self, manifest: Manifest, beat: Callable[[str], None]) -> None:
        """Wait until every live instance that serves has staged the version and reproduced the canary row.

        Instances that a reload through Triton replaces check the version when they start instead.

        Raises:
            VersionRejected: an instance could not load the version, or its values differ.
        """
        version, recover_at = manifest.version, time.monotonic() + self._timeout_s
        while self._reload == "swap":
            records = [record for record in self._store.serving() if record.version != version]
            waiting = [record for record in records if record.staged != version]
            refused = next((record for record in records if record not in waiting and record.staging_error), None)
            if refused is not None:
                raise VersionRejected(f"version {version} was refused by {refused.name}: {refused.staging_error}")
            if not waiting:
                return
            beat(f"waiting until version {version} is staged")
            self.heal()
            if time.monotonic() > recover_at:
                logger.warning("version %d is not staged yet: reloading %s through Triton", version, self._model)
                self._outcomes()
                recover_at = time.monotonic() + self._timeout_s
            time.sleep(WAIT_POLL_S)
