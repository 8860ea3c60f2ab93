"""Small Llamas with random weights and byte-level tokenizers, for the fuzz test and the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def random_llama(kind: str, *, seed: int, **settings: Any) -> Any:
    """Return a model; `kind`: policy, reward or critic; `settings`: `LlamaConfig` arguments that override `SMALL`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

    from python_backend.models.modeling import quiet_transformers

    quiet_transformers()
    torch.manual_seed(seed)
    kinds = {
        "policy": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
        "critic": LlamaForTokenClassification,
    }
    return kinds[kind](LlamaConfig(**{**SMALL, **settings}))


def train_bpe(
    texts: Sequence[str],
    *,
    alphabet: Sequence[str] | None = None,
    vocab_size: int = 30_000,
    special: Sequence[str] = ("<s>", "</s>", "<pad>"),
) -> Any:
    """Return a byte-level BPE `Tokenizer` learned from `texts`; the first ids are those of `special`, in this order.

    Args:
        alphabet: symbols that the vocabulary always contains; default: all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=alphabet or sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
