"""Triton model `critic`: serves the weights version that CURRENT names and hot-swaps newer ones.

Replies with `values` FP32 [B, S], zero-padded, and `weights_version` INT64 [B, 1]. One version scores a whole request.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np

from python_backend.models.batching import padded_rows
from python_backend.models.modeling import CriticModel
from python_backend.serving.requests import RowReader, read_limits
from python_backend.serving.scoring import Scoring
from python_backend.serving.torch_scoring import Launch
from python_backend.serving.triton import Call
from python_backend.serving.versions.follower import Version
from python_backend.serving.versions.stored_model import StoredModel, version_column
from python_backend.wire.contract import (
    AFTER_CRITIC,
    COMPUTE_US,
    PROMPT_LENGTHS,
    QUEUE_US,
    RESPONSE_VALUES,
    SENTENCES,
    VALUES,
    WEIGHTS_VERSION,
    ContractError,
    ScoringRows,
    check_size,
)


class TritonPythonModel(StoredModel):
    """Scores rows with the current weights version."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load. A reload through Triton runs this in a new process."""
        self.set_up_torch(args)
        critic: CriticModel = self.follow(args, "critic")
        self.limits = read_limits(critic.limits, self.parameters)
        self._reader = RowReader(self.parameters.path("checkpoint"), self.limits, add_special_tokens=False)
        self.start()

    def load_version(self, folder: Path, served: CriticModel | None) -> CriticModel:
        return self.load("load_critic", folder, served)

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
        return not call.wanted.isdisjoint((VALUES, RESPONSE_VALUES, QUEUE_US, COMPUTE_US))

    def forward_of(self, model: Version) -> Launch:
        return model.model.launch

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        wanted, rows = scoring.call.wanted, scoring.rows
        versions = version_column(scoring.model, len(rows.tokens))
        answer = {WEIGHTS_VERSION: versions, AFTER_CRITIC: versions}
        if VALUES in wanted:
            answer[VALUES] = padded_rows(scoring.outputs, rows.width)
        if RESPONSE_VALUES in wanted and rows.prompt_lengths is not None:
            # Indices p-1 ... length-2: the value of the state before each response token.
            parts = [
                output[p - 1 : -1] for output, p in zip(scoring.outputs, rows.prompt_lengths.tolist(), strict=True)
            ]
            answer[RESPONSE_VALUES] = padded_rows(parts, max(1, *(part.size for part in parts)))
        return answer
