"""Reads config.json's keys about a head: its activation, and keys that nothing reads but may matter; no torch."""

import re
from collections.abc import Container, Mapping
from typing import Any

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.heads import Head

ACTIVATIONS = ("relu", "selu", "gelu", "tanh", "leaky_relu", "silu")
# Keys whose effect on a score is known: constants and layers (`checkpoints.inspection`, `checkpoints.heads`),
# bookkeeping of a training run (including Safe RLHF's normaliser), and keys that transformers no longer reads.
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
# Keys that may say what a head computes, and keys of a body's layers with similar names.
OF_HEAD = re.compile(
    r"(?:\w+_)?(?:scor|reward|rm_|v?head(?!s)|value|classif|regress|pool|logit|sigmoid|softmax|tanh|summary|normali[sz]"
    r"|act(?:_|$|iv)|output|scal|shift|offset|clip|clamp|temperature|calibrat|aggregat|reduc|layer_(?:index|idx|id|norm)"
    r"|function|(?:mean|std|var)(?:_|$))\w*"
)
OF_BODY = re.compile(
    r"norm_\w+|layer_norm_eps\w*|mlp_type|\w*(?:attn|attention|alibi|emb|init|router|expert|moe|fusion|cache|hidden_act)\w*|activation_function|gelu_activation"
)
OF_CLASS = re.compile(r"summary_\w+|\w*pool\w*|classifier_\w+")  # among the keys that transformers' classes read
FACTOR = re.compile(r"(scale|scaling|factor|multiplier|std|var|temperature)$")
# Values without effect: BERT's class pools the first token, and GPT's has `cls_index`.
NOTHING = ("", "none", "identity", "linear", "last", "lasttoken", "firsttokentransform", "clsindex")


def activation_of(prefix: str, usual: str, config: Mapping[str, Any]) -> str:
    """Return the activation between the layers of head `prefix` from config.json; default: `usual`."""
    named = {key: _normalised(config[key]) for key in activation_keys(prefix, config)}
    by_name = {_normalised(name): name for name in ACTIVATIONS}
    if wrong := [key for key, value in named.items() if value not in by_name]:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: {wrong[0]} is {config[wrong[0]]!r}, must be one of {names}")
    if len({*named.values()}) > 1:
        both = " and ".join(f"{key}: {config[key]!r}" for key in named)
        raise ValueError(f"config.json has {both} for the same head ({prefix}); remove the wrong one")
    return next((by_name[value] for value in named.values()), usual)


def activation_keys(prefix: str, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that name the activation between a head's layers."""
    stem = prefix.partition(".")[0]
    keys = re.compile(rf"({stem}|{stem.replace('_', '')}|head)_act\w*")
    return sorted(key for key, value in config.items() if keys.fullmatch(key) and value is not None)


def _normalised(name: Any) -> str:
    """Return the letters and digits of a name's last part, in lower case: `torch.nn.LeakyReLU` -> leakyrelu."""
    return re.sub(r"[^a-z0-9]", "", str(name).rpartition(".")[2].lower())


def keys_of(head: Head, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of config.json that this project reads for a head of this form."""
    keys = {"vhead_layer_type"} if head.prefix.startswith("v_head") else set()
    if head.form.gate is not None:
        keys |= {str(head.form.gate.softmax), head.form.gate.temperature[0]}
    if len(head.layers.names) > 1:
        keys |= {*activation_keys(head.prefix, config)}
    return keys | ({"mean", "std", "var"} if {"normalize_reward", "do_normalize"} & config.keys() else set())


def unread_keys(config: Mapping[str, Any], read: Container[str], defaults: Any) -> dict[str, Any]:
    """Return the keys of config.json that may change a score but that neither this project nor transformers reads.

    Args:
        read: keys that this project reads.
        defaults: a default configuration of transformers' class; its attributes are the keys that the class reads. Only
            some sequence classes read the keys about pooling and summary, so these count unless they have the default
            value.
    """
    config = {**read_key(config, "sentence_transformers", dict, {}), **config}  # its cross-encoders' keys
    return {
        key: value
        for key, value in sorted(config.items())
        if key not in read
        and not (READ.fullmatch(key) or OF_BODY.fullmatch(key))
        and not _has_no_effect(key, value)
        and (not hasattr(defaults, key) or (OF_CLASS.fullmatch(key) and getattr(defaults, key) != value))
    }


def _has_no_effect(key: str, value: Any) -> bool:
    if type(value) in (int, float):
        neutral = 1 if FACTOR.search(key) else -1 if "layer" in key else 0
        return "pool" in key or value == neutral
    if value is True:  # the layers show it
        return key.endswith(("bias", "head", "model"))
    return not value or (isinstance(value, str) and _normalised(value) in NOTHING)
