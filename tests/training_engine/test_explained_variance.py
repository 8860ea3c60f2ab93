"""Tests of `training_engine.explained_variance`: hand-computed values, and returns that do not vary."""

import numpy as np
import pytest

from rlhf_triton.training_engine.explained_variance import explained_variance


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 1),
        ([8, 9, 10], [1, 2, 3], 1),
        ([4, 4, 4], [1, 2, 3], 0),
        ([-1, -2, -3], [1, 2, 3], -3),  # the residual 2R has four times the variance
        ([1, 2, 3], [4, 4, 4], 0),  # nothing to explain
        ([1, 1, 3], [1, 2, 3], 2 / 3),  # residuals 0, 1, 0: 2/9 of 2/3
        ([], [], 0),
    ],
)
def test_explained_variance_matches_hand_computed_values(values, returns, expected):
    found = explained_variance(np.array(values, np.float32), np.array(returns, np.float32))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.1, 117.3, -1234.5])
def test_rounding_noise_of_the_returns_is_no_variance(value):
    returns = np.full(35, value, np.float32)
    values = np.random.default_rng(0).normal(size=35)
    for _ in range(2):
        assert explained_variance(values, returns) == 0
        returns[9] = np.nextafter(returns[9], np.float32(np.inf))
