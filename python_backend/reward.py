"""The reward model inside tritonserver.
Given: `tokens` (+ `sequence_lengths`) or `sentences`. Returns: `rewards` FP32 [B, 1], the standardised score at the
last token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import numpy as np
import torch

from python_backend.contract import (
    REWARDS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TOKENS,
    ContractError,
    Limits,
    ScoringRows,
    check_row,
    scoring_rows,
    sentence_texts,
)
from python_backend.modeling import RewardModel, load_reward, quiet_transformers
from python_backend.serving import Call, Parameters, Scoring, ScoringModel, log, refuse_numpy_2
from python_backend.tokenization import load_tokenizer


class TritonPythonModel(ScoringModel):
    """Scores rows by one fixed checkpoint."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        refuse_numpy_2()
        quiet_transformers()
        parameters = Parameters(args)
        self.set_up(parameters)
        torch.set_num_threads(parameters.number("threads"))
        folder = parameters.path("checkpoint")
        self._model = load_reward(folder, device=parameters.text("device"), dtype=parameters.text("dtype"))
        self._standardize(parameters.text("standardization"))
        self.limits = with_max_length(self._model.limits, parameters.optional("max_length"))
        self._reader = SentenceReader(folder, self.limits)
        log(f"{parameters.model}: {folder.name}, rewards are (score - {self._model.mean:g}) / {self._model.std:g}")

    def current_model(self) -> RewardModel:
        return self._model

    def read(self, call: Call) -> ScoringRows:
        return self._reader.read(call)

    def forward(self, model: RewardModel, rows: list[np.ndarray]) -> list[np.ndarray]:
        return list(model.score(rows))

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        return {REWARDS: np.stack([output for output in scoring.outputs if output is not None])}

    def _standardize(self, setting: str) -> None:
        if setting == "off":
            self._model.mean, self._model.std = 0.0, 1.0
        elif setting != "checkpoint":
            constants = json.loads(setting)
            self._model.mean, self._model.std = constants["mean"], constants["std"]


class SentenceReader:
    """Reads a scoring request; tokenises `sentences`, which win over `tokens`, with the checkpoint's own tokenizer."""

    def __init__(self, folder: object, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._tokenizer = None

    def read(self, call: Call) -> ScoringRows:
        """The request's rows. Raises ContractError."""
        sentences = call.array(SENTENCES)
        if sentences is None:
            return scoring_rows(call.array(TOKENS), call.array(SEQUENCE_LENGTHS), self._limits)
        texts = sentence_texts(sentences)
        rows = [self._tokenize(text) for text in texts]
        for i, row in enumerate(rows):
            if row.size == 0:
                raise ContractError(f"{SENTENCES}[{i}]: {texts[i]!r} has no token, an empty sequence cannot be scored")
            check_row(row, i, self._limits)
        return ScoringRows(rows, max(row.size for row in rows))

    def _tokenize(self, text: str) -> np.ndarray:
        if self._tokenizer is None:  # only clients with another tokenizer need it
            self._tokenizer = load_tokenizer(self._folder)  # type: ignore[arg-type]
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        return np.asarray(ids[: self._limits.max_length], dtype=np.int64)


def with_max_length(limits: Limits, configured: str | None) -> Limits:
    """The checkpoint's limits, with the configured longest sequence where that is shorter."""
    lengths = [length for length in (limits.max_length, int(configured) if configured else None) if length]
    return dataclasses.replace(limits, max_length=min(lengths, default=None))
