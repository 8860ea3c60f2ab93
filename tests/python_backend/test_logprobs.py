"""`actor.algorithms.losses` and `python_backend.models.logprobs` against hand-worked numbers and obvious loops.
Given nothing but tensors made here, in float64 where a tolerance would hide a mistake.
Public vectors are quoted as numbers, with the file that published them beside each.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actor.algorithms.losses import ppo_policy_loss
from python_backend.models.logprobs import sampling_entropy, target_logprobs

close = torch.testing.assert_close


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Log-probs `[B, S-1]`: index t is of token t+1."""
    return target_logprobs(logits[:, :-1], tokens[:, 1:], **sampling)


property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 5), "width": st.integers(1, 6)}


def f64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def sample(seed: int, batch: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, advantages and a mask with gaps, each `[B, S-1]`."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(4, batch, width, generator=generator, dtype=torch.float64)
    return -2 * uniform[0], -2 * uniform[1], 4 * uniform[2] - 2, (uniform[3] < 0.7).double()


def loss_of(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, num_tokens: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    num_tokens = float(mask.sum()) if num_tokens is None else num_tokens
    return ppo_policy_loss(
        logprobs, old, advantages, mask, clip_ratio_low=0.2, clip_ratio_high=0.3, num_tokens=num_tokens
    )


# token_logprobs


def test_logprob_at_a_position_is_that_of_the_next_token():
    # Odds 1:3 at position 0, 1:1 at position 1; position 2 predicts nothing, so its logits must not matter.
    logits = f64([[[0.0, math.log(3)], [5.0, 5.0], [1e9, -1e9]]])
    result = token_logprobs(logits, torch.tensor([[0, 1, 0]]), temperature=1.0)
    close(result, f64([[math.log(0.75), math.log(0.5)]]))


def test_temperature_divides_the_logits():
    logits = f64([[[0.0, math.log(9)], [0.0, 0.0]]])
    result = token_logprobs(logits, torch.tensor([[0, 1]]), temperature=2.0)
    close(result, f64([[math.log(0.75)]]))  # odds 9 become sqrt(9) = 3


def test_banned_tokens_leave_the_distribution():
    logits = f64([[[0.0, math.log(3), 50.0], [50.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    tokens = torch.tensor([[0, 1, 2]])
    result = token_logprobs(logits, tokens, temperature=1.0, banned_token_ids=[2])
    close(result[0, 0], f64(math.log(0.75)))
    assert result[0, 1] == -math.inf  # the banned token itself
    assert token_logprobs(logits, tokens, temperature=1.0)[0, 0] < -40


@property_test
@given(**sizes, temperature=st.sampled_from([0.3, 1.0, 2.5]), banned=st.sets(st.integers(0, 4), max_size=3))
def test_logprobs_equal_a_loop_over_softmax(seed: int, batch: int, width: int, temperature: float, banned: set[int]):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(batch, width + 1, 6, generator=generator, dtype=torch.float64)
    tokens = torch.randint(6, (batch, width + 1), generator=generator)
    result = token_logprobs(logits, tokens, temperature=temperature, banned_token_ids=sorted(banned))
    for row in range(batch):
        for t in range(width):
            weights = [math.exp(float(z) / temperature) for z in logits[row, t]]
            weights = [0.0 if v in banned else w for v, w in enumerate(weights)]
            p = weights[int(tokens[row, t + 1])] / sum(weights)
            assert float(result[row, t]) == pytest.approx(math.log(p) if p else -math.inf)


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    result = token_logprobs(logits, tokens, temperature=0.7)
    assert result.dtype == torch.float32
    close(result, token_logprobs(logits.float(), tokens, temperature=0.7))


def test_logprobs_match_log_softmax_at_the_size_of_real_logits():
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(2, 5, 1000, generator=generator) - 30
    tokens = torch.randint(1000, (2, 5), generator=generator)
    expected = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    close(token_logprobs(logits, tokens, temperature=1.0), expected, atol=2e-5, rtol=1e-6)


# entropy


def test_entropy_of_reference_section_8():
    uniform = sampling_entropy(torch.zeros(1, 1, 4), temperature=1.0)
    assert float(uniform) / math.log(2) == pytest.approx(2.0)  # 2 bits
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7).entropy()
    close(sampling_entropy(logits[:, :-1], temperature=0.7), expected)


def test_entropy_over_the_tokens_left_by_a_ban():
    logits = f64([[[0.0, 7.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.0]]])
    logits.requires_grad_()
    result = sampling_entropy(logits[:, :-1], temperature=1.0, banned_token_ids=[1, 3])
    close(result.detach(), f64([[math.log(2)]]))
    result.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0, :, [1, 3]] == 0).all()


def test_entropy_gradient():
    logits = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: sampling_entropy(z, temperature=0.8, banned_token_ids=[2]), logits)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_is_checked(temperature: float):
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), temperature=temperature)
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
        sampling_entropy(torch.zeros(1, 2, 3), temperature=temperature)


