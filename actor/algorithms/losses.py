"""Policy losses. Each is a share of the minibatch's mean, so the split into micro-batches never changes the gradient,
and proportional to the advantages, which importance weights multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actor.algorithms.inputs import LossInputs


def clipped(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate loss.

        rho_t = exp(clamp(logprobs_t - old_logprobs_t, -20, 20))
        l_t = max(-A_t * rho_t, -A_t * clamp(rho_t, 1 - low, 1 + high))
        l_t = min(l_t, -A_t * dual) where A_t < 0, if the clip has a dual
        loss = sum_t w_t * l_t / total

    The dual clip bounds the loss of tokens with a negative advantage that have become much more likely since they
    were sampled.

    Returns: (loss, metrics): `clip_fraction` counts the tokens whose gradient was removed by a clip.
    Source: Schulman et al. 2017 (arXiv 1707.06347), equation 7; clip-higher: Yu et al. 2025 (arXiv 2503.14476);
        dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.
    """
    advantages, clip = inputs.advantages, inputs.clip
    ratio = inputs.log_ratio.exp()
    clamped = ratio.clamp(1 - clip.low, 1 + clip.high)
    free, bounded = -advantages * ratio, -advantages * clamped
    token_loss, is_clipped = torch.maximum(free, bounded), bounded > free
    if clip.dual is not None:
        most = -advantages * clip.dual
        is_clipped = is_clipped | ((advantages < 0) & (token_loss > most))
        token_loss = torch.where(advantages < 0, torch.minimum(token_loss, most), token_loss)
    return inputs.mean(token_loss), {
        "clip_fraction": inputs.sum(is_clipped),
        "ppo_ratio_clamped": inputs.sum(clamped),
    }


def reinforce(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the REINFORCE loss, -sum_t w_t * A_t * logprobs_t / total.

    Its gradient equals that of the clipped loss at ratio 1, so it is meant for on-policy samples.

    Source: Williams 1992, "Simple statistical gradient-following algorithms", equation 11.
    """
    return inputs.mean(-inputs.advantages * inputs.logprobs), {}
