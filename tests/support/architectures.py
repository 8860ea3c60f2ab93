"""Random models of a few thousand weights of most architectures that transformers can classify rows or tokens with."""

from tiny_checkpoints import save_random
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

VOCAB = 40
POSITIONS = 64
KINDS = {"reward": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "critic": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING}
_OF_16 = (
    "hidden_size",
    "d_model",
    "n_embd",
    "emb_dim",
    "dim",
    "embedding_size",
    "word_embed_proj_dim",
    "shared_expert",
)
_OF_24 = ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim", "d_inner")
_OF_2 = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "type_vocab_size",
)
_OF_8 = (
    "head_dim",
    "kv_channels",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_SIZES = {  # those that a configuration does not have are left out
    **dict.fromkeys(_OF_16, 16),
    **dict.fromkeys(_OF_24, 24),
    **dict.fromkeys(_OF_2, 2),
    **dict.fromkeys(_OF_8, 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "rotary_dim"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 12),
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
}
_SETTINGS = {
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2},
    "longformer": {"attention_window": [4, 4], "sep_token_id": 2},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "mistral4": {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8},
    "mobilebert": {"hidden_size": 32, "intra_bottleneck_size": 16},
    "modernbert": {"local_attention": 8},
    "modernbert-decoder": {"local_attention": 8},
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [8, 8],
        "is_decoder": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "xmod": {"languages": ["en"], "default_language": "en"},
}


def save_architecture(folder, model_type, kind):
    """Save a model of `kind` (of KINDS) and return it; None if transformers has no class for it."""
    config = CONFIG_MAPPING[model_type]
    known = {*config().to_dict(), *config.attribute_map}
    settings = {name: size for name, size in _SIZES.items() if name in known}
    made = config(**{**settings, **_SETTINGS.get(model_type, {}), "num_labels": 1})
    if type(made) not in KINDS[kind]:
        return None
    return save_random(folder, lambda: KINDS[kind][type(made)](made))
