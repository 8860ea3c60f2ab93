"""Rewards read at single tokens: process rewards, and rewards from a causal LM's next-token logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf_triton.checkpoints.heads import Head
from rlhf_triton.checkpoints.inspection import CheckpointError, CheckpointInfo, inspect_checkpoint, reward_head
from rlhf_triton.checkpoints.tokenization import single_tokens
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.models.loading import load_causal_model
from rlhf_triton.models.modeling import RewardModel, StandardizationChoice, constants_for, load_reward
from rlhf_triton.models.output_head import keep_outputs
from rlhf_triton.models.stored_heads import placed_head
from rlhf_triton.models.token_head import TokenHead

LOG_ODDS = ((1.0, -1.0), (-1.0, 1.0))  # weights of two labels' outputs whose sum is the log-odds of label 0, or of 1


def load_process_reward(
    folder: Path,
    *,
    score: Literal["auto", "logit", "probability"] = "auto",
    attribute_weights: Sequence[float] | None = None,
    **settings: Any,
) -> RewardModel:
    """Load a process reward from a checkpoint with a head on each token, such as a token classifier or value head.

    Args:
        score: `logit`: the only output, the log-odds of the good label of two (`CheckpointInfo.good_label`), or the sum
            weighted by `attribute_weights`; `probability`: the sigmoid of the logit; `auto`: `probability` for two
            labels, otherwise `logit`.
        settings: further arguments of `load_reward`.

    Raises:
        CheckpointError: the folder is not a checkpoint, has no linear head, or a setting does not fit it.
    """
    info = inspect_checkpoint(folder)
    head = placed_head(info, reward_head(info), "last")
    return load_reward(
        folder,
        pooling="last",
        attribute_weights=_label_weights(info, head, attribute_weights),
        probability=score == "probability" or (score == "auto" and head.num_labels == 2),
        **settings,
    )


def load_logit_reward(
    folder: Path,
    *,
    tokens: Sequence[str | int],
    against: Sequence[str | int] = (),
    probability: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    standardization: StandardizationChoice = "model",
) -> RewardModel:
    """Load a reward computed from a causal LM's next-token logits, without generation.

    Only the needed rows of the output layer are kept.

    Args:
        tokens: names or ids of tokens (`single_tokens`) that count for the response.
        against: tokens that count against the response; the score is then the log-odds of `tokens`. Empty: the score is
            the logit of `tokens` (logsumexp of several).
        probability: return the sigmoid of the log-odds: the probability of `tokens` among `tokens` and `against`.

    Raises:
        CheckpointError: the folder has no causal LM or no tokenizer, a name is not one token, or the logits are not
            linear in the hidden states.
    """
    info = inspect_checkpoint(folder)
    ids = single_tokens(load_tokenizer(folder), [*tokens, *against])
    model = load_causal_model(info, dtype)
    try:
        keep_outputs(model, ids)
    except ValueError as error:
        raise CheckpointError(f"{folder}: its logits cannot be a reward: {error}") from error
    return RewardModel(
        TokenHead(model.to(device)),
        constants=constants_for(info, standardization),
        num_for=len(tokens),
        probability=probability,
    )


def _label_weights(info: CheckpointInfo, head: Head, weights: Sequence[float] | None) -> Sequence[float] | None:
    """Return the weights that merge a head's outputs into one score; None if it has only one output."""
    if not head.is_plain:
        raise CheckpointError(
            f"{info.folder}: the head {head.prefix} has its own pooling or gate, so it cannot score single tokens; use "
            "a token classification checkpoint, or a decoder with a linear head"
        )
    if weights is not None or head.num_labels == 1:
        return weights
    if info.good_label is None:  # or more than two labels
        raise CheckpointError(
            f"{info.folder}: unknown which of its {head.num_labels} labels ({', '.join(info.label_names)}) marks a "
            "correct step; set reward.attribute_weights, such as 1 for this label and -1 for the other"
        )
    return LOG_ODDS[info.good_label]
