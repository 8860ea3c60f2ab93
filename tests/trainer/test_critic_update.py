"""`trainer.critic_update`: how a payload is packed and cut changes nothing, the same bits come out, and it learns."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, save_tiny

from python_backend.config import TrainerSection
from python_backend.models.modeling import CriticModel
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import TrainPayload, train_payload
from tests.support.loaders import load_critic
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate, UpdateReport, split_rows

SETTINGS = {
    "lr": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 0,
    "constant_steps": 0,
    "max_steps": 1000,
    "precision": "float32",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder, "llama", "critic")
    return folder


def settings(**changes: object) -> TrainerSection:
    return trainer_section(**{**SETTINGS, **changes})


def arrays(num_rows: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """A padded payload; the target of a token is 1 if it is even, else 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, (num_rows, 1))
    width = int(lengths.max())
    tokens = np.where(np.arange(width)[None] < lengths, rng.integers(1, VOCAB, (num_rows, width)), 0)
    mask = ((np.arange(width - 1)[None] < lengths - 1) & (rng.random((num_rows, width - 1)) < 0.8)).astype(np.float32)
    returns = (tokens[:, :-1] % 2 == 0).astype(np.float32)
    prev_values = rng.normal(size=returns.shape).astype(np.float32)
    return {
        "tokens": tokens,
        "sequence_lengths": lengths,
        "returns": returns,
        "prev_values": prev_values,
        "mask": mask,
    }


def payload(num_rows: int = 12, seed: int = 0) -> TrainPayload:
    return train_payload(arrays(num_rows, seed), Limits(VOCAB))


def silent(_: int) -> None:
    pass


def trained(
    checkpoint: Path, payloads: list[TrainPayload], *, double: bool = False, **changes: object
) -> tuple[CriticUpdate, list[UpdateReport]]:
    critic = load_critic(checkpoint)
    if double:  # noise of float32 sums would hide a mistake
        critic = CriticModel(critic.model.double())
    update = CriticUpdate(critic, settings(**changes))
    return update, [update.train(each, silent) for each in payloads]


def weights(update: CriticUpdate) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in update.parameters.values()])


@pytest.mark.parametrize("global_batch_size", [5, 64])
@pytest.mark.parametrize("clip_value", [0.2, 0.0])
def test_the_token_budget_never_changes_the_result(checkpoint: Path, global_batch_size: int, clip_value: float):
    results = []
    for token_budget in (1, 30, 100, 10_000):
        update, reports = trained(
            checkpoint,
            [payload(), payload(seed=1)],
            double=True,
            token_budget=token_budget,
            global_batch_size=global_batch_size,
            clip_value=clip_value,
        )
        results.append((weights(update), [report.loss_mean for report in reports]))
    start = weights(CriticUpdate(CriticModel(load_critic(checkpoint).model.double()), settings()))
    assert (results[0][0] - start).abs().max() > 1e-3
    for after, losses in results[1:]:
        assert (after - results[0][0]).abs().max() < 1e-7
        assert losses == pytest.approx(results[0][1], abs=1e-6)


def test_padded_and_packed_payloads_give_the_same_bits(checkpoint: Path):
    wide = arrays()
    lengths = wide["sequence_lengths"]
    inside = np.arange(wide["tokens"].shape[1])[None] < lengths
    tight = {"tokens": wide["tokens"][inside][None], "sequence_lengths": lengths}
    for name in ("returns", "prev_values", "mask"):
        tight[name] = wide[name][inside[:, 1:]][None]
    one, other = (trained(checkpoint, [train_payload(each, Limits(VOCAB))]) for each in (wide, tight))
    assert torch.equal(weights(one[0]), weights(other[0]))
    assert one[1][0].loss_mean == other[1][0].loss_mean


def test_the_same_payloads_give_the_same_bits(checkpoint: Path):
    one, other = (trained(checkpoint, [payload(), payload(seed=1)], global_batch_size=4) for _ in range(2))
    assert torch.equal(weights(one[0]), weights(other[0]))


