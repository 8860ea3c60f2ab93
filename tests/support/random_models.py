"""A Llama with random weights, and a tokenizer of given words."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from rlhf_triton.models.modeling import quiet_transformers

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_labels": 1,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def random_llama(kind, *, seed, **settings):
    """Return a model; `kind`: policy, reward or critic; `settings`: `LlamaConfig` arguments that override `SMALL`."""
    quiet_transformers()
    torch.manual_seed(seed)
    kinds = {
        "policy": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
        "critic": LlamaForTokenClassification,
    }
    return kinds[kind](LlamaConfig(**{**SMALL, **settings}))


def word_tokenizer(words, *, unknown, special=None):
    """Return a tokenizer that splits text at spaces.

    Args:
        words: token i is `words[i]`; or {word: id}.
        unknown: the word that stands for others; None: they are dropped.
        special: {role: word}; default: `<pad>`, `<eos>` and `unknown`.
    """
    ids = words if isinstance(words, dict) else {word: i for i, word in enumerate(words)}
    bare = Tokenizer(models.BPE(ids, []) if unknown is None else models.WordLevel(ids, unk_token=unknown))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = special or {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": unknown}
    return PreTrainedTokenizerFast(tokenizer_object=bare, **special)
