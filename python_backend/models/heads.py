"""From per-token outputs to rewards: pooling, merging of attributes, standardisation.

NeMo-Aligner's order: attributes in fp32, pooled, merged, standardised. Tensors in, tensors out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pool_last(outputs: Tensor, lengths: Tensor) -> Tensor:
    """`[B, A]`: what `outputs` `[B, S, A]` says at each row's last token, index length-1.

    Hugging Face pools the last token *that is not the padding id*. The two differ where a row itself ends with
    that id, as it does when the end-of-text token is also the padding token. The length is the truth here; a text
    that a reward model tokenises itself ends before such tokens (`RewardModel.skipped_pad_id`).

    Args:
        lengths: int64 `[B]`, in tokens, each in [1, S].
    """
    return outputs.take_along_dim((lengths - 1)[:, None, None], dim=1).squeeze(1)


def pool_mean(outputs: Tensor, lengths: Tensor) -> Tensor:
    """`[B, A]`: mean of `outputs` `[B, S, A]` over each row's tokens 0 ... length-1.

    A linear head's mean over tokens is the head of the mean hidden state, so either order gives this.

    Args:
        lengths: int64 `[B]`, in tokens, each in [1, S].
    """
    steps = torch.arange(outputs.shape[1], device=outputs.device)
    valid = (steps[None] < lengths[:, None]).unsqueeze(-1)
    return outputs.masked_fill(~valid, 0.0).sum(dim=1) / lengths[:, None]


def merge_attributes(scores: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum `[B, 1]` of attribute scores `[B, A]` under `weights` `[A]`.

    The order of HelpSteer's nine: quality, toxicity, humor, creativity, helpfulness, correctness, coherence,
    complexity, verbosity.
    """
    assert scores.shape[-1] == weights.shape[0], (scores.shape, weights.shape)
    return (scores * weights).sum(dim=-1, keepdim=True)


def standardise(values: Tensor, mean: float, std: float) -> Tensor:
    """`(values - mean) / std` elementwise, of rewards `[B, A]` as of values `[B, S]`; `std` > 0."""
    return (values - mean) / std
