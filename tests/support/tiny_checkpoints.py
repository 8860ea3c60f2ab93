"""Random Hugging Face checkpoints of a few thousand weights, one of each family, made in milliseconds."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

VOCAB = 40
POSITIONS = 32
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
    "llama": _SIZES,
    "qwen2": {**_SIZES, "num_key_value_heads": 1},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS},
    "bert": _SIZES,
    "deberta-v3": {**_SIZES, **_DEBERTA, "model_type": "deberta-v2"},
}
# Families with a peculiarity: no (token) classification class, positions from the mask, a head of two layers.
MORE_CONFIGS = {
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "gptj": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "roberta": {**_SIZES, "max_position_embeddings": POSITIONS + 1},
    "phi3": {**_SIZES, "eos_token_id": 2},
    "mistral": _SIZES,
    "qwen3": {**_SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "gpt-neox": _SIZES,
    "granite": {**_SIZES, "eos_token_id": 1, "bos_token_id": None},
    "pegasus": {"vocab_size": VOCAB, "d_model": 16, "decoder_ffn_dim": 24, "decoder_attention_heads": 2}
    | {"decoder_layers": 2, "is_encoder_decoder": False, "max_position_embeddings": POSITIONS},
}
_MIXTURE = {**_SIZES, "eos_token_id": 1, "bos_token_id": None, "num_experts_per_tok": 2}
MIXTURES = {  # mixtures of experts: in memory one tensor per layer for all experts, in most files one per expert
    "mixtral": {**_MIXTURE, "num_local_experts": 4, "num_key_value_heads": 1},
    "qwen2-moe": {
        **_MIXTURE,
        "num_experts": 4,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3-moe": {**_MIXTURE, "num_experts": 4, "num_key_value_heads": 1, "moe_intermediate_size": 12, "head_dim": 8},
    "olmoe": {**_MIXTURE, "num_experts": 4},
    "phimoe": {**_MIXTURE, "num_local_experts": 4, "num_key_value_heads": 1},
    "granitemoe": {**_MIXTURE, "num_local_experts": 4},
}
HEADS = {
    "reward": AutoModelForSequenceClassification,
    "critic": AutoModelForTokenClassification,
    "body": AutoModel,
    "language": AutoModelForCausalLM,
}


def save_tiny(folder, family, head, *, seed=0, num_labels=1, **settings):
    """Save a checkpoint of `family` (a key of [MORE_]CONFIGS or MIXTURES) with `head` (of HEADS); return the model."""
    sizes = {**CONFIGS, **MORE_CONFIGS, **MIXTURES}[family]
    given = {"model_type": family.replace("-", "_"), "pad_token_id": 0, **sizes, **settings, "num_labels": num_labels}
    return save_random(folder, lambda: HEADS[head].from_config(AutoConfig.for_model(**given)), seed=seed)


def save_random(folder, make, *, seed=0):
    """Save a new model with random weights; return it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.eval().save_pretrained(folder)
    return model


def save_with_value_head(folder, family, *, prefix, num_labels=1, bias=False, seed=0, **config):
    """Save a language model whose file also has a linear value head `<prefix>.weight`; return (body, head).

    TRL (`v_head.summary`, with a bias) and OpenRLHF (`value_head_prefix` in the config) write such files.
    """
    model = save_tiny(folder, family, "language", seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        head = torch.nn.Linear(model.config.hidden_size, num_labels, bias=bias)
    tensors = {f"{prefix}.{name}": tensor.detach() for name, tensor in head.named_parameters()}
    add_tensors(folder, tensors)
    change_config(folder, **config)
    return model.base_model, head


def save_with_layers(folder):
    """Save a body under a head of two layers."""
    model = save_tiny(folder, "llama", "critic")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.score = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model.save_pretrained(folder)


def change_tensors(folder, change):
    """Let `change` modify the tensors of the checkpoint's file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def add_tensors(folder, tensors):
    """Add tensors to the checkpoint's file."""
    change_tensors(folder, lambda own: own.update(tensors))


def change_config(folder, **settings):
    """Set keys of the checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
