"""The transformers class and configuration of an inspected checkpoint."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from rlhf_triton.checkpoints.inspection import (
    ADAPTERS_KEY,
    CONFIG_FILE,
    CheckpointError,
    CheckpointInfo,
    read_config,
    refused_key,
)
from rlhf_triton.checkpoints.language_models import as_checkpoint_error, check_family
from rlhf_triton.errors import reason_of
from rlhf_triton.models.heads import ModelHead

STANDARDISATION_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std", "do_normalize", "var", "pooling")
NOT_FORMULA = {  # keys of config.json about transformers' kernels and return values, which this module sets itself
    *("dtype", "torch_dtype", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("chunk_size_feed_forward", "torchscript", "gradient_checkpointing", "transformers_version", "name_or_path"),
}
OWN_PATHS: dict[Any, str] = {}  # transformers class -> path of its head
T = TypeVar("T")
_creating = threading.RLock()


@contextlib.contextmanager
def creating_model(folder: Path) -> Iterator[None]:
    """Create a model from `folder` with transformers: one thread at a time; errors as in `as_checkpoint_error`.

    transformers replaces its function that ties weights, and torch's default dtype, while it creates a model. If two
    threads did so at once, they could stay replaced, and later models of the process would be other ones.
    """
    with _creating, as_checkpoint_error(folder):
        yield


def model_config(info: CheckpointInfo, num_labels: int) -> Any:
    """Return the transformers configuration. Raises CheckpointError if transformers or this project cannot use it."""
    check_family(info)
    config_keys = read_config(info.folder)
    config = _name_bad_key(info, config_keys, lambda keys: _read(info, keys, num_labels))
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{info.folder} is quantised; use the unquantised checkpoint")
    return config


def _read(info: CheckpointInfo, config_keys: Mapping[str, Any], num_labels: int) -> Any:
    """Return the transformers configuration with the keys `config_keys` of config.json."""
    # `AutoConfig.from_pretrained` makes the same exception.
    kind = "ministral" if info.model_type == "mistral" and "layer_types" in config_keys else info.model_type
    # `inspect_checkpoint` has read OpenRLHF's keys already; a saved critic stores the same facts under our own keys.
    unread = {*NOT_FORMULA, *STANDARDISATION_KEYS, ADAPTERS_KEY}
    keys = {key: value for key, value in config_keys.items() if key not in unread}
    return CONFIG_MAPPING[kind].from_dict({**keys, "model_type": kind, "num_labels": num_labels})


def _name_bad_key(info: CheckpointInfo, config_keys: Mapping[str, Any], build: Callable[[Mapping[str, Any]], T]) -> T:
    """Return `build(config_keys)`. Raises CheckpointError naming the key of config.json that makes it fail."""
    try:
        return build(config_keys)
    except Exception as error:  # process edge: what transformers does with a key may raise anything
        cause = refused_key(config_keys, build) or "it cannot be read"
        raise CheckpointError(f"{info.folder / CONFIG_FILE}: {cause}: {reason_of(error)}") from error


def token_class(info: CheckpointInfo, config: Any) -> Any:
    """Return the class with a head on each token; see `loading`. Raises CheckpointError if the family can have none."""
    family: Any = type(config)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(family, None)
    kind = kind or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(family, None) or _made_class(family)
    if kind is None:
        raise CheckpointError(f"{info.folder}: transformers has no classification class for {info.model_type} models")
    return kind


@functools.cache
def _made_class(config_class: Any) -> Any:
    """Return a class with a head on each token, made as transformers makes those of most decoders; None for others."""
    body = MODEL_MAPPING.get(config_class, None)
    is_decoder = config_class in MODEL_FOR_CAUSAL_LM_MAPPING and not config_class().is_encoder_decoder
    if not isinstance(body, type) or not is_decoder:
        return None
    family: Any = next(kind for kind in body.__mro__ if PreTrainedModel in kind.__bases__)
    name = f"{body.__name__.removesuffix('Model')}ForTokenClassification"
    members = {"base_model_prefix": family.base_model_prefix, "__module__": family.__module__}
    return type(name, (GenericForTokenClassification, family), members)


def sequence_class(info: CheckpointInfo, config: Any) -> Any:
    """Return the class that pools and classifies a row. Raises CheckpointError if it is not supported."""
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or config.is_encoder_decoder:
        raise CheckpointError(
            f"{info.folder}: {info.model_type} models with a sequence classification head are not supported; use a "
            "decoder or an encoder"
        )
    return kind


def head_path(info: CheckpointInfo, kind: Any) -> str:
    """Return the path of the head in a transformers class; cached, because live versions are loaded during requests."""
    if kind not in OWN_PATHS:
        OWN_PATHS[kind] = ModelHead(empty_model_of(info, kind)).path
    return OWN_PATHS[kind]


def empty_model_of(info: CheckpointInfo, kind: Any) -> Any:
    """Build class `kind` on the meta device. Raises CheckpointError naming the key of config.json that fails."""
    return _name_bad_key(info, read_config(info.folder), lambda keys: empty_model(kind, _read(info, keys, 1)))


def empty_model(kind: Any, config: Any) -> Any:
    """Return a model of class `kind` on the meta device."""
    with torch.device("meta"):
        return kind(config)
