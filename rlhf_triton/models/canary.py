"""The canary row: fixed tokens whose outputs show whether a model was stored and loaded correctly."""

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.models.modeling import CriticModel, RewardModel

CANARY_TOKENS = 16
# Relative to the largest value. Equal weights differ by rounding only; another device or kernel rounds differently.
SERVED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def canary_row(model: CriticModel | RewardModel) -> np.ndarray:
    """Return the canary row: int64 token ids, 16 for a critic; a reward model's row starts with its `header`."""
    row = np.arange(CANARY_TOKENS, dtype=np.int64) % model.limits.vocab_size
    return np.append(np.array(model.header, np.int64), row)


def canary_outputs(model: CriticModel | RewardModel) -> np.ndarray:
    """Return the values float32 `[16]`, or the rewards float32 `[A]`, of the canary row."""
    return model.outputs_of(canary_row(model))


def canary_difference(values: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference between two models' canary outputs, relative to the largest output (at least 1)."""
    return float(np.abs(values - expected).max()) / max(1.0, float(np.abs(expected).max()))


def check_canary(model: CriticModel | RewardModel, values: np.ndarray, expected: Sequence[float]) -> None:
    """Raise CheckpointError if `values`, the served model's canary outputs, differ from the published model's.

    `expected`: the published model's outputs.
    """
    difference = canary_difference(values, np.asarray(expected, np.float32))
    if not difference <= SERVED_TOLERANCE[model.model.dtype]:
        raise CheckpointError(f"the values for the canary row differ by {difference:.3g} from the published model's")
