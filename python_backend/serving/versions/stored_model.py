"""The versions of a served model: from a weights store, or a single fixed one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_model, is_same_model
from rlhf_triton.models.canary import canary_outputs, canary_row, check_canary
from rlhf_triton.models.gpu import staging
from rlhf_triton.python_backend.serving.scoring import Scoring
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess
from rlhf_triton.python_backend.serving.triton import Gauge, MetricCounters, log, log_error
from rlhf_triton.python_backend.serving.versions.follower import Follower, Version
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.wire.contract import CHECKPOINT_FINGERPRINT, CRITIC, STORE, TokenRow, VersionRange

COUNTERS = {
    "rlhf_weights_taken_up_total": "Versions of a model's weights that an instance loaded",
    "rlhf_weights_rejected_total": "Versions of a model's weights that an instance rejected",
}


@dataclass
class OneVersion:
    """A model that is never replaced, as the `Versions` of an engine."""

    version: Version
    changed: Any = None  # never called

    def is_arriving(self, demanded: VersionRange) -> bool:
        """Return False: the version never changes."""
        return False


def one_version(process: TorchProcess) -> OneVersion:
    """Load a model without versions.

    Raises CheckpointError if its folder has changed since the configuration was rendered, before this process replaced
    another one: clients would take the scores of two models for those of one.
    """
    folder = process.parameters.path("model")
    model = process.load(folder)
    rendered = process.parameters.optional(CHECKPOINT_FINGERPRINT)
    if rendered is not None and not is_same_model(rendered, fingerprint_model(folder)):
        raise CheckpointError(
            f"{folder} has another model, config.json or tokenizer than when the server was started; restore it, or "
            "start the server again"
        )
    return OneVersion(Version(0, model))


def follow_store(process: TorchProcess) -> Follower:
    """Load the version that CURRENT names, then follow the store.

    A `Follower` loads new versions in a background thread. A new version scores every request whose first forward pass
    has not started.
    """
    parameters = process.parameters
    served = Gauge(parameters.model, "rlhf_weights_version", "Version of a model's weights that is served")
    versions = MetricCounters(parameters.model, COUNTERS)
    store = WeightsStore(parameters.path(STORE))

    def load_checked(folder: Path, before: Any) -> Any:
        with process.loading_version(), staging(process.device):
            model = process.load(folder, before)
            canary = store.manifest(int(folder.name)).canary
            if canary is not None:  # several ranks wrote the version, and none has loaded all of it
                row = canary_row(model)
                with process.on_all_ranks(model, [TokenRow(row)], row.size):
                    values = canary_outputs(model)
                check_canary(model, values, canary)
        return model

    def count(number: int, rejected: bool) -> None:
        versions.add((not rejected, rejected))
        versions.publish()
        served.show(follower.version.number)

    follower = Follower(
        store,
        process.args["model_instance_name"],
        load=load_checked,
        swaps=parameters.text("reload") == "swap",
        name="critic" if parameters.model == CRITIC else "reward",
        log_error=log_error,
        count=count,
        freed=torch.cuda.empty_cache if process.device.type == "cuda" else lambda: None,
    )
    follower.start()
    process.stop_loading = lambda waits: follower.stop(waits=waits)
    log(f"{parameters.model}: serving weights version {follower.version.number}")
    return follower


def version_column(scoring: Scoring) -> np.ndarray:
    """Return int64 `[B, 1]`: the number of the version that scored the request, repeated for each row."""
    return np.full((len(scoring.rows), 1), scoring.model.number, np.int64)
