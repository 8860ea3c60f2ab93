"""The reply of a process reward, from outputs that are scores float32 `[length_i]` at each token of a row."""

from collections.abc import Iterator

import numpy as np

from rlhf_triton.models.batching import padded_rows
from rlhf_triton.python_backend.serving.scoring import Reply, Scoring
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import RowSteps


def _steps(scoring: Scoring) -> Iterator[tuple[RowSteps, np.ndarray]]:
    """Yield the steps of each row and their scores."""
    for row, scores in zip(scoring.rows, scoring.outputs, strict=True):
        assert row.steps is not None
        yield row.steps, scores[row.steps.read_at]


def _rewards(scoring: Scoring) -> np.ndarray:
    """Return the lowest score of each row's steps; NaN for a row without steps."""
    return np.asarray([[scores.min() if scores.size else np.nan] for _, scores in _steps(scoring)], np.float32)


def _token_rewards(scoring: Scoring) -> np.ndarray:
    placed = np.zeros((len(scoring.rows), scoring.width), np.float32)
    for i, (at, scores) in enumerate(_steps(scoring)):
        placed[i, at.token_places] = scores
    return placed


def _step_rewards(scoring: Scoring) -> np.ndarray:
    rows = [scores for _, scores in _steps(scoring)]
    return padded_rows(rows, max(1, *(scores.size for scores in rows)))


def _step_ends(scoring: Scoring) -> np.ndarray:
    ends = [at.ends for at, _ in _steps(scoring)]
    return padded_rows([row_ends + 1 for row_ends in ends], max(1, *(row_ends.size for row_ends in ends)), np.int64) - 1


STEP_REPLY: Reply = {
    contract.REWARDS: _rewards,
    contract.TOKEN_REWARDS: _token_rewards,
    contract.STEP_REWARDS: _step_rewards,
    contract.STEP_ENDS: _step_ends,
}
