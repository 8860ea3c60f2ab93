"""Log-probs of given tokens under the sampling distribution, in nats; differentiable.

The actor's policy and the served reference share this code: any difference between two implementations would show up
as KL.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def target_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float, banned_token_ids: Sequence[int] = ()
) -> Tensor:
    """Return the log-prob of each target under the sampling distribution.

        z = logits / temperature, z[banned] = -inf
        logprob = z[target] - logsumexp(z)

    Equals log_softmax followed by gather, without materialising the `[..., V]` result of log_softmax. Half-precision
    logits are converted to float32. The result is -inf for a banned target: such a token cannot have been sampled, so
    it belongs to a prompt or to padding, outside the mask, where `advantages` and `losses` in `actor.algorithms`
    accept -inf.

    Args:
        logits: `[..., V]`.
        targets: `[...]`, integer ids in [0, V).
        temperature: the sampling temperature, > 0.
        banned_token_ids: ids that are never sampled, at any position.

    Returns:
        Log-probs `[...]` in nats.

    Raises:
        ValueError: temperature <= 0, a banned id is not in [0, V), all ids are banned, or a shape is wrong.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"expected logits [..., V] and targets [...], got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    scaled = sampling_logits(logits, temperature, banned_token_ids)
    return scaled.gather(-1, targets[..., None].long()).squeeze(-1) - scaled.logsumexp(-1)


def sampling_entropy(logits: Tensor, *, temperature: float, banned_token_ids: Sequence[int] = ()) -> Tensor:
    """Return the entropy `[...]` in nats, H = -sum_v p_v log p_v, of the sampling distribution of `logits` `[..., V]`.

    A banned token has p = 0 and contributes 0.

    Raises:
        ValueError: as `target_logprobs`.
    """
    logp = sampling_logits(logits, temperature, banned_token_ids).log_softmax(-1)
    # p log p is 0 at p = 0, where the plain product would be 0 * -inf = NaN.
    return -(logp.exp() * logp.masked_fill(logp == -math.inf, 0.0)).sum(-1)


def sampling_logits(
    logits: Tensor, temperature: float, banned_token_ids: Sequence[int], *, in_place: bool = False
) -> Tensor:
    """Return the unnormalised logits `[..., V]` of the sampling distribution, in float32 or wider.

    Args:
        in_place: overwrite `logits`, which saves vocabulary-sized copies.

    Raises:
        ValueError: as `target_logprobs`.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    num_symbols = logits.shape[-1]
    banned = tuple(sorted(set(banned_token_ids)))
    wrong = [token for token in banned if not 0 <= token < num_symbols]
    if wrong:
        raise ValueError(f"banned_token_ids has {wrong[0]}, which is not in [0, {num_symbols})")
    if len(banned) == num_symbols:
        raise ValueError(f"banned_token_ids has all {num_symbols} ids; leave at least one")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1:
        logits = logits.div_(temperature) if in_place else logits / temperature
    if banned:
        fill = logits.index_fill_ if in_place else logits.index_fill
        logits = fill(-1, ids_on(logits.device, banned), -math.inf)
    return logits


@functools.lru_cache(maxsize=64)
def ids_on(device: torch.device, ids: tuple[int, ...]) -> Tensor:
    """Return token ids int64 `[N]` on a device, copied there once: a copy makes the host wait for the device."""
    return torch.tensor(ids, device=device)
