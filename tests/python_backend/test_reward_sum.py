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


def test_a_function_that_does_not_apply_is_left_out_of_the_sum() -> None:
    """As in TRL, whose functions return None; but where none applies there is no reward, rather than 0."""
    components = np.asarray([[np.nan, 2], [np.nan, np.nan], [np.nan, 2], [np.nan, np.inf]], np.float32)
    causes = {"a": ["", "", "KeyError: 'x'", ""], "b": [""] * 4}
    rewards, errors = weighted_sum(["a", "b"], np.asarray([1.0, 2.0]), components, causes)
    np.testing.assert_array_equal(rewards, np.asarray([4, np.nan, np.nan, np.nan], np.float32))
    assert errors == ["", "no reward function applies to this row", "a: KeyError: 'x'", "b: scored inf, must be finite"]
    rewards, errors = weighted_sum(["model"], np.asarray([1.0]), components[:1, :1], {})
    assert errors == ["model: scored nan, must be finite"], "a model always applies"
