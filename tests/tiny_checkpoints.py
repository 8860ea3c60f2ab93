"""Random Hugging Face checkpoints of a few thousand weights, one of each family, made in milliseconds.
Given: a folder and a seed. Returns: the transformers model that was saved there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

VOCAB, POSITIONS = 40, 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
}
_DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CONFIGS = {
    "llama": (LlamaConfig, _SIZES),
    "qwen2": (Qwen2Config, {**_SIZES, "num_key_value_heads": 1}),
    "gpt2": (GPT2Config, {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}),
    "bert": (BertConfig, _SIZES),
    "deberta-v3": (DebertaV2Config, {**_SIZES, **_DEBERTA}),
}
HEADS = {"reward": AutoModelForSequenceClassification, "critic": AutoModelForTokenClassification, "body": AutoModel}


def save_tiny(folder: Path, family: str, head: str, *, seed: int = 0, num_labels: int = 1, **settings: Any) -> Any:
    """Save a checkpoint of `family` (a key of CONFIGS) with `head` (a key of HEADS); returns the model."""
    kind, sizes = CONFIGS[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = HEADS[head].from_config(kind(**{"pad_token_id": 0, **sizes, **settings, "num_labels": num_labels}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.eval().save_pretrained(folder)
    return model