def test_the_loss_is_the_reference_formula_over_the_whole_payload(checkpoint: Path):
    """One row at a time, one token at a time, no batching: 0.5 * mean of max(clipped, plain) squared error."""
    critic, total, count = load_critic(checkpoint), 0.0, 0.0
    for row in split_rows(payload()):
        values = critic.values([row.tokens])[0][:-1]
        for v, old, target, weight in zip(values, row.prev_values, row.returns, row.mask, strict=True):
            clipped = min(max(v, old - 0.2), old + 0.2)
            total += weight * max((v - target) ** 2, (clipped - target) ** 2)
            count += weight
    report = trained(checkpoint, [payload()])[1][0]
    assert report.loss_mean == pytest.approx(0.5 * total / count, rel=1e-5)


def test_it_learns(checkpoint: Path):
    _, reports = trained(checkpoint, [payload(32)] * 30, clip_value=0)
    losses = [report.loss_mean for report in reports]
    assert losses[-1] < 0.2 * losses[0]


def test_rows_make_ceil_n_over_global_batch_steps_in_the_order_received(checkpoint: Path):
    update, reports = trained(checkpoint, [payload(12)], global_batch_size=5, epochs=2)
    assert reports[0].optimizer_steps == update.optimizer_step == 6
    assert reports[0].lr == settings().optimizer.learning_rate(5)
    # Three payloads of 5, 5 and 2 rows are the same three batches.
    whole, parts = list(split_rows(payload(12))), []
    for rows in (whole[:5], whole[5:10], whole[10:]):
        fields = [np.concatenate([getattr(row, name) for row in rows]) for name in ("returns", "prev_values", "mask")]
        lengths = np.array([row.tokens.size for row in rows])
        parts.append(TrainPayload(np.concatenate([row.tokens for row in rows]), lengths, *fields))
    one = trained(checkpoint, [payload(12)], global_batch_size=5)[0]
    other = trained(checkpoint, parts, global_batch_size=5)[0]
    assert torch.equal(weights(one), weights(other))


def test_a_global_batch_without_a_mask_takes_no_step(checkpoint: Path):
    masked = arrays()
    masked["mask"][4:8] = 0
    update, reports = trained(checkpoint, [train_payload(masked, Limits(VOCAB))], global_batch_size=4)
    assert (reports[0].optimizer_steps, reports[0].skipped_steps, update.optimizer_step) == (2, 0, 2)
    assert math.isfinite(reports[0].loss_mean)


def test_progress_counts_micro_batches(checkpoint: Path):
    seen: list[int] = []
    update = CriticUpdate(load_critic(checkpoint), settings(token_budget=1, global_batch_size=5))
    update.train(payload(12), seen.append)
    assert seen == list(range(1, 13))


def test_a_gradient_that_is_not_finite_is_skipped(checkpoint: Path):
    update = CriticUpdate(load_critic(checkpoint), settings(global_batch_size=6))
    calls = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return gradient * math.nan if len(calls) == 1 else gradient

    update.critic.model.score.weight.register_hook(poison)
    report = update.train(payload(12), silent)
    assert (report.optimizer_steps, report.skipped_steps, update.optimizer_step) == (1, 1, 1)
    assert math.isfinite(report.loss_mean)
    assert weights(update).isfinite().all()


def test_only_bad_gradients_leave_everything_as_it_was(checkpoint: Path):
    update = CriticUpdate(load_critic(checkpoint), settings())
    update.train(payload(), silent)
    before, moments = weights(update), copy.deepcopy(update.optimizer.state_dict()["state"])
    hook = update.critic.model.score.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="no optimizer step was taken and the weights are unchanged"):
        update.train(payload(seed=1), silent)
    assert torch.equal(weights(update), before)
    assert update.optimizer_step == 1
    after = update.optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][key], after[i][key]) for i in moments for key in moments[i])
    hook.remove()
    update.train(payload(seed=1), silent)  # and nothing of the bad gradient is left behind
    clean = trained(checkpoint, [payload(), payload(seed=1)])[0]
    assert torch.equal(weights(update), weights(clean))
