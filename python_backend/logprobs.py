"""Log-probs of given tokens under the distribution that they were sampled from.
Given: logits. Returns: one number per predicted token, in nats; differentiable.
The actor's policy and the served reference run this code: two copies of the formula would show up as KL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float, banned_token_ids: Sequence[int] = ()
) -> Tensor:
    """Log-prob of token t+1 at position t, under the distribution that it was sampled from.

        z_t = logits_t / temperature, z_t[banned] = -inf
        logprob_t = z_t[tokens_{t+1}] - logsumexp(z_t)

    Equals log_softmax and gather, without the `[B, S, V]` result of log_softmax; half precision is computed
    in float32. Where token t+1 is banned the result is -inf: sampling cannot have drawn it, so it belongs to a
    prompt or to padding, outside the mask, and everything in `actor.advantages` and `actor.ppo_loss` accepts it there.

    Args:
        logits: `[B, S, V]`; position t predicts token t+1, the last position is unused.
        tokens: `[B, S]`, integer ids in [0, V), padding included.
        temperature: the sampling temperature, > 0.
        banned_token_ids: ids that sampling never draws, at any position.

    Returns: `[B, S-1]` in nats.
    Raises: ValueError if temperature <= 0, a banned id is not in [0, V), all are banned, or a shape is wrong.
    Source: reference section 6.
    """
    if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
        shapes = f"{tuple(logits.shape)} and {tuple(tokens.shape)}"
        raise ValueError(f"expected logits [B, S, V] and tokens [B, S], got {shapes}")
    return target_logprobs(logits[:, :-1], tokens[:, 1:], temperature=temperature, banned_token_ids=banned_token_ids)


def target_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, banned_token_ids: Sequence[int] = ()
) -> Tensor:
    """Log-prob `[...]` of the token `targets` `[...]` that each position's `logits` `[..., V]` predict.

    Raises: ValueError as `token_logprobs`.
    """
    scaled = sampling_logits(logits, temperature, banned_token_ids)
    return scaled.gather(-1, targets[..., None].long()).squeeze(-1) - scaled.logsumexp(-1)


def sampling_logits(logits: Tensor, temperature: float, banned_token_ids: Sequence[int]) -> Tensor:
    """`logits` `[..., V]` of the sampling distribution, not normalised, at least float32.

    Raises: ValueError as `token_logprobs`.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    num_symbols = logits.shape[-1]
    banned = sorted(set(banned_token_ids))
    if banned and not (banned[0] >= 0 and banned[-1] < num_symbols and len(banned) < num_symbols):
        raise ValueError(f"banned_token_ids must be some, not all, of [0, {num_symbols}), got {banned}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    if banned:
        logits = logits.index_fill(-1, torch.tensor(banned, device=logits.device), -math.inf)
    return logits
