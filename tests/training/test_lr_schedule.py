"""The learning-rate schedule, and the policy's fields of it."""

from __future__ import annotations

import pytest

from python_backend.config import ActorSection, RunConfig
from python_backend.training.lr_schedule import scheduled_lr
from tests.support.settings import actor_section


def test_warm_up_cosine_and_constant_end():
    schedule = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "constant_steps": 10, "max_steps": 34}
    assert [scheduled_lr(step, **schedule) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert scheduled_lr(14, **schedule) == pytest.approx(0.55)  # half of the cosine
    assert scheduled_lr(24, **schedule) == pytest.approx(0.1)
    assert scheduled_lr(1_000_000, **schedule) == pytest.approx(0.1)


def rate_of(actor: ActorSection, step: int) -> float:
    return actor.optimizer.learning_rate(step, total_steps=actor.optimizer_steps)


def test_without_settings_the_policy_keeps_its_learning_rate():
    actor = actor_section(lr=9e-7, steps=3)
    assert {rate_of(actor, step) for step in range(100)} == {9e-7}  # to the last bit


def test_the_policy_s_cosine_ends_with_the_run():
    """Two passes over 3 minibatches (the last one smaller) in each of 10 steps; the first 2 train the critic alone."""
    schedule = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 4, "constant_steps": 4}
    sizes = {"steps": 10, "critic_warmup_steps": 2, "rollout_size": 20, "minibatch_size": 8, "update_epochs": 2}
    actor = actor_section(**sizes, **schedule)
    assert [rate_of(actor, step) for step in (0, 3, 4, 24, 44, 48, 99)] == pytest.approx([0.25, 1, 1, 0.5, 0, 0, 0])
    longer = actor_section(**sizes, **schedule, max_steps=88)
    assert rate_of(longer, 44) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("actor", "message"),
    [
        (
            {"lr": 1e-6, "min_lr": 1e-5},
            r"actor.optimizer.min_lr \(1e-05\) is above actor.optimizer.lr \(1e-06\); lower it, or remove it",
        ),
        (
            {"warmup_steps": 5000},
            r"warmup_steps \(5000\) \+ .*\(0\) is more than .*max_steps \(400, the whole run\)",
        ),
        (
            {"warmup_steps": 6, "constant_steps": 5, "max_steps": 10},
            r"actor.optimizer.warmup_steps \(6\) \+ actor.optimizer.constant_steps \(5\) is more than actor",
        ),
    ],
)
def test_settings_that_contradict_each_other(actor: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"actor": {"optimizer": actor}})
