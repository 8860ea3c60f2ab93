"""Limits on row lengths, within which a forward pass depends neither on its other rows nor on earlier ones.

For two rope types, the longest row of a forward pass decides which rotary table transformers uses for all rows.
`longrope` (Phi-3 128k) switches tables beyond `original_max_position_embeddings`. `dynamic` recomputes its table beyond
`max_position_embeddings` and keeps it for later forward passes. The table is stored in the module, so threads that
share the module would race. BigBird's block-sparse attention becomes full attention for good at the first forward pass
that is too short for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # in the order in which they count
BY_LENGTH = ("dynamic", "longrope")  # rope types that transformers' `dynamic_rope_update` updates
FIXED = "fixed"  # a rope type that `dynamic_rope_update` leaves alone


def num_positions(get: Callable[[str], Any]) -> Any:
    """Return a model's number of positions, under whatever name `get` finds it in its configuration; None if nowhere.

    It is no limit if it is not above 0: XLNet's is -1.
    """
    return next((found for name in POSITIONS if (found := get(name))), None)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the maximum row length of a model: its number of positions, or `stable_length` if that is smaller."""
    text = config.get("text_config") or config
    limits = (num_positions(text.get), stable_length(config))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def stable_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum row length for which transformers uses one rotary table, and full attention; None: any.

    A `longrope` model whose long and short factors are equal has only one table, and therefore no limit.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    positions = text.get("max_position_embeddings")
    limits = []
    if text.get("attention_type") == "block_sparse" and not text.get("is_encoder_decoder"):
        limits.append((5 + 2 * text["num_random_blocks"]) * text["block_size"])  # as in transformers' BigBirdModel
    # `rope` contains the parameters, or maps each layer type to its parameters.
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if "dynamic" in str(each.get("rope_type") or each.get("type")):
            limits.append(positions)
        elif any(each.get(f"long_{name}") != each.get(f"short_{name}") for name in ("factor", "mscale")):
            original = text.get("original_max_position_embeddings") or each.get("original_max_position_embeddings")
            limits.append(original or positions)
    return min((limit for limit in limits if limit), default=None)


def fix_forward(model: Any) -> None:
    """Make every forward pass of `model` use the rotary table that it was loaded with, and full attention.

    Up to `stable_length`, the model's outputs equal those of transformers. The caller must reject longer rows.
    """
    if getattr(model.base_model, "attention_type", None) == "block_sparse":
        model.base_model.set_attention_type("original_full")
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _fixed(kind)
        elif isinstance(kind, dict):
            module.rope_type = {layer: _fixed(each) for layer, each in kind.items()}


def _fixed(kind: str) -> str:
    return FIXED if any(name in kind for name in BY_LENGTH) else kind
