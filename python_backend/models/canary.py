"""The canary row: a row of tokens whose values show whether a critic was stored and loaded correctly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.modeling import CriticModel

CANARY_TOKENS = 16
# Relative to the largest value. Equal weights differ by rounding only; another device or kernel rounds differently.
SERVED_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def canary_row(critic: CriticModel) -> np.ndarray:
    """Return the token ids, int64 `[16]`, on which the stored and the trained critic are compared."""
    return np.arange(CANARY_TOKENS, dtype=np.int64) % critic.limits.vocab_size


def canary_difference(values: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two critics' values for the canary row, relative to the largest value."""
    return float(np.abs(values - expected).max()) / max(1.0, float(np.abs(expected).max()))


def check_canary(critic: CriticModel, values: np.ndarray, expected: Sequence[float]) -> None:
    """Raise CheckpointError unless `values`, a served critic's for the canary row, are those of the trained one."""
    difference = canary_difference(values, np.asarray(expected, np.float32))
    if not difference <= SERVED_TOLERANCE[critic.model.dtype]:
        raise CheckpointError(f"the values for the canary row differ by {difference:.3g} from the trained critic's")
