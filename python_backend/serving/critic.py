"""Triton model `critic`: serves the weights version that CURRENT names and hot-swaps newer ones.

Replies with `values` FP32 [B, S], zero-padded, and `weights_version` INT64 [B, 1]. One version scores a whole request.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np

from python_backend.models.batching import padded_rows
from python_backend.models.canary import canary_row, check_canary
from python_backend.models.modeling import CriticModel
from python_backend.serving.follower import Follower, Version
from python_backend.serving.requests import RowReader, read_limits
from python_backend.serving.scoring import Scoring
from python_backend.serving.torch_scoring import TorchScoringModel
from python_backend.serving.triton import Call, Gauge, MetricCounters, log, log_error
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import (
    AFTER_CRITIC,
    PROMPT_LENGTHS,
    RESPONSE_VALUES,
    SENTENCES,
    VALUES,
    WEIGHTS_VERSION,
    ContractError,
    ScoringRows,
    check_size,
)

COUNTERS = {
    "rlhf_weights_taken_up_total": "Versions of the critic's weights that an instance loaded",
    "rlhf_weights_rejected_total": "Versions of the critic's weights that an instance rejected",
}


class TritonPythonModel(TorchScoringModel):
    """Scores rows with the current weights version.

    A `Follower` loads new versions in a background thread. A new version scores every request whose first forward pass
    has not started.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load. A reload through Triton runs this in a new process."""
        self.set_up_torch(args)
        parameters = self.parameters
        self._served = Gauge(parameters.model, "rlhf_weights_version", "Version of the critic's weights that is served")
        self._versions = MetricCounters(parameters.model, COUNTERS)
        self._store = WeightsStore(parameters.path("store"))
        self._follower = Follower(
            self._store,
            args["model_instance_name"],
            load=self._load,
            swaps=parameters.text("reload") == "swap",
            log_error=log_error,
            count=self._count,
        )
        self._follower.start()
        version = self._follower.version
        self.limits = read_limits(version.critic.limits, parameters)
        self._reader = RowReader(parameters.path("checkpoint"), self.limits, add_special_tokens=False)
        self.start()
        log(f"{parameters.model}: serving weights version {version.number}")

    def stop_loading(self) -> None:
        self._follower.stop()

    def lost(self) -> None:
        self._follower.abandon()

    def current_model(self) -> Version:
        return self._follower.version

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        rows = yield from self._reader.read(call)
        # The reader has checked the size of token requests; the size of sentences is known only after tokenisation.
        check_size(SENTENCES, len(rows.tokens), rows.width, self.limits)
        # If a caller names no outputs, Triton requests all of them. So a missing `prompt_lengths` is an error only if
        # `values` was not requested as well; otherwise the reply leaves `response_values` out.
        if RESPONSE_VALUES in call.wanted and VALUES not in call.wanted and rows.prompt_lengths is None:
            raise ContractError(f"{PROMPT_LENGTHS}: missing; the output {RESPONSE_VALUES} requires it")
        return rows

    def needs_forward(self, call: Call) -> bool:
        # The ensemble critic_infer always takes `after_critic` from this model, even if only `rewards` was requested;
        # that output needs no forward pass.
        return not call.wanted.isdisjoint((VALUES, RESPONSE_VALUES))

    def forward(self, model: Version, rows: list[np.ndarray], width: int) -> list[np.ndarray]:
        with self.on_all_ranks(model.critic, rows, width):
            return model.critic.values(rows, width)

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        wanted, rows = scoring.call.wanted, scoring.rows
        outputs = [output for output in scoring.outputs if output is not None]
        versions = np.full((len(rows.tokens), 1), scoring.model.number, np.int64)
        answer = {WEIGHTS_VERSION: versions, AFTER_CRITIC: versions}
        if VALUES in wanted:
            answer[VALUES] = padded_rows(outputs, rows.width)
        if RESPONSE_VALUES in wanted and rows.prompt_lengths is not None:
            # Indices p-1 ... length-2: the value of the state before each response token.
            parts = [output[p - 1 : -1] for output, p in zip(outputs, rows.prompt_lengths.tolist(), strict=True)]
            answer[RESPONSE_VALUES] = padded_rows(parts, max(1, *(part.size for part in parts)))
        return answer

    def _load(self, folder: Path, served: CriticModel | None) -> CriticModel:
        critic: CriticModel = self.load("load_critic", folder, served)
        canary = self._store.manifest(int(folder.name)).canary
        if canary is not None:  # several ranks wrote the version, and none of them has loaded it whole
            row = canary_row(critic)
            with self.on_all_ranks(critic, [row], row.size):
                values = critic.values([row], row.size)[0]
            check_canary(critic, values, canary)
        return critic

    def _count(self, number: int, rejected: bool) -> None:
        self._versions.add((not rejected, rejected))
        self._versions.publish()
        self._served.show(self._follower.version.number)
