"""Triton model `reward_mixture`: computes the weighted sum of several rewards, as the last step of `reward_model`.

The inputs are the scores of each component, FP32 [B, 1], NaN where scoring failed, and the error messages of each
reward function, BYTES [B, 1].
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from python_backend.rewards.weighted_sum import weighted_sum
from python_backend.serving.triton import Call, Parameters, answer_each, triton_model
from python_backend.wire.contract import REWARD_COMPONENTS, REWARD_ERRORS, REWARD_WEIGHTS, REWARDS, texts_array


class WeightedSum:
    """Computes the weighted sum of the components' scores."""

    def __init__(self, args: Mapping[str, str]) -> None:
        parameters = Parameters(args)
        self._names: list[str] = json.loads(parameters.text(REWARD_COMPONENTS))
        self._weights = np.asarray(json.loads(parameters.text(REWARD_WEIGHTS)), np.float64)

    def execute(self, calls: Sequence[Call]) -> None:
        """Answer the requests at once."""
        answer_each(calls, lambda call: call.answer(self._mix(call)))

    def finalize(self) -> None:
        """Do nothing: no request is left."""

    def _mix(self, call: Call) -> dict[str, np.ndarray]:
        columns = [call.array(f"component_{name}") for name in self._names]
        components = np.concatenate([column for column in columns if column is not None], axis=1)
        causes = {}
        for name in self._names:
            found = call.array(f"error_{name}")
            if found is not None:
                causes[name] = [item.decode() for item in found[:, 0]]
        rewards, errors = weighted_sum(self._names, self._weights, components, causes)
        return {
            REWARDS: rewards[:, None],
            REWARD_COMPONENTS: np.where(np.isfinite(components), components, np.float32(np.nan)),
            REWARD_ERRORS: texts_array(errors),
        }


TritonPythonModel = triton_model(WeightedSum)
