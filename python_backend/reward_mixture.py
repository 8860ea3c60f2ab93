"""The weighted sum of several rewards, the last step of the ensemble that reward_model is where there are several.
Given: for each component its scores FP32 [B, 1], NaN where it failed, and, of a function, the causes BYTES [B, 1].
Returns: `rewards` FP32 [B, 1], `reward_components` FP32 [B, C], `reward_errors` BYTES [B, 1]. NaN: no score.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from python_backend.contract import REWARD_COMPONENTS, REWARD_ERRORS, REWARD_WEIGHTS, REWARDS, texts_array
from python_backend.serving import Call, Parameters, refuse_numpy_2


def weighted_sum(
    names: Sequence[str], weights: np.ndarray, components: np.ndarray, causes: Mapping[str, Sequence[str]]
) -> tuple[np.ndarray, list[str]]:
    """`(rewards, errors)` of B rows: a row whose every component is finite has a reward, any other a cause.

    Args:
        weights: `[C]`.
        components: `[B, C]`.
        causes: for each component, if known, the B causes of failure, empty where there is none.

    Returns:
        rewards float32 `[B]`, NaN where there is an error; B errors, empty where there is a reward.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told below
        rewards = (components.astype(np.float64) @ weights).astype(np.float32)
    errors = []
    for i, row in enumerate(components):
        failed = [
            f"{name}: {causes.get(name, [''] * len(components))[i] or f'scored {row[j]:g}, must be finite'}"
            for j, name in enumerate(names)
            if not np.isfinite(row[j])
        ]
        if not failed and not np.isfinite(rewards[i]):
            failed = [f"the weighted sum is {rewards[i]:g}, must be finite"]
        errors.append("; ".join(failed))
    return np.where([error == "" for error in errors], rewards, np.float32(np.nan)), errors


class TritonPythonModel:
    """Adds up what the other models scored."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        refuse_numpy_2()
        parameters = Parameters(args)
        self._names: list[str] = json.loads(parameters.text(REWARD_COMPONENTS))
        self._weights = np.asarray(json.loads(parameters.text(REWARD_WEIGHTS)), np.float64)

    def execute(self, requests: list[Any]) -> None:
        """Triton's entry point."""
        for request in requests:
            call = Call(request)
            try:
                call.answer(self._mix(call))
            except Exception as error:  # process edge: one request's error is that request's answer
                call.fail(error)

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
