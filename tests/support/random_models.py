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


def word_tokenizer(words, *, unknown):
    """Return a tokenizer that splits text at spaces; `words[i]` is token i; `<pad>` and `<eos>` must be words."""
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", unk_token=unknown)
