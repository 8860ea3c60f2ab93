"""`trainer.value_loss` and `trainer.critic_update`: by hand, against loops, and independent of micro-batches."""

import copy
import math

import hypothesis
import numpy as np
import pytest
import torch
from critic_training import arrays, payload, settings, silent, trained, weights
from hypothesis import strategies as st
from loaders import load_trained
from tiny_checkpoints import VOCAB, save_tiny

from rlhf_triton.trainer.critic_update import CriticUpdate, split_rows
from rlhf_triton.trainer.value_loss import clipped_value_loss
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import TrainPayload, train_payload


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    save_tiny(folder, "llama", "critic")
    return folder


# ---- the loss ----


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "target", "loss", "plain", "slope"),
    [  # V_old = 0, clip 0.5; slope is d loss / d V: V - R where the gradient survives
        (0.25, 1.0, 0.5625, 0.5625, -0.75),  # inside the clip
        (1.0, 0.0, 1.0, 1.0, 1.0),  # outside, farther from the target than the clip: pulled back
        (1.0, 1.0, 0.25, 0.0, 0.0),  # outside, nearer to the target: moved far enough for one rollout
        (-1.0, 0.0, 1.0, 1.0, -1.0),
        (-1.0, -2.0, 2.25, 1.0, 0.0),
    ],
)
def test_clipped_value_loss_matches_hand_computed_values_on_each_side_of_the_clip(value, target, loss, plain, slope):
    values = f64([[value]]).requires_grad_()
    clipped = clipped_value_loss(values, f64([[0]]), f64([[target]]), f64([[1]]), clip_value=0.5, num_tokens=3)
    clipped.backward()
    assert (clipped.item(), values.grad.item()) == pytest.approx((0.5 * loss / 3, slope / 3))
    for clip_value in (0.0, -1.0, 100.0):
        found = clipped_value_loss(values, f64([[0]]), f64([[target]]), f64([[1]]), clip_value=clip_value, num_tokens=3)
        assert found.item() == pytest.approx(0.5 * plain / 3)


def loss_and_gradient(values, *others, clip_value, micro):
    """Add up the micro-batches of `micro` rows; the last tensor is the mask."""
    leaf = values.clone().requires_grad_()
    total = torch.zeros((), dtype=values.dtype)
    for rows in (slice(start, start + micro) for start in range(0, len(values), micro)):
        parts = [tensor[rows] for tensor in (leaf, *others)]
        loss = clipped_value_loss(*parts, clip_value=clip_value, num_tokens=float(others[-1].sum()))
        loss.backward()
        total += loss.detach()
    return total, leaf.grad


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 5),
    width=st.integers(1, 6),
    clip_value=st.sampled_from([-1.0, 0.0, 0.1, 0.2, 5.0]),
    micro=st.integers(1, 5),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
def test_value_loss_and_gradient_match_a_loop(seed, batch, width, clip_value, micro, junk):
    """They match for any split into micro-batches and any content outside the mask."""
    uniform = torch.rand(4, batch, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values, prev, returns, mask = *uniform[:3], (uniform[3] < 0.7) * uniform[3]
    mask[0] *= seed % 2  # a micro-batch, or all of the batch, may be nothing but padding
    expected = 0.0
    gradient = torch.zeros_like(values)
    for row, t in mask.nonzero().tolist():
        v, old, r, weight = (float(x[row, t]) for x in (values, prev, returns, mask))
        plain = (v - r) ** 2
        clipped = (min(max(v, old - clip_value), old + clip_value) - r) ** 2
        is_clipped = clip_value > 0 and clipped > plain
        expected += 0.5 * weight * (clipped if is_clipped else plain) / float(mask.sum())
        gradient[row, t] = 0 if is_clipped else weight * (v - r) / float(mask.sum())
    dirty = [tensor.masked_fill(mask == 0, junk) for tensor in (values, prev, returns)]
    found = loss_and_gradient(*dirty, mask, clip_value=clip_value, micro=micro)
    torch.testing.assert_close(found, (f64(expected), gradient))


# ---- the update ----


def test_critic_update_makes_one_step_per_global_batch_in_order(checkpoint):
    update, reports = trained(checkpoint, [payload(12)], global_batch_size=5, epochs=2)
    assert reports[0].optimizer_steps == update.trained.optimizer_step == 6
    assert reports[0].lr == settings().optimizer.learning_rate(5, total_steps=1000)
    # Three payloads of 5, 5 and 2 rows are the same three batches.
    whole = list(split_rows(payload(12)))
    parts = []
    for rows in (whole[:5], whole[5:10], whole[10:]):
        fields = [np.concatenate([getattr(row, name) for row in rows]) for name in ("returns", "prev_values", "mask")]
        lengths = np.array([row.tokens.size for row in rows])
        parts.append(TrainPayload(np.concatenate([row.tokens for row in rows]), lengths, *fields))
    one = trained(checkpoint, [payload(12)], global_batch_size=5)[0]
    other = trained(checkpoint, parts, global_batch_size=5)[0]
    assert torch.equal(weights(one), weights(other))


def test_payload_with_an_empty_mask_changes_no_weights(checkpoint):
    """The payload may be the first of a run, and the optimizer may have momentum."""
    nothing = train_payload({**arrays(), "mask": np.zeros_like(arrays()["mask"])}, Limits(VOCAB))
    update, reports = trained(checkpoint, [nothing, payload(12), nothing])
    alone = trained(checkpoint, [payload(12)])[0]
    assert torch.equal(weights(update), weights(alone))
    assert update.trained.optimizer_step == alone.trained.optimizer_step
    for report in (reports[0], reports[2]):
        assert (report.optimizer_steps, report.loss_mean, report.grad_norm) == (0, 0.0, 0.0)
        assert report.lr > 0


@pytest.mark.device
def test_critic_update_skips_a_non_finite_gradient(checkpoint):
    update = CriticUpdate(load_trained(checkpoint), settings(global_batch_size=6))
    calls = []

    def poison(gradient):
        calls.append(None)
        return gradient * math.nan if len(calls) == 1 else gradient

    update.critic.model.score.weight.register_hook(poison)
    report = update.train(payload(12), silent)
    assert (report.optimizer_steps, report.skipped_steps, update.trained.optimizer_step) == (1, 1, 1)
    assert math.isfinite(report.loss_mean)
    assert weights(update).isfinite().all()


def test_critic_update_with_only_non_finite_gradients_raises_and_changes_nothing(checkpoint):
    update = CriticUpdate(load_trained(checkpoint), settings())
    update.train(payload(), silent)
    before = weights(update)
    moments = copy.deepcopy(update.trained.optimizer.state_dict()["state"])
    hook = update.critic.model.score.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="no optimizer step was taken and the weights are unchanged"):
        update.train(payload(seed=1), silent)
    assert torch.equal(weights(update), before)
    assert update.trained.optimizer_step == 1
    after = update.trained.optimizer.state_dict()["state"]
    assert all(torch.equal(moments[i][key], after[i][key]) for i in moments for key in moments[i])
    hook.remove()
    update.train(payload(seed=1), silent)  # and nothing of the bad gradient is left behind
    clean = trained(checkpoint, [payload(), payload(seed=1)])[0]
    assert torch.equal(weights(update), weights(clean))