@pytest.mark.parametrize("banned", [[3], [-1], [0, 1, 2]])
def test_banned_ids_are_checked(banned: list[int]):
    with pytest.raises(ValueError, match="banned_token_ids"):
        sampling_entropy(torch.zeros(1, 2, 3), temperature=1.0, banned_token_ids=banned)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) and \(1, 3\)"):
        target_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 3).long(), temperature=1.0)
    ones = torch.ones(1, 3)
    with pytest.raises(ValueError, match="advantages"):
        loss_of(ones, ones, torch.ones(1, 4), ones)


# ppo_policy_loss


def test_loss_of_nemo_rl():
    """NVIDIA-NeMo/RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_ppo_clipping.

    Ratios 0.5, 1, 1.5 and eps 0.2: per token max(-.5, -.8) = -.5, 1, max(-3, -2.4) = -2.4; the mean is -0.6333.
    """
    loss, stats = ppo_policy_loss(
        f64([[-1.69315, -1.0, -0.59453]]),
        f64([[-1.0, -1.0, -1.0]]),
        f64([[1.0, -1.0, 2.0]]),
        f64([[1, 1, 1]]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        num_tokens=3,
    )
    assert float(loss) == pytest.approx(-1.9 / 3, rel=1e-4)
    # Ratio 0.5 is outside the clip, but the pessimistic side of it still has its gradient.
    assert float(stats["clip_fraction"]) == 1
    assert float(stats["ppo_ratio"]) == pytest.approx(3.0, rel=1e-4)
    assert float(stats["ppo_ratio_clamped"]) == pytest.approx(3.0, rel=1e-4)
    # rho - 1 - log rho: 0.5 - 1 + 0.69315; 0; 1.5 - 1 - 0.40547
    assert float(stats["approx_kl"]) == pytest.approx(0.19315 + 0.09453, rel=1e-3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [  # low 0.2, high 0.3; slope is d loss / d logprob, -A * rho where the gradient survives
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.25, 2.0, -2.5, -2.5, 0),
        (1.5, 2.0, -2.6, 0.0, 1),
        (0.5, 2.0, -1.0, -1.0, 0),
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),
        (0.9, -2.0, 1.8, 1.8, 0),
    ],
)
def test_each_side_of_the_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: int):
    logprobs = f64([[math.log(ratio)]]).requires_grad_()
    result, stats = loss_of(logprobs, f64([[0.0]]), f64([[advantage]]), f64([[1]]))
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)
    assert stats["clip_fraction"].item() == clipped
    assert stats["ppo_ratio_clamped"].item() == pytest.approx(min(max(ratio, 0.8), 1.3))
    assert not any(stat.requires_grad for stat in stats.values())


@property_test
@given(**sizes)
def test_loss_and_stats_equal_a_loop(seed: int, batch: int, width: int):
    logprobs, old, advantages, mask = sample(seed, batch, width)
    loss, stats = loss_of(logprobs, old, advantages, mask)
    expected = {"loss": 0.0, "clip_fraction": 0, "approx_kl": 0.0, "ppo_ratio": 0.0, "ppo_ratio_clamped": 0.0}
    for row, t in mask.nonzero().tolist():
        rho = math.exp(float(logprobs[row, t] - old[row, t]))
        clamped = min(max(rho, 0.8), 1.3)
        a = float(advantages[row, t])
        expected["loss"] += max(-a * rho, -a * clamped)
        expected["clip_fraction"] += (a > 0 and rho > 1.3) or (a < 0 and rho < 0.8)
        expected["approx_kl"] += rho - 1 - math.log(rho)
        expected["ppo_ratio"] += rho
        expected["ppo_ratio_clamped"] += clamped
    assert float(loss) == pytest.approx(expected.pop("loss") / max(float(mask.sum()), 1))
    assert {name: float(stat) for name, stat in stats.items()} == pytest.approx(expected)


