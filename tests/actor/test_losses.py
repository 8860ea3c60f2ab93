"""Tests of `actor.algorithms.losses` and of custom losses and advantages: by hand, and for invariances."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_loss import check_masked_loss, check_on_policy_gradient, loss_inputs, outcome
from policy_training import random_batch, trainable_policy, update_of
from samples import make_batch, method_of, scored_samples

from rlhf_triton.actor.algorithms.importance import importance_factors
from rlhf_triton.actor.algorithms.kl import KLControl, kl_estimate, kl_loss
from rlhf_triton.actor.algorithms.losses import clipped
from rlhf_triton.config.algorithms import DIVERGENCES, KL_ESTIMATORS, LOSSES
from rlhf_triton.errors import NotFinite, RlhfError
from rlhf_triton.models.logprobs import target_logprobs
from rlhf_triton.user_code import import_function

property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(2, 5), "width": st.integers(1, 6)}
BUILT_IN = [import_function(loss.function) for loss in LOSSES.values()]


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# ---- losses ----


@pytest.mark.parametrize("loss", BUILT_IN, ids=LOSSES)
@property_test
@given(**sizes)
def test_loss_ignores_masked_tokens_and_has_the_policy_gradient_on_policy(loss, seed, batch, width):
    check_masked_loss(loss, seed, batch, width)
    check_on_policy_gradient(loss, seed, batch, width)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "slope"),
    [  # low 0.2, high 0.3; slope is d loss / d logprob, -A * rho where the gradient survives
        ("clipped", 1.5, 2.0, -2.6, 0.0),
        ("clipped", 0.5, -2.0, 1.6, 0.0),
        ("dis", 1.25, 2.0, -2.5 * math.log(1.25), -2.5),  # weighs the log-prob, whose own value counts
        ("dis", 1.5, 2.0, 0.0, 0.0),
        ("dis", 0.5, 2.0, 0.0, 0.0),
        ("dis", 0.5, -2.0, 0.0, 0.0),
    ],
)
def test_loss_and_slope_match_hand_computed_values_on_each_side_of_the_clip(name, ratio, advantage, loss, slope):
    function = import_function(LOSSES[name].function)
    found, stats, (gradient,) = outcome(
        function, loss_inputs(f64([math.log(ratio)]), f64([0]), f64([advantage]), f64([1]))
    )
    assert [found.item(), gradient.item()] == pytest.approx([loss, slope])
    assert bool(stats["clip_fraction"]) == (slope == 0)
    assert stats["ppo_ratio"].item() == pytest.approx(ratio)
    assert stats["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio))


def test_banned_prompt_tokens_give_finite_gradients():
    logits = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 2, 1, 0]])  # token 1, part of the prompt, is banned
    logprobs = target_logprobs(logits[:, :-1], tokens[:, 1:], temperature=1.0, banned_token_ids=[2])
    loss, stats = clipped(loss_inputs(logprobs, logprobs.detach(), f64([1, 1, 1]), f64([0, 1, 1])))
    loss.backward()
    assert loss.item() == -1
    assert torch.isfinite(torch.stack([*stats.values(), *logits.grad.flatten()])).all()
    assert (logits.grad[0, 0] == 0).all()


# ---- KL ----

E = math.e
GOLDEN = {  # value and slope at d = 0, 1, -2
    "k1": ([0.0, 1.0, -2.0], [1.0, 1.0, 1.0]),
    "abs": ([0.0, 1.0, 2.0], [0.0, 1.0, -1.0]),
    "k2": ([0.0, 0.5, 2.0], [0.0, 1.0, -2.0]),
    "k3": ([0.0, 1 / E, E**2 - 3], [0.0, 1 - 1 / E, 1 - E**2]),
    "unbiased": ([0.0, 1 / E, E**2 - 3], [0.0, 1.0, -2.0]),  # on policy: k3's value with k2's slope
}


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_kl_estimate_and_kl_loss_match_hand_computed_values(kind):
    values, slopes = GOLDEN[kind]
    logprobs = f64([-1.0, -2.0, -3.0, 5.0])
    reference = f64([-1.0, -3.0, -1.0, -math.inf])
    torch.testing.assert_close(kl_estimate(logprobs[:, :3], reference[:, :3], kind), f64(values))
    logprobs.requires_grad_()
    log_ratio = logprobs - logprobs.detach()
    loss = kl_loss(logprobs, reference, log_ratio, f64([2.0, 2.0, 2.0, 0.0]), kind=kind, total=4.0)
    loss.backward()
    assert loss.item() == pytest.approx(sum(values) / 2)
    assert logprobs.grad[0].tolist() == pytest.approx([slope / 2 for slope in [*slopes, 0.0]])


@pytest.mark.parametrize("distance", [3.0, 15.0, 89.0, 1000.0, -11.5, -1000.0])
def test_k3_loss_of_one_token_is_bounded_with_a_nonzero_gradient(distance):
    """Unbounded, exp(-d) overflows float32 at 89 nats; a plain clamp would have gradient 0."""
    logprobs = torch.tensor([[-distance]], requires_grad=True)
    loss = kl_loss(logprobs, torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kind="k3", total=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(10, abs=0.02)
    slope = 1 - math.exp(2.61) if distance > 0 else 1.0  # at the bound
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-3)


# ---- importance factors ----


@pytest.mark.parametrize("mode", DIVERGENCES)
def test_gates_mask_tokens_that_became_certain_or_impossible_but_not_unchanged_ones(mode):
    sampled = torch.tensor([[0.0, -200.0, 0.0, -200.0, -math.inf]])
    logprobs = torch.tensor([[-200.0, 0.0, 0.0, -200.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    found = importance_factors(logprobs, sampled, mask, level="token", mode=mode, low=0.0, high=0.5)
    assert found.tolist() == [[0.0, 0.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("target", "kl", "expected"),
    [
        (None, 50.0, 1.0),
        (6.0, 6.0, 1.0),
        (6.0, 6.6, 1 + 0.1 * 0.5),
        (6.0, 60.0, 1 + 0.2 * 0.5),
        (6.0, 0.0, 1 - 0.2 * 0.5),
        (6.0, -1.0, 1 - 0.2 * 0.5),
    ],
)
def test_adaptive_kl_coefficient_matches_hand_computed_values(target, kl, expected):
    """Ziegler et al. 2019: the relative error, at most 0.2, for half a horizon of samples."""
    # A rollout larger than the horizon counts as one horizon.
    for size, coef in ((5000, expected), (20_000, 1 + 2 * (expected - 1))):
        control = KLControl(1.0, target=target)
        control.update(kl, size)
        assert control.coef == pytest.approx(coef)


# ---- a user's own loss and advantage ----

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "own-loss.md"


def written(folder, body):
    """Return the spec of a function of `inputs` with this body."""
    (folder / "mine.py").write_text(f"import torch\n\n\ndef mine(inputs):\n    {body}\n")
    return f"{folder / 'mine.py'}:mine"


def test_documented_loss_and_advantage_examples_work(tmp_path, checkpoint):
    code = re.search(r"```py\n(# my_loss.*?)```", PAGE.read_text(), re.DOTALL)
    documented = tmp_path / "my_loss.py"
    documented.write_text(code[1])
    loss = method_of(loss=f"{documented}:loss").loss
    check_masked_loss(loss)
    check_on_policy_gradient(loss)
    policy = trainable_policy(model=checkpoint, loss=f"{documented}:loss", lr=1e-2, minibatch_size=2)
    found = update_of(policy).run(random_batch([6, 5, 7, 4], prompt=2, seed=0), seed=0, kl_coef=0.0).metrics
    assert found["train_optim/minibatches"] == 2
    assert 0 <= found["train_optim/truncated"] <= 1
    own = {"algorithm_name": "reinforce++", "advantage": f"{documented}:advantage", "responses_per_prompt": 4}
    batch = make_batch(scored_samples(), **own, whitens=False, mask_unfinished=False, kl_coef=0.0)
    assert batch.advantages.amax(-1).tolist() == pytest.approx([1 - 2.5 / 4, 2 - 2.5 / 4, 0.0, 0.0])


ROWS = r"a tensor of shape \(1, 5\)"


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        ("return inputs.mean(inputs.logprobs) * float('nan'), {}", NotFinite, "returned nan at optimizer step 0"),
        ("return inputs.logprobs.sum() * float('nan'), {}", NotFinite, "returned nan at optimizer step 0"),
        (
            "return inputs.mean(inputs.logprobs) * float('nan')",
            RlhfError,
            r"returned a tensor of shape \(\), but it must return",
        ),
        ("return inputs.logprobs, {}", RlhfError, rf"returned {ROWS}, {{}}, but it must return \(loss, metrics\)"),
        ("return inputs.mean(inputs.logprobs)", RlhfError, r"returned a tensor of shape \(\), but it must return"),
        ("return inputs.mean(inputs.logprobs), {'a': inputs.mask}", RlhfError, rf"returned .*, {{a: {ROWS}}}, but"),
        ("return inputs.mean(inputs.old_logprobs), {}", RlhfError, "returned .* that depends on inputs.logprobs"),
        ("return inputs.logprobs.mean(), {}", RlhfError, "depends on tokens with weight 0"),
        ("return inputs.no_such_field, {}", RlhfError, r"failed: AttributeError: .*no_such_field.* \(mine.py:5\)"),
        (
            "return inputs.mean(inputs.logprobs), {'a': inputs.logprobs.sum()} if inputs.logprobs.shape[1] > 5 else {}",
            RlhfError,
            r"returns different metrics for different rows \(a\); always return the same names",
        ),
    ],
)
def test_faulty_custom_loss_raises_with_its_name_and_changes_no_weights(tmp_path, checkpoint, body, kind, problem):
    spec = written(tmp_path, body)
    policy = trainable_policy(model=checkpoint, loss=spec, minibatch_size=2, token_budget=8)  # a row at a time
    before = [parameter.clone() for parameter in policy.model.parameters()]
    with pytest.raises(kind, match=rf"^actor\.algorithm\.loss: {re.escape(spec)} {problem}") as caught:
        update_of(policy).run(random_batch([6, 7], prompt=2, seed=0), seed=0, kl_coef=0.0)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, policy.model.parameters(), strict=True))


def test_custom_loss_that_leaves_out_a_metric_in_a_minibatch_raises_with_its_name(tmp_path, checkpoint):
    """The mean over all minibatches would be too small."""
    metrics = "{'a': inputs.sum(inputs.mask)} if inputs.groups[0] == 0 else {}"
    spec = written(tmp_path, f"return inputs.mean(inputs.logprobs), {metrics}")
    policy = trainable_policy(model=checkpoint, loss=spec, minibatch_size=1)
    batch = replace(random_batch([6, 7, 5], prompt=2, seed=0), groups=torch.arange(3))
    with pytest.raises(
        RlhfError, match=rf"^actor\.algorithm\.loss: {re.escape(spec)} returns different metrics .* \(a\);"
    ):
        update_of(policy).run(batch, seed=0, kl_coef=0.0)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "return inputs.mask, inputs.spread(inputs.totals / 0)",
            "has returns that are not finite inside the mask; look ",
        ),
        ("return inputs.totals, inputs.totals", r"returned a tensor of shape \(4,\), a tensor of shape \(4,\), but"),
        ("return inputs.mask", r"returned .*\(4, 5\), but it must return \(advantages, returns\), two"),
        ("return inputs.nothing", r"failed: AttributeError: .*nothing.* \(mine.py:5\)"),
    ],
)
def test_faulty_custom_advantage_raises_with_its_name(tmp_path, body, problem):
    spec = written(tmp_path, body)
    with pytest.raises(RlhfError, match=rf"^actor\.algorithm\.advantage: {re.escape(spec)} {problem}"):
        make_batch(scored_samples(), mask_unfinished=False, kl_coef=0.0, advantage=spec)
