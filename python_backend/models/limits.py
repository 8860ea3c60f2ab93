"""Limits on the rows that a loaded model takes."""

from __future__ import annotations

from typing import Any

from python_backend.checkpoints.positions import stable_length
from python_backend.wire.contract import Limits


def limits_of(model: Any) -> Limits:
    """Return the limits of a Hugging Face model: vocabulary size and maximum row length in tokens.

    Rows are also limited to `stable_length`: a longer row would change the forward pass of others.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():  # RoBERTa's position ids start after its padding index
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = positions, stable_length(model.config.to_dict())
    known = [int(limit) for limit in limits if limit and limit > 0]  # XLNet's positions are -1: it has no limit
    return Limits(model.get_input_embeddings().num_embeddings, min(known, default=None))
