"""Chooses the attention implementation of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from python_backend.checkpoints.inspection import CheckpointError


def use_attention(model: Any, attention: str, key: str) -> None:
    """Make the model compute attention with `attention`, a name of transformers; `auto` keeps transformers' choice.

    Args:
        key: the configuration key that asked for it, for the error.

    Raises:
        CheckpointError: the model, or this machine, does not support it.
    """
    if attention == "auto":
        return
    try:
        model.set_attn_implementation(attention)
        reason = f"it supports only {model.config._attn_implementation}"
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
    if model.config._attn_implementation != attention:
        raise CheckpointError(f"{key}: {type(model).__name__} cannot use {attention} ({reason}); set it to auto")
