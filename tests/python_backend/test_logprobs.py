"""`python_backend.models.logprobs` against hand-worked numbers and obvious loops, in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from python_backend.models.logprobs import sampling_entropy, target_logprobs

close = torch.testing.assert_close


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Log-probs `[B, S-1]`: index t is of token t+1."""
    return target_logprobs(logits[:, :-1], tokens[:, 1:], **sampling)


property_test = settings(max_examples=40)
sizes = {"seed": st.integers(0, 2**31), "batch": st.integers(1, 5), "width": st.integers(1, 6)}


def f64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


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
