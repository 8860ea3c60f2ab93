"""Triton model `reward_model`: replies with `rewards`, the standardised scores.

`rewards` is FP32 [B, 1], or [B, A] if the A attributes are not merged.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import cast

import numpy as np

from python_backend.models.modeling import Pooling, RewardModel, Standardization
from python_backend.serving.requests import RowReader, read_limits
from python_backend.serving.scoring import Scoring
from python_backend.serving.torch_scoring import TorchScoringModel
from python_backend.serving.triton import Call, log
from python_backend.wire.contract import REWARDS, ScoringRows


class TritonPythonModel(TorchScoringModel):
    """Scores rows with one fixed checkpoint."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self.set_up_torch(args)
        parameters = self.parameters
        folder = parameters.path("checkpoint")
        self._model: RewardModel = self.load(
            "load_reward",
            folder,
            pooling=cast(Pooling, parameters.text("pooling")),
            attribute_weights=json.loads(parameters.text("attribute_weights")),
            merge_attributes=parameters.text("merge_attributes") == "true",
            standardization=read_standardization(parameters.text("standardization")),
        )
        self.limits = read_limits(self._model.limits, parameters)
        self._reader = RowReader(
            folder,
            self.limits,
            add_special_tokens=parameters.text("add_special_tokens") == "true",
            skipped_pad_id=self._model.skipped_pad_id,
        )
        self.start()
        log(f"{parameters.model}: {folder.name}, rewards are (score - {self._model.mean:g}) / {self._model.std:g}")

    def current_model(self) -> RewardModel:
        return self._model

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        return self._reader.read(call)

    def forward(self, model: RewardModel, rows: list[np.ndarray], width: int) -> list[np.ndarray]:
        with self.on_all_ranks(model, rows, width):
            return list(model.score(rows, width))

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        return {REWARDS: np.stack([output for output in scoring.outputs if output is not None])}


def read_standardization(setting: str) -> Standardization:
    """Parse the model parameter `standardization`: `checkpoint`, `off`, or JSON `{"mean": m, "std": s}`."""
    if setting in ("checkpoint", "off"):
        return cast(Standardization, setting)
    constants = json.loads(setting)
    return constants["mean"], constants["std"]
