"""The weighted sum of rewards: a row that lacks a component has no reward, and says why."""

from __future__ import annotations

import numpy as np

from python_backend.rewards.weighted_sum import weighted_sum


def test_a_row_has_a_reward_exactly_when_every_component_is_finite() -> None:
    components = np.asarray([[1, 2], [np.nan, 2], [1, np.inf], [3e38, 3e38], [0, 0]], np.float32)
    rewards, errors = weighted_sum(
        ["a", "b"], np.asarray([1.0, 2.0]), components, {"a": ["", "KeyError: 'x'", *[""] * 3]}
    )
    np.testing.assert_array_equal(rewards, np.asarray([5, np.nan, np.nan, np.nan, 0], np.float32))
    assert errors == [
        "",
        "a: KeyError: 'x'",
        "b: scored inf, must be finite",
        "the weighted sum is inf, must be finite",
        "",
    ]
