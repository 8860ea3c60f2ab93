"""What config.json says of a head beside its layers: its activation, and keys that nothing reads; no torch."""

import re
from collections.abc import Container, Mapping
from typing import Any

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.heads import Head

ACTIVATIONS = ("relu", "selu", "gelu", "tanh", "leaky_relu", "silu")
# Keys whose part in a score is known: constants and layers (`checkpoints.inspection`, `checkpoints.heads`), the
# bookkeeping of a training (Safe RLHF's normaliser included), and what transformers once wrote and now reads no more.
READ = re.compile(
    r"value_head_prefix|normalize_reward|do_normalize|reward_standardization|critic_adapters"
    r"|(?:score|reward|rm|reward_model)_type|\w*threshold|normalizer_type|normalize_function|momentum"
    r"|_\w+|\w*version\w*|unsloth\w*|torch\w*|auto_map|transformers.*|sentence_transformers|tokenizer\w*|finetuning_task"
    r"|prefix|task_specific_params|quantization_config|xla_device|output_past|gradient_checkpointing|bf16|fp16|seed"
    r"|license|tie_\w+|is_\w+|\w+_token_id|(?:bos|eos|pad)_token|\w*padding\w*|rope_\w+|\w*rotary\w*|directionality"
    r"|\w*_len(?:gth)?|(?:\w+_)?dropout\w*|(?:num|n)_\w+|\w+_(?:num|n)_\w+|\w+_(?:dim|size|sizes|per_head)"
    r"|summary_use_proj|summary_proj_to_labels|\w*_neurons|\w*dataset\w*|\w*train\w*|\w*loss\w*|\w*path|\w*names?"
    r"|learning_rate|lora_\w+"
)
# Keys that may say what a head computes; before them, keys of a body's layers with such names.
OF_HEAD = re.compile(
    r"(?:\w+_)?(?:scor|reward|rm_|v?head(?!s)|value|classif|regress|pool|logit|sigmoid|softmax|tanh|summary|normali[sz]"
    r"|act(?:_|$|iv)|output|scal|shift|offset|clip|clamp|temperature|calibrat|aggregat|reduc|layer_(?:index|idx|id|norm)"
    r"|function|(?:mean|std|var)(?:_|$))\w*"
)
OF_BODY = re.compile(
    r"norm_\w+|layer_norm_eps\w*|mlp_type|\w*(?:attn|attention|alibi|emb|init|router|expert|moe|fusion|cache|hidden_act)\w*|activation_function|gelu_activation"
)
OF_CLASS = re.compile(r"summary_\w+|\w*pool\w*|classifier_\w+")  # among the keys of transformers' own classes
FACTOR = re.compile(r"(scale|scaling|factor|multiplier|std|var|temperature)$")
# Values that change nothing: BERT's class has a pooler of the first token, and GPT's has `cls_index`.
NOTHING = ("", "none", "identity", "linear", "last", "lasttoken", "firsttokentransform", "clsindex")


def activation_of(prefix: str, usual: str, config: Mapping[str, Any]) -> str:
    """Return the activation between the layers of the head `prefix`, as config.json names it, by default `usual`."""
    named = {key: _plain(config[key]) for key in activation_keys(prefix, config)}
    known = {_plain(name): name for name in ACTIVATIONS}
    if wrong := [key for key, value in named.items() if value not in known]:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: {wrong[0]} is {config[wrong[0]]!r}, but a head's activation is one of {names}")
    if len({*named.values()}) > 1:
        both = " and ".join(f"{key}: {config[key]!r}" for key in named)
        raise ValueError(f"config.json says {both}, of one head ({prefix}); remove the wrong one")
    return next((known[value] for value in named.values()), usual)


def activation_keys(prefix: str, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that name the activation between a head's layers."""
    stem = prefix.partition(".")[0]
    keys = re.compile(rf"({stem}|{stem.replace('_', '')}|head)_act\w*")
    return sorted(key for key, value in config.items() if keys.fullmatch(key) and value is not None)


def _plain(name: Any) -> str:
    """Return the last part of a name in config.json, without signs: of `torch.nn.LeakyReLU`, leakyrelu."""
    return re.sub(r"[^a-z0-9]", "", str(name).rpartition(".")[2].lower())


def keys_of(head: Head, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of config.json that say what the head computes, and that its row of the table reads."""
    keys = {"vhead_layer_type"} if head.prefix.startswith("v_head") else set()
    if head.form.gate is not None:
        keys |= {str(head.form.gate.softmax), head.form.gate.temperature[0]}
    if len(head.layers.names) > 1:
        keys |= {*activation_keys(head.prefix, config)}
    return keys | ({"mean", "std", "var"} if {"normalize_reward", "do_normalize"} & config.keys() else set())


def unread_keys(config: Mapping[str, Any], read: Container[str], defaults: Any) -> dict[str, Any]:
    """Return the keys of config.json that may change a score, and that neither the project nor transformers reads.

    Args:
        read: keys that the row of the head's table reads.
        defaults: the configuration of transformers' class, whose attributes are the keys that it reads. Those of
            pooling and of a summary are read by some classes for sequences only, so that any but its default counts.
    """
    config = {**read_key(config, "sentence_transformers", dict, {}), **config}  # its cross-encoders' keys
    return {
        key: value
        for key, value in sorted(config.items())
        if key not in read
        and not (READ.fullmatch(key) or OF_BODY.fullmatch(key))
        and not _says_nothing(key, value)
        and (not hasattr(defaults, key) or (OF_CLASS.fullmatch(key) and getattr(defaults, key) != value))
    }


def _says_nothing(key: str, value: Any) -> bool:
    if type(value) in (int, float):
        neutral = 1 if FACTOR.search(key) else -1 if "layer" in key else 0
        return "pool" in key or value == neutral
    if value is True:  # the layers show it
        return key.endswith(("bias", "head", "model"))
    return not value or (isinstance(value, str) and _plain(value) in NOTHING)
