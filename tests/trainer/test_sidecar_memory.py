"""The sidecar when memory does not suffice: smaller micro-batches, failed steps, and an end with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sidecar_rig import Rig, payload

from python_backend.models.card.memory import OutOfMemory
from trainer.critic_update import CriticUpdate, TrainingRow, split_rows

pytest_plugins = ["sidecar_fixtures"]
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."
BATCH = 4  # sequences of an optimizer step in a rig; a step of the journal has two of them


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A card that holds `tokens` of a micro-batch, in its backward pass; `lacks` says so of a single micro-batch."""
    card: dict[str, Any] = {"tokens": 10**6, "lacks": lambda rows: False}
    accumulate = CriticUpdate._accumulate

    def limited(update: CriticUpdate, rows: list[TrainingRow], num_tokens: float) -> float:
        loss = accumulate(update, rows, num_tokens)
        if len(rows) * max(row.tokens.size for row in rows) > card["tokens"] or card["lacks"](rows):
            raise torch.OutOfMemoryError(FULL)
        return loss

    monkeypatch.setattr(CriticUpdate, "_accumulate", limited)
    return card


def of_step(step: int, *, sequences: slice = slice(None)) -> Callable[[list[TrainingRow]], bool]:
    """Return whether a micro-batch has one of the sequences of this step of the journal."""
    chosen = {row.tokens.tobytes() for row in list(split_rows(payload(step)))[sequences]}
    return lambda rows: any(row.tokens.tobytes() in chosen for row in rows)


def lines(rig: Rig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (rig.config.run.dir / "critic_metrics.jsonl").read_text().splitlines()]


def assert_trained_alike(weights: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare weights trained in micro-batches of different sizes, up to rounding.

    GPT-2's biases of keys (16 of 4481 weights) are left out: their gradient is rounding, which Adam scales up.
    """
    assert ((weights - wanted).abs() > 1e-5).float().mean() < 0.01


def test_what_does_not_fit_is_trained_in_smaller_micro_batches(rig: Rig, straight: Rig, card: dict[str, Any]):
    card["tokens"] = 10
    results = rig.train(1, 2, 3)
    expected = [straight.journal.result(entry) for entry in straight.journal.entries()][:3]
    for result, wanted in zip(results, expected, strict=True):
        assert wanted is not None
        assert (result.error, result.weights_version) == (None, wanted.weights_version)
        assert result.loss_mean == pytest.approx(wanted.loss_mean, rel=1e-5)
    assert_trained_alike(rig.weights(3), straight.weights(3))
    rig.stop()
    counts = [line["out_of_memory/trainer.token_budget"] for line in lines(rig) if "loss_mean" in line]
    assert counts[0] >= 1
    assert counts[1:] == [0, 0]  # it stays halved


@pytest.mark.parametrize("fits_later", [False, True])
def test_a_step_that_does_not_fit_fails_and_training_goes_on(
    rig: Rig, straight: Rig, card: dict[str, Any], fits_later: bool
):
    card["lacks"] = of_step(2)
    first, second = rig.train(1, 2)
    assert first.error is None
    assert (second.weights_version, second.loss_mean) == (1, None)
    assert "CUDA out of memory" in str(second.error)
    assert "lower actor.generation.max_new_tokens or set trainer.gradient_checkpointing" in str(second.error)
    rig.kill()
    assert lines(rig)[-1]["error"] == second.error
    assert lines(rig)[-1]["out_of_memory/trainer.token_budget"] >= 1
    if fits_later:
        card["lacks"] = lambda rows: False
    assert rig.start().train(3)[0].error is None  # a replay leaves it out, whether it fits now or not
    after = rig.weights()
    assert rig.rewind(2).error is None  # and so does a rewind
    assert_trained_alike(rig.weights(), straight.weights(1))
    assert rig.train(3)[0].error is None
    assert_trained_alike(rig.weights(), after)


@pytest.mark.parametrize("fits_later", [False, True])
def test_an_optimizer_step_that_does_not_fit_is_skipped_now_and_in_a_replay(
    rig: Rig, card: dict[str, Any], fits_later: bool
):
    card["lacks"] = of_step(1, sequences=slice(BATCH))
    (result,) = rig.train(1)
    assert (result.error, result.weights_version) == (None, 1)
    served = rig.weights()
    rig.kill()
    (line,) = [line for line in lines(rig) if "loss_mean" in line]
    assert (line["optimizer_steps"], line["skipped_steps"]) == (1, 1)
    if fits_later:
        card["lacks"] = lambda rows: False
    assert rig.start().rewind(1).error is None
    assert_trained_alike(rig.weights(), served)


@pytest.mark.parametrize("sequences", [slice(None), slice(BATCH), slice(BATCH, None)], ids=["all", "first", "last"])
def test_an_acknowledged_step_that_no_longer_fits_ends_the_sidecar(rig: Rig, card: dict[str, Any], sequences: slice):
    """Its weights are served and cannot be reproduced: another process may have taken the memory."""
    rig.train(1, 2)
    rig.kill()
    card["lacks"] = of_step(2, sequences=sequences)
    error = rig.start().ended()
    assert isinstance(error, OutOfMemory)
    assert "not even one row alone fits" in str(error)
    card["lacks"] = lambda rows: False
    assert rig.start().train(3)[0].weights_version == 3
