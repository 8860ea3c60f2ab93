"""The maths between a rollout and its update: mask, KL, token rewards, GAE, whitening.

Per-token tensors are `[B, S-1]`; position t scores token t+1. Values outside a mask, NaN and infinity included, never
reach a result.
"""

import torch
from torch import Tensor

KL_KINDS = ("k1", "abs", "k2", "k3")
WHITEN_EPSILON = 1e-8
ROUNDING = 4 * torch.finfo(torch.float32).eps  # relative; a score that a server computes twice differs by this much


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, with the names and shapes, unless all tensors have one shape `[B, S-1]`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"expected one shape [B, S-1], got {shapes}")


def response_mask(prompt_lengths: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """1 where position t scores a response token: t in [prompt_length - 1, length - 1).

    The first 1 scores the first response token; the last one, at `length - 2`, scores the last token of the
    sequence (the EOS where there is one). An empty response gives a row of zeros.

    Args:
        prompt_lengths: `[B]`, tokens of the prompt, at least 1: nothing comes before token 0 to score it.
        lengths: `[B]`, tokens of prompt + response.
        num_tokens: S, the padded length.

    Returns: float32 mask `[B, S-1]`.
    Raises: ValueError unless 1 <= prompt_lengths <= lengths <= num_tokens in every row.
    Source: reference section 6.
    """
    if prompt_lengths.ndim != 1 or prompt_lengths.shape != lengths.shape:
        shapes = f"{tuple(prompt_lengths.shape)} and {tuple(lengths.shape)}"
        raise ValueError(f"prompt_lengths and lengths must both be [B], got {shapes}")
    for row, (prompt, length) in enumerate(zip(prompt_lengths.tolist(), lengths.tolist(), strict=True)):
        if not 1 <= prompt <= length <= num_tokens:
            got = f"{prompt}, {length}, {num_tokens} in row {row}"
            raise ValueError(f"need 1 <= prompt_lengths <= lengths <= num_tokens, got {got}")
    positions = torch.arange(num_tokens - 1, device=lengths.device)
    return ((positions >= prompt_lengths[:, None] - 1) & (positions < lengths[:, None] - 1)).float()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled.

    With d = logprobs - ref_logprobs:    k1 = d    abs = |d|    k2 = d^2 / 2    k3 = exp(-d) - 1 + d

    k1 is unbiased and may be negative; k3 is unbiased and never negative; abs and k2 are biased.

    Args:
        logprobs: `[B, S-1]`, log-prob of token t+1 under the policy that sampled it.
        ref_logprobs: `[B, S-1]`, the same under the frozen initial policy.
        kind: one of `KL_KINDS`.

    Returns: `[B, S-1]` in nats, at every position; the caller masks.
    Raises: ValueError for an unknown kind, or shapes that differ.
    Source: reference section 6 (k1, abs); Schulman, "Approximating KL divergence", 2020 (k1, k2, k3).
    """
    require_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    if kind not in KL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(KL_KINDS)}, got {kind!r}")
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def token_rewards(rewards: Tensor, kl: Tensor, lengths: Tensor, *, kl_coef: float) -> Tensor:
    """Token rewards r_t = rewards * [t == max(length - 2, 0)] - kl_coef * kl_t.

    The score sits where the last token is scored (position length - 2 scores token length - 1). The penalty
    covers every position, prompt and padding included: `gae` masks them. The score of an empty response lies
    outside its mask, so `gae` drops it.

    Args:
        rewards: `[B]`, one score per response.
        kl: `[B, S-1]`, from `kl_estimate`.
        lengths: `[B]`, tokens of prompt + response.
        kl_coef: weight of the penalty, >= 0.

    Returns: `[B, S-1]` in the dtype of `kl`.
    Raises: ValueError if kl_coef < 0, a shape is wrong, or a length exceeds S.
    Source: reference section 6; Ouyang et al. 2022 (arXiv 2203.02155), section 3.5.
    """
    if kl.ndim != 2 or kl.shape[1] < 1:
        raise ValueError(f"kl must be [B, S-1] with S >= 2, got {tuple(kl.shape)}")
    for name, tensor in (("rewards", rewards), ("lengths", lengths)):
        if tensor.shape != kl.shape[:1]:
            raise ValueError(f"{name} must be [B] = [{kl.shape[0]}], got {tuple(tensor.shape)}")
    if not kl_coef >= 0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}")
    if bool((lengths > kl.shape[1] + 1).any()):
        raise ValueError(f"lengths must be at most S = {kl.shape[1] + 1}, got {int(lengths.max())}")
    last_scored = (lengths - 2).clamp(min=0).long()
    return (-kl_coef * kl).scatter_add(1, last_scored[:, None], rewards[:, None].to(kl.dtype))


def gae(values: Tensor, token_rewards: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and their returns, on masked values and rewards.

        delta_t = r_t + gamma * V_next - V_t           V_next, A_next: of the next position in the mask,
        A_t = delta_t + gamma * lam * A_next           0 after the last one
        returns_t = A_t + V_t

    The recursion runs over the positions in the mask alone: a gap inside it (what a tool answered, say) is stepped
    over as if it were not there. With lam = 1 the returns are the Monte-Carlo returns-to-go of the masked rewards.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t: the critic's `[B, S]` without its last column.
        token_rewards: `[B, S-1]`, reward of choosing token t+1.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        gamma: discount, in [0, 1].
        lam: GAE lambda, in [0, 1].

    Returns: (advantages, returns), each `[B, S-1]`, 0 outside the mask.
    Raises: ValueError if gamma or lam is outside [0, 1], or shapes differ.
    Source: Schulman et al. 2015 (arXiv 1506.02438), equation 16; reference section 6.
    """
    require_same_shape(values=values, token_rewards=token_rewards, mask=mask)
    for name, scalar in (("gamma", gamma), ("lam", lam)):
        if not 0 <= scalar <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {scalar}")
    values, token_rewards = _weigh(values, mask), _weigh(token_rewards, mask)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(values.shape[0])
    inside = mask != 0
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(inside[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(inside[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = advantages.masked_fill(~inside, 0.0)
    return advantages, advantages + values


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """sum(mask * x), a scalar, for x and a mask (or weights) `[B, S-1]`. Raises ValueError if shapes differ."""
    require_same_shape(x=x, mask=mask)
    return _weigh(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """sum(mask * x) / sum(mask), a scalar, for x and a mask (or weights) `[B, S-1]`.

    0, not NaN, where the mask has no token (reference section 9: a micro-batch of padding reported NaN there).
    Raises: ValueError if shapes differ.
    """
    total = mask.sum()
    return masked_sum(x, mask) / (total + (total == 0))


def is_rounding(std: Tensor, mean: Tensor) -> Tensor:
    """Whether a spread of float32 numbers is no more than their rounding; to be treated as 0, never divided by.

    Compute both in float64: the float32 mean of equal numbers may be another one, and their spread above 0.
    """
    return std <= ROUNDING * mean.abs()


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8), with mean and uncorrected variance over the mask; 0 if x does not vary there.

    Args:
        x: `[B, S-1]`, all samples of the rollout: statistics of a part are not those of the whole.
        mask: `[B, S-1]`, 0 or 1.

    Returns: `[B, S-1]` in the dtype of `x`, 0 outside the mask.
    Raises: ValueError if shapes differ.
    Source: reference section 6, normalisation.
    """
    mean = masked_mean(x.double(), mask.double())
    centred = x.double() - mean
    variance = masked_mean(centred.square(), mask.double())
    whitened = _weigh(centred * torch.rsqrt(variance + WHITEN_EPSILON), mask)
    return torch.where(is_rounding(variance.sqrt(), mean), 0.0, whitened).to(x.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the mask, a scalar.

    1: the values predict the returns up to a constant; 0: no better than a constant; below 0: worse. It is 0,
    not NaN, where the returns do not vary (an empty mask included). For an honest figure pass Monte-Carlo
    returns, `gae(..., lam=1)[1]`: returns of a smaller lam contain the values that they are compared with.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t.
        returns: `[B, S-1]`, from `gae`.
        mask: `[B, S-1]`, 0 or 1.

    Raises: ValueError if shapes differ.
    """
    require_same_shape(values=values, returns=returns, mask=mask)
    values, returns, mask = values.double(), returns.double(), mask.double()
    total = _masked_variance(returns, mask)
    explained = 1 - _masked_variance(returns - values, mask) / total
    return torch.where(is_rounding(total.sqrt(), masked_mean(returns, mask)), 0.0, explained)


def _masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def _weigh(x: Tensor, mask: Tensor) -> Tensor:
    # Replaced, not only multiplied: 0 * NaN and 0 * inf are NaN.
    return x.masked_fill(mask == 0, 0.0) * mask
