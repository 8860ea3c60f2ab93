"""The batch of one training step: rows of tokens, padded on the right.

`B`: number of rows. `S`: tokens of the longest row. Position t of a tensor `[B, S-1]` belongs to token t+1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PPOBatch:
    """The batch that policy and critic train on."""

    tokens: Tensor  # int64 [B, S], prompt and response
    lengths: Tensor  # int64 [B], tokens of prompt and response
    mask: Tensor  # float32 [B, S-1], 1 where a response token of a scored row is predicted
    policy_weights: Tensor  # float32 [B, S-1], weight of each token in the loss's means; 0 outside the mask
    logprobs: Tensor | None  # float32 [B, S-1], old log-probs; None if not needed because the ratio is 1
    ref_logprobs: Tensor | None  # float32 [B, S-1]; None if no KL is used or measured
    advantages: Tensor  # float32 [B, S-1], 0 outside the tokens that the policy learns from
    returns: Tensor  # float32 [B, S-1]
    prev_values: Tensor  # float32 [B, S-1]
    kl: Tensor | None  # float32 [B, S-1], KL estimate per token, not multiplied by kl_coef; None if not measured
    groups: Tensor  # int64 [B], equal for responses to the same prompt
    versions: Tensor  # int64 [B], version of the critic that scored the row; -1 without a critic
    positive: Tensor  # bool [B], whether the score is positive
    conversations: Tensor  # int64 [B], equal for the rows of a conversation
    rewards_to_go: Tensor | None = None  # float32 [B, S-1], Monte-Carlo returns; None without a critic
    importance: Tensor | None = None  # float32 [B, S-1], factor of each token's policy loss; None: 1
    sampled_logprobs: Tensor | None = None  # float32 [B, S-1], from the engine that sampled, for importance factors

    def first(self, rows: int, width: int) -> PPOBatch:
        """Return the first `rows` rows, cut to their first `width` tokens."""
        tensors = {name: tensor[:rows] for name, tensor in vars(self).items() if tensor is not None}
        wide = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2}
        return replace(self, **tensors | {name: wide[name][:, : width - (name != "tokens")] for name in wide})
