"""The critic's loss: squared error with PPO's value clip.

Tensors are `[B, S-1]`. A micro-batch's loss is its share of the whole batch's loss, so the split does not matter.
"""

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor,
    prev_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_value: float,
    num_tokens: float,
) -> Tensor:
    """Return the clipped value loss of a micro-batch, as its share of the loss of the whole batch.

        V_clip = V_old + clamp(V - V_old, -clip_value, clip_value)
        loss = 0.5 * sum_t mask_t * max((V_clip_t - R_t)^2, (V_t - R_t)^2) / num_tokens

    The losses of all micro-batches add up to the masked mean over the batch. Masked positions contribute 0, even if
    they contain NaN.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t: the critic's `[B, S]` without the last position.
        prev_values: `[B, S-1]`, V_old: the values at rollout time.
        returns: `[B, S-1]`, targets R_t.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        clip_value: clip range around V_old, in units of value; <= 0 means no clipping: 0.5 * (V - R)^2.
        num_tokens: number of ones in the mask of the whole batch, over all micro-batches and ranks. 0 is valid only
            with an all-zero mask and gives loss 0 and zero gradient.

    Returns:
        Scalar tensor.

    Source: OpenAI baselines, ppo2 (the value clip is not in the PPO paper, Schulman et al. 2017).
    """
    # Fill masked positions instead of only multiplying by the mask: NaN * 0 is NaN, in the loss and in its gradient.
    values, prev_values, returns = (x.masked_fill(mask == 0, 0.0) for x in (values, prev_values, returns))
    error = (values - returns).square()
    if clip_value > 0:
        clipped = prev_values + (values - prev_values).clamp(-clip_value, clip_value)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * (error * mask).sum() / (num_tokens or 1)
