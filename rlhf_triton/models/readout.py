"""Computes rewards from a head's outputs: pooling, weighted sum of attributes, log-odds, standardisation.

As in NeMo-Aligner, attributes are pooled in fp32, then merged, then standardised. Tensors in, tensors out.
"""

import torch
from torch import Tensor


def pool_last(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Return `[B, A]`: `outputs` `[B, S, A]` at each row's last token, index length-1.

    Hugging Face instead pools the last token that is *not the padding id*. The results differ if a row ends with that
    id, which happens when the end-of-text token is also the padding token. Sentences lose trailing padding ids after
    tokenisation instead (`RewardModel.skipped_pad_id`).

    Args:
        lengths: int64 `[B]`, in tokens, each in [1, S].
    """
    return outputs.take_along_dim((lengths - 1)[:, None, None], dim=1).squeeze(1)


def pool_mean(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Return `[B, A]`: mean of `outputs` `[B, S, A]` over each row's tokens 0 ... length-1.

    For a linear head this equals applying the head to the mean hidden state.

    Args:
        lengths: int64 `[B]`, in tokens, each in [1, S].
    """
    steps = torch.arange(outputs.shape[1], device=outputs.device)
    valid = (steps[None] < lengths[:, None]).unsqueeze(-1)
    return outputs.masked_fill(~valid, 0.0).sum(dim=1) / lengths[:, None]


POOLS = {"last": pool_last, "mean": pool_mean}  # by the names in `checkpoints.heads.Pooling`


def merge_attributes(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum `[B, 1]` of attribute scores `[B, A]` with `weights` `[A]`.

    The nine HelpSteer attributes are in this order: quality, toxicity, humor, creativity, helpfulness, correctness,
    coherence, complexity, verbosity.
    """
    assert scores.shape[-1] == weights.shape[0], (scores.shape, weights.shape)
    return (scores * weights).sum(dim=-1, keepdim=True)


def label_probabilities(scores: Tensor, problem_type: str | None) -> Tensor:
    """Return the label probabilities `[B, A]` for `scores` `[B, A]`, as transformers' pipeline computes them.

    `problem_type`: from the model's configuration; a regression's scores are returned unchanged.
    """
    if problem_type == "regression":
        return scores
    if problem_type == "multi_label_classification" or scores.shape[-1] == 1:
        return scores.sigmoid()
    return scores.softmax(-1)


def standardise(values: Tensor, mean: float, std: float) -> Tensor:
    """Return `(values - mean) / std` elementwise, for `values` of any shape; `std` > 0."""
    return (values - mean) / std


def log_odds(outputs: Tensor, num_for: int) -> Tensor:
    """Return `[..., 1]`: the log-odds of the first `num_for` of `outputs` `[..., A]` against the others.

    logsumexp(outputs[:num_for]) - logsumexp(outputs[num_for:]), which for next-token logits is the difference of the
    log-probs, log p(for) - log p(against). If there are no others, only the first term.
    """
    favourable = outputs[..., :num_for].logsumexp(-1, keepdim=True)
    if num_for == outputs.shape[-1]:
        return favourable
    return favourable - outputs[..., num_for:].logsumexp(-1, keepdim=True)