@property_test
@given(**sizes)
def test_ratio_1_gives_minus_the_mean_advantage(seed: int, batch: int, width: int):
    logprobs, _, advantages, mask = sample(seed, batch, width)
    mask[0, 0] = 1
    old = logprobs.clone()
    loss, stats = loss_of(logprobs.requires_grad_(), old, advantages, mask)
    loss.backward()
    assert loss.item() == pytest.approx(-float(advantages[mask.bool()].mean()))
    close(logprobs.grad, -advantages * mask / mask.sum())
    assert stats["clip_fraction"] == 0
    assert stats["approx_kl"] == 0


@property_test
@given(**sizes, junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_content_outside_the_mask_never_matters(seed: int, batch: int, width: int, junk: float):
    clean = sample(seed, batch, width)
    mask = clean[3]
    dirty = [x.masked_fill(mask == 0, junk) for x in clean[:3]]
    results = []
    for logprobs, old, advantages in (clean[:3], dirty):
        logprobs = logprobs.clone().requires_grad_()
        loss, stats = loss_of(logprobs, old, advantages, mask)
        loss.backward()
        results.append((loss.detach(), stats, logprobs.grad))
    close(results[1], results[0])
    assert (results[0][2][mask == 0] == 0).all()  # zero mask, zero gradient


@property_test
@given(**sizes)
def test_permuting_samples_never_matters(seed: int, batch: int, width: int):
    tensors = sample(seed, batch, width)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    close(loss_of(*(x[order] for x in tensors)), loss_of(*tensors))


@property_test
@given(**sizes, micro=st.integers(1, 5))
def test_splitting_into_micro_batches_never_matters(seed: int, batch: int, width: int, micro: int):
    _, old, advantages, mask = sample(seed, batch, width)
    mask[0] = 0  # one micro-batch may be all padding
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, width + 1, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(5, (batch, width + 1), generator=generator)
    num_tokens = float(mask.sum())
    results = []
    for size in (batch, micro):
        leaf = logits.clone().requires_grad_()
        total, sums = 0.0, dict.fromkeys(("clip_fraction", "approx_kl", "ppo_ratio", "ppo_ratio_clamped"), 0.0)
        for start in range(0, batch, size):
            rows = slice(start, start + size)
            logprobs = token_logprobs(leaf[rows], tokens[rows], temperature=0.9)
            loss, stats = loss_of(logprobs, old[rows], advantages[rows], mask[rows], num_tokens)
            loss.backward()
            total += loss.detach()
            sums = {name: sums[name] + stats[name] for name in sums}
        results.append((total, sums, leaf.grad))
    close(results[1], results[0])


def test_a_sample_that_did_not_end_gives_no_gradient():
    logprobs, old, advantages, _ = sample(0, 2, 3)
    logprobs.requires_grad_()
    mask = torch.ones(2, 3).double() * torch.tensor([True, False])[:, None]
    loss_of(logprobs, old, advantages, mask)[0].backward()
    assert (logprobs.grad[1] == 0).all()
    assert (logprobs.grad[0] != 0).any()


def test_banned_prompt_tokens_give_no_nan_to_the_model():
    logits = torch.zeros(1, 4, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 2, 1, 0]])  # token 1, part of the prompt, is banned
    logprobs = token_logprobs(logits, tokens, temperature=1.0, banned_token_ids=[2])
    loss, stats = loss_of(logprobs, logprobs.detach(), f64([[1.0, 1.0, 1.0]]), f64([[0, 1, 1]]))
    loss.backward()
    assert loss.item() == -1
    assert all(torch.isfinite(stat) for stat in stats.values())
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0, 0] == 0).all()


def test_weights_weigh():
    zeros = f64([[0.0, 0.0]])
    loss, stats = loss_of(zeros, zeros, f64([[2.0, 4.0]]), f64([[0.25, 0.5]]))
    close(loss, f64(-(0.25 * 2 + 0.5 * 4) / 0.75))
    assert stats["ppo_ratio"] == 0.75


def test_empty_minibatch_has_loss_and_gradient_zero():
    logprobs, old, advantages, mask = sample(0, 2, 3)
    logprobs.requires_grad_()
    loss, _ = loss_of(logprobs, old, advantages, 0 * mask)
    loss.backward()
    assert loss.item() == 0
    assert (logprobs.grad == 0).all()


@pytest.mark.parametrize(
    ("name", "scalar"),
    [("clip_ratio_low", -0.1), ("clip_ratio_high", math.nan), ("num_tokens", -1), ("num_tokens", 0)],
)
def test_loss_refuses_scalars(name: str, scalar: float):
    ones = torch.ones(1, 3)
    scalars = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "num_tokens": 3, name: scalar}
    with pytest.raises(ValueError, match=f"{name}.*{scalar}"):
        ppo_policy_loss(ones, ones, ones, ones, **scalars)
