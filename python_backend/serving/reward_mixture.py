"""Triton model `reward_mixture`: computes the weighted sum of several rewards, as the last step of `reward_model`.

Its inputs are, per component, the scores FP32 [B, 1], NaN where scoring failed, and, per reward function, error
messages BYTES [B, 1].
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_triton.python_backend.serving.triton import Call, answer_each, log_error, parameters_of, triton_model
from rlhf_triton.wire.contract import REWARD_COMPONENTS, REWARD_ERRORS, REWARD_WEIGHTS, REWARDS, Arrays, texts_array


def weighted_sum(
    names: Sequence[str], weights: np.ndarray, components: np.ndarray, causes: Mapping[str, Sequence[str]]
) -> tuple[np.ndarray, list[str]]:
    """Return `(rewards, errors)` of B rows. A row has a reward if its applicable components and their sum are finite.

    NaN without an error message means that the function does not apply to the row: the sum omits the component. If no
    component applies, the row has no reward. Components of weight 0 are only charted and never affect a row. If all
    weights are 0, because only an environment's rewards count, every row has the reward 0.

    Args:
        names: names of the C components, for error messages.
        weights: `[C]`.
        components: `[B, C]`, not finite where scoring failed.
        causes: component name -> B error messages, each empty if that row has a score. Components may be missing.

    Returns:
        rewards float32 `[B]`, NaN where there is an error; B errors, empty where there is a reward.
    """
    has_cause = np.asarray([causes.get(name, ["no cause"] * len(components)) for name in names]).T != ""
    counts = weights != 0
    applies = (has_cause | ~np.isnan(components)) & counts
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow becomes an error message below
        rewards = (np.where(applies, components, 0.0) @ weights).astype(np.float32)
    errors = []
    for i, row in enumerate(components):
        failed = [
            f"{name}: {causes.get(name, [''] * len(components))[i] or f'scored {row[j]:g}, must be finite'}"
            for j, name in enumerate(names)
            if applies[i, j] and not np.isfinite(row[j])
        ]
        if counts.any() and not applies[i].any():
            failed = ["no reward function applies to this row"]
        if not failed and not np.isfinite(rewards[i]):
            failed = [f"the weighted sum is {rewards[i]:g}, must be finite"]
        errors.append("; ".join(failed))
    return np.where([error == "" for error in errors], rewards, np.float32(np.nan)), errors


class WeightedSum:
    """Computes the weighted sum of the components' scores."""

    def __init__(self, args: Mapping[str, str]) -> None:
        parameters = parameters_of(args)
        self._names: list[str] = json.loads(parameters.text(REWARD_COMPONENTS))
        self._weights = np.asarray(json.loads(parameters.text(REWARD_WEIGHTS)), np.float64)
        self._silent = {name for name, weight in zip(self._names, self._weights, strict=True) if weight == 0}

    def execute(self, calls: Sequence[Call]) -> None:
        """Answer the requests at once."""
        answer_each(calls, lambda call: call.answer(self._mix(call)))

    def finalize(self) -> None:
        """Do nothing: no request is left."""

    def _mix(self, call: Call) -> Arrays:
        columns = [call.array(f"component_{name}") for name in self._names]
        components = np.concatenate([column for column in columns if column is not None], axis=1)
        causes = {}
        for name in self._names:
            reasons = call.array(f"error_{name}")
            if reasons is not None:
                causes[name] = [item.decode() for item in reasons[:, 0]]
        rewards, errors = weighted_sum(self._names, self._weights, components, causes)
        for name in self._silent & causes.keys():
            if cause := next(filter(None, causes[name]), ""):  # no reply reports it
                self._silent.remove(name)
                log_error(f"{name}, which has weight 0 and is only charted, failed for the first time: {cause}")
        return {
            REWARDS: rewards[:, None],
            REWARD_COMPONENTS: np.where(np.isfinite(components), components, np.float32(np.nan)),
            REWARD_ERRORS: texts_array(errors),
        }


TritonPythonModel = triton_model(WeightedSum)
