"""Limits on row lengths, and rotary positions that do not depend on the other rows of a forward.

transformers makes two rotary tables by the longest row of a forward, for all of its rows: `longrope` (Phi-3 128k) has
another one beyond `original_max_position_embeddings`, `dynamic` beyond `max_position_embeddings`, which it also keeps
for the forwards that follow. The table is written into the module, so threads that share it would race.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_LENGTH = ("dynamic", "longrope")  # the rope types that transformers' `dynamic_rope_update` looks for
FIXED = "fixed"  # one that it does not


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Longest row that a model of this config.json takes: its positions, or the `rotary_limit` below them."""
    text = config.get("text_config") or config
    limits = (text.get("max_position_embeddings") or text.get("n_positions"), rotary_limit(config))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def rotary_limit(config: Mapping[str, Any]) -> int | None:
    """Longest row for which transformers leaves the rotary table as it is loaded; None: it does for every row.

    A `longrope` whose long factors are its short ones has one table only.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    positions = text.get("max_position_embeddings")
    limits = []
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):  # or one for each kind of layer
        if "dynamic" in str(each.get("rope_type") or each.get("type")):
            limits.append(positions)
        elif any(each.get(f"long_{name}") != each.get(f"short_{name}") for name in ("factor", "mscale")):
            original = text.get("original_max_position_embeddings") or each.get("original_max_position_embeddings")
            limits.append(original or positions)
    return min((limit for limit in limits if limit), default=None)


def fix_rotary(model: Any) -> None:
    """Have every forward of `model` use the table that it was loaded with, that of rows up to `rotary_limit`.

    What longer rows get from it is not what transformers would give them: they are for the caller to refuse.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _fixed(kind)
        elif isinstance(kind, dict):
            module.rope_type = {layer: _fixed(each) for layer, each in kind.items()}


def _fixed(kind: str) -> str:
    return FIXED if any(name in kind for name in BY_LENGTH) else kind
