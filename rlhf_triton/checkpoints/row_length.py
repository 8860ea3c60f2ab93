"""Row lengths up to which a row's outputs depend neither on other rows nor on earlier forward passes.

With two rope types, the longest row of a forward pass decides which rotary table transformers uses for all rows.
`longrope` (Phi-3 128k) switches tables beyond `original_max_position_embeddings`. `dynamic` recomputes its table
beyond `max_position_embeddings` and keeps it for later forward passes. The table is stored in the module, so threads
that share the module would race. BigBird's block-sparse attention switches to full attention permanently at the
first forward pass that is too short for it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_triton.checkpoints.config_keys import read_key

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the first one that is set counts
BY_LENGTH = ("dynamic", "longrope")  # rope types that transformers' `dynamic_rope_update` updates
FIXED = "fixed"  # a rope type that `dynamic_rope_update` leaves alone


def num_positions(get: Callable[[str], Any]) -> Any:
    """Return a model's number of positions, or None. `get` returns a key of its configuration.

    Numbers below 1 mean that there is no limit, such as XLNet's -1.
    """
    return next((value for name in POSITIONS if (value := get(name))), None)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Return the maximum row length of a model: its number of positions, or `stable_length` if that is smaller."""
    text = text_config(config)
    limits = (num_positions(lambda name: read_key(text, name, int, None)), stable_length(config))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json about the language model: all of it, unless the model also reads images."""
    return read_key(config, "text_config", dict, None) or config


def stable_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum row length at which transformers keeps one rotary table and full attention; None: no limit.

    A `longrope` model whose long and short factors are equal has only one table, and therefore no limit.
    """
    text = text_config(config)
    rope = read_key(text, "rope_parameters", dict, None) or read_key(text, "rope_scaling", dict, {})
    positions = read_key(text, "max_position_embeddings", int, None)
    limits: list[int | None] = []
    if text.get("attention_type") == "block_sparse" and not read_key(text, "is_encoder_decoder", bool, False):
        blocks = 5 + 2 * read_key(text, "num_random_blocks", int, 3)  # formula and defaults as in BigBirdModel
        limits.append(blocks * read_key(text, "block_size", int, 64))
    # `rope` contains the parameters, or maps each layer type to its parameters.
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if "dynamic" in str(each.get("rope_type") or each.get("type")):
            limits.append(positions)
        elif any(each.get(f"long_{name}") != each.get(f"short_{name}") for name in ("factor", "mscale")):
            originals = (read_key(part, "original_max_position_embeddings", int, None) for part in (text, each))
            limits.append(next(filter(None, originals), positions))
    return min((limit for limit in limits if limit), default=None)


def fix_forward(model: Any) -> None:
    """Make `model` use full attention and the rotary table that it was loaded with in every forward pass.

    Up to `stable_length`, its outputs equal transformers'. The caller must reject longer rows.
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
