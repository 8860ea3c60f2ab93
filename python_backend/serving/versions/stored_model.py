"""Base of the scoring models whose weights are versions in a store: serves CURRENT and hot-swaps newer versions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from python_backend.models.canary import canary_outputs, canary_row, check_canary
from python_backend.models.card.streams import staging
from python_backend.serving.torch_scoring import TorchScoringModel
from python_backend.serving.triton import Gauge, MetricCounters, log, log_error
from python_backend.serving.versions.follower import Follower, Version
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import STORE

COUNTERS = {
    "rlhf_weights_taken_up_total": "Versions of a model's weights that an instance loaded",
    "rlhf_weights_rejected_total": "Versions of a model's weights that an instance rejected",
}


class StoredModel(TorchScoringModel):
    """A scoring model that follows a weights store, after `follow`, or has one fixed version, after `fix`.

    A `Follower` loads new versions in a background thread. A new version scores every request whose first forward pass
    has not started.
    """

    _follower: Follower | None = None

    def follow(self, args: Mapping[str, str], name: str) -> Any:
        """Serve the version that CURRENT names, and later ones; return its model. Call after `set_up_torch`.

        `name`: the model's name in the configuration, `critic` or `reward`.
        """
        model = self.parameters.model
        self._served = Gauge(model, "rlhf_weights_version", "Version of a model's weights that is served")
        self._versions = MetricCounters(model, COUNTERS)
        self._store = WeightsStore(self.parameters.path(STORE))
        self._follower = follower = Follower(
            self._store,
            args["model_instance_name"],
            load=self._load,
            swaps=self.parameters.text("reload") == "swap",
            name=name,
            log_error=log_error,
            count=self._count,
            freed=torch.cuda.empty_cache if self.device.type == "cuda" else lambda: None,
        )
        follower.start()
        version = follower.version
        log(f"{model}: serving weights version {version.number}")
        return version.model

    def fix(self, model: Any) -> Any:
        """Serve this model and no other one; return it."""
        self._fixed = Version(0, model)
        return model

    @abstractmethod
    def load_version(self, folder: Path, served: Any) -> Any:
        """Load the model in a version's folder; `served` is the model served now, None for the first."""

    def stop_loading(self, *, waits: bool = True) -> None:
        if self._follower is not None:
            self._follower.stop(waits=waits)

    def current_model(self) -> Version:
        return self._fixed if self._follower is None else self._follower.version

    def _load(self, folder: Path, served: Any) -> Any:
        with self.blaming_the_device(), staging(self.device):
            model = self.load_version(folder, served)
            canary = self._store.manifest(int(folder.name)).canary
            if canary is not None:  # several ranks wrote the version, and none of them has loaded it whole
                row = canary_row(model)
                with self.on_all_ranks(model, [row], row.size):
                    values = canary_outputs(model)
                check_canary(model, values, canary)
        return model

    def _count(self, number: int, rejected: bool) -> None:
        self._versions.add((not rejected, rejected))
        self._versions.publish()
        self._served.show(self.current_model().number)


def version_column(version: Version, num_rows: int) -> np.ndarray:
    """Return the version's number for every row of a reply, int64 `[num_rows, 1]`."""
    return np.full((num_rows, 1), version.number, np.int64)
