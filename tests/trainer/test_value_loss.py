"""`trainer.value_loss` against hand-worked numbers and an obvious loop.
Given nothing but tensors made here, in float64 where a tolerance would hide a mistake.
The promise under test: splitting, permuting and padding a batch change neither loss nor gradient.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.value_loss import clipped_value_loss

close = torch.testing.assert_close
property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 5), "width": st.integers(1, 6)}


def f64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch_of(seed: int, batch: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values, prev_values, returns and weights with gaps, each `[B, S-1]`."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, batch, width, generator=generator, dtype=torch.float64)
    return uniform[0], uniform[1], uniform[2], (uniform[3] < 0.7) * uniform[3]


def loss_and_gradient(
    values: Tensor, prev: Tensor, returns: Tensor, mask: Tensor, *, micro: int | None = None
) -> tuple[Tensor, Tensor]:
    leaf = values.clone().requires_grad_()
    num_tokens = float(mask.sum())
    total = torch.zeros((), dtype=values.dtype)
    micro = micro or len(values)
    for start in range(0, len(values), micro):
        rows = slice(start, start + micro)
        loss = clipped_value_loss(
            leaf[rows], prev[rows], returns[rows], mask[rows], clip_value=0.2, num_tokens=num_tokens
        )
        loss.backward()
        total += loss.detach()
    return total, leaf.grad


def test_golden():
    # c = 0.5. Token 0: V_clip = .5, R = 0: max(.25, 1) = 1. Token 1: V_clip = .5, R = 1: max(.25, 0) = .25.
    # Token 2: V = V_clip = .25, R = 1: .5625. Half of their sum over three tokens.
    values, prev, returns = f64([[1.0, 1.0, 0.25]]), f64([[0.0, 0.0, 0.0]]), f64([[0.0, 1.0, 1.0]])
    ones = f64([[1, 1, 1]])
    loss = clipped_value_loss(values, prev, returns, ones, clip_value=0.5, num_tokens=3)
    close(loss, f64(0.5 * (1 + 0.25 + 0.5625) / 3))
    plain = 0.5 * (1 + 0 + 0.5625) / 3
    for clip_value in (0.0, -1.0, 100.0):
        loss = clipped_value_loss(values, prev, returns, ones, clip_value=clip_value, num_tokens=3)
        close(loss, f64(plain))


@pytest.mark.parametrize(
    ("value", "target", "slope"),
    [  # V_old = 0, c = 0.5; slope is d loss / d V: V - R where the gradient survives
        (0.25, 1.0, -0.75),  # inside the clip
        (1.0, 0.0, 1.0),  # outside, farther from the target than the clip: pulled back
        (1.0, 2.0, 0.0),  # outside, nearer to the target: moved far enough for one rollout
        (-1.0, 0.0, -1.0),
        (-1.0, -2.0, 0.0),
    ],
)
def test_each_side_of_the_clip(value: float, target: float, slope: float):
    values = f64([[value]]).requires_grad_()
    clipped_value_loss(values, f64([[0.0]]), f64([[target]]), f64([[1]]), clip_value=0.5, num_tokens=1).backward()
    assert values.grad.item() == pytest.approx(slope)


@property_test
@given(**sizes, clip_value=st.sampled_from([-1.0, 0.0, 0.1, 0.2, 5.0]))
def test_loss_equals_a_loop(seed: int, batch: int, width: int, clip_value: float):
    values, prev, returns, mask = batch_of(seed, batch, width)
    total = 0.0
    for row, t in mask.nonzero().tolist():
        v, old, r = (float(x[row, t]) for x in (values, prev, returns))
        error = (v - r) ** 2
        if clip_value > 0:
            error = max(error, (min(max(v, old - clip_value), old + clip_value) - r) ** 2)
        total += 0.5 * float(mask[row, t]) * error
    loss = clipped_value_loss(values, prev, returns, mask, clip_value=clip_value, num_tokens=17)
    assert float(loss) == pytest.approx(total / 17)


@property_test
@given(**sizes, micro=st.integers(1, 5))
def test_splitting_into_micro_batches_never_matters(seed: int, batch: int, width: int, micro: int):
    values, prev, returns, mask = batch_of(seed, batch, width)
    mask[0] = 0  # one micro-batch may be all padding
    whole = loss_and_gradient(values, prev, returns, mask)
    close(loss_and_gradient(values, prev, returns, mask, micro=micro), whole)


@property_test
@given(**sizes, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_content_outside_the_mask_never_matters(seed: int, batch: int, width: int, junk: float):
    values, prev, returns, mask = batch_of(seed, batch, width)
    dirty = [x.masked_fill(mask == 0, junk) for x in (values, prev, returns)]
    clean = loss_and_gradient(values, prev, returns, mask)
    close(loss_and_gradient(*dirty, mask), clean)
    assert (clean[1][mask == 0] == 0).all()  # zero mask, zero gradient


def test_empty_batch_has_loss_and_gradient_zero():
    values, prev, returns, mask = batch_of(0, 2, 3)
    loss, gradient = loss_and_gradient(values, prev, returns, 0 * mask)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize(("name", "scalar"), [("clip_value", math.nan), ("num_tokens", -1), ("num_tokens", 0)])
def test_scalars_are_checked(name: str, scalar: float):
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match=f"{name}.*{scalar}"):
        clipped_value_loss(ones, ones, ones, ones, **{"clip_value": 0.2, "num_tokens": 3, name: scalar})


def test_the_servers_full_width_is_refused():
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"'values': \(1, 4\)"):
        clipped_value_loss(torch.ones(1, 4), ones, ones, ones, clip_value=0.2, num_tokens=3)
