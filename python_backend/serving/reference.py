"""Triton model `reference`: log-probs under the frozen initial policy.

Replies with `logprobs` FP32 [B, S], zero-padded. Index t is the log-prob of token t+1 under the sampling distribution:
at the sampling temperature, with banned tokens excluded.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping

import numpy as np

from python_backend.models.batching import padded_rows
from python_backend.models.language_model import LanguageModel
from python_backend.serving.requests import read_limits
from python_backend.serving.scoring import Scoring
from python_backend.serving.torch_scoring import Launch, TorchScoringModel
from python_backend.serving.triton import Call, log
from python_backend.wire import contract
from python_backend.wire.contract import ContractError, ScoringRows, scoring_rows


class TritonPythonModel(TorchScoringModel):
    """Computes log-probs with one fixed checkpoint."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self.set_up_torch(args)
        parameters = self.parameters
        folder = parameters.path("checkpoint")
        temperature, banned = parameters.text(contract.TEMPERATURE), parameters.text(contract.BANNED_TOKEN_IDS)
        self._model: LanguageModel = self.load(
            "load_language_model", folder, temperature=float(temperature), banned_token_ids=json.loads(banned)
        )
        self.limits = read_limits(self._model.limits, parameters)
        self.start()
        log(f"{parameters.model}: {folder.name}, log-probs at temperature {temperature}, banned tokens {banned}")

    def current_model(self) -> LanguageModel:
        return self._model

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        yield from ()  # makes this a generator; token rows are read without yielding
        tokens = call.array(contract.TOKENS)
        if tokens is None:
            raise ContractError(f"{contract.TOKENS}: missing")
        return scoring_rows(tokens, call.array(contract.SEQUENCE_LENGTHS), limits=self.limits)

    def forward_of(self, model: LanguageModel) -> Launch:
        return model.launch

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        return {contract.LOGPROBS: padded_rows(scoring.outputs, scoring.rows.width)}
