"""Loads Hugging Face modules from inspected checkpoints: body memory-mapped where possible, head in fp32."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    MODEL_MAPPING,
)

from rlhf_triton.checkpoints.head_tensors import copies, is_harmless, layers_path, shape_error, unwrapped
from rlhf_triton.checkpoints.heads import Head, Pooling
from rlhf_triton.checkpoints.inspection import (
    CONFIG_FILE,
    CheckpointError,
    CheckpointInfo,
    check_pickles,
    inspect_checkpoint,
    read_config,
)
from rlhf_triton.checkpoints.language_models import check_tensors
from rlhf_triton.checkpoints.row_length import fix_forward, stable_length
from rlhf_triton.checkpoints.tensor_parallel import check_tensor_parallel
from rlhf_triton.models.heads import ModelHead, linear
from rlhf_triton.models.mapped_tensors import check_finite, stored_tensors
from rlhf_triton.models.stored_heads import read_head
from rlhf_triton.models.token_head import measure_causality
from rlhf_triton.models.transformers_classes import (
    creating_model,
    empty_model,
    empty_model_of,
    model_config,
    sequence_class,
    token_class,
)

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.models.tensor_parallel import RankGroup

logger = logging.getLogger(__name__)
LANGUAGE_MODELS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    MODEL_MAPPING,
)
SIZES = re.compile("size|dim|embd|positions|inner")  # keys of config.json that are parts of shapes


def load_token_model(
    info: CheckpointInfo, head: torch.nn.Module | None, dtype: str, group: RankGroup | None = None
) -> Any:
    """Load the body with a head on each token; with `group`, this rank's part of the model.

    Uses the family's token classification class in transformers, or its sequence classification class if transformers
    has no token classification class for the family (OPT, GPT-J), or for a decoder with neither (Granite, OLMoE) a
    class made of transformers' parts. If `head` is None, the head has one output and zero weights.
    """
    config = model_config(info, 1)
    kind = token_class(info, config)
    model = _load(info, kind, config, dtype, with_head=False, starts_at_0=head is None, group=group)
    if head is None:
        own: Any = ModelHead(model).module
        head = linear({"weight": torch.zeros(1, own.in_features)})
    _put_head(info, model, head)
    return model


def empty_token_model(folder: Path) -> Any:
    """Return the model of `load_token_model` on the meta device. Raises CheckpointError."""
    info = inspect_checkpoint(folder)
    model = empty_model_of(info, token_class(info, model_config(info, 1)))
    model.name_or_path = str(folder)
    return model


def load_classifier(info: CheckpointInfo, head: Head, dtype: str, pooling: Pooling) -> Any:
    """Load a classifier that pools itself. Raises CheckpointError if `pooling` is set or the body is causal."""
    if pooling != "auto":
        raise CheckpointError(
            f"{info.folder}: pooling: {pooling} does not fit the head {head.prefix}, trained with the pooling of "
            f"its {info.architecture or 'class'}; set pooling: auto"
        )
    config = model_config(info, head.num_labels)
    model = _load(info, sequence_class(info, config), config, dtype, with_head=False)
    _put_head(info, model, read_head(info, head))
    # A decoder's pooling searches for the padding id, which a row may contain: it would pool the wrong token.
    if measure_causality(model):
        raise CheckpointError(
            f"{info.folder}: the head {head.prefix} of {info.architecture} needs a bidirectional body, but this body "
            "is causal; use a checkpoint whose head is a linear `score`"
        )
    return model


def load_causal_model(info: CheckpointInfo, dtype: str, group: RankGroup | None = None) -> Any:
    """Load a causal language model; with `group`, this rank's part of the model."""
    config = model_config(info, 1)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise CheckpointError(f"{info.folder}: transformers has no causal language model for {info.model_type} models")
    return _load(info, kind, config, dtype, with_head=True, group=group)


def _put_head(info: CheckpointInfo, model: Any, head: torch.nn.Module) -> None:
    """Replace the model's head. Raises CheckpointError if it does not fit the body."""
    place = ModelHead(model)
    own: Any = place.module
    is_own = info.architecture == type(model).__name__ and info.head is not None and place.path == info.head.prefix
    if is_own and own.bias is not None and getattr(head, "bias", own.bias) is None:
        raise CheckpointError(f"{info.folder}: {place.path}.bias is missing; copy the checkpoint again")
    first = next(module for module in head.modules() if isinstance(module, torch.nn.Linear))
    if info.head is not None and first.in_features != own.in_features:
        name = f"{info.head.layers.names[0]}.weight"
        expected = f"[num_labels, {own.in_features}], as wide as the body's hidden states"
        raise CheckpointError(f"{info.folder}: {shape_error(name, info.tensors[name], expected)}")
    place.replace(head)


def _load(
    info: CheckpointInfo,
    kind: Any,
    config: Any,
    dtype: str,
    *,
    with_head: bool,
    starts_at_0: bool = False,
    group: RankGroup | None = None,
) -> Any:
    """Load a checkpoint into class `kind` through transformers; unless `with_head`, the caller sets the head.

    `starts_at_0`: ignore the checkpoint's own head and the layers of its class.

    transformers renames and converts tensors and initialises missing ones. It does not copy tensors whose dtype already
    matches, so mapped tensors stay mapped. A missing tensor is an error, unless it belongs to a head that the caller
    sets. An unused tensor is an error, unless it cannot change the outputs.
    """
    if not with_head:
        check_pickles(info.folder)
    tensors = _as_named(_tensors_once(info, with_head), kind, config, info.folder)
    _check_body_prefix(info, kind, config, tensors)
    model, report = _from_pretrained(info, kind, tensors, group, config=config, dtype=getattr(torch, dtype))
    heads = set() if with_head else ModelHead(model).names
    computed = {name for name, _ in model.named_buffers() if is_harmless(name, None, None)}
    missing = sorted(report["missing_keys"] - heads - computed)
    if with_head:
        check_tensors(info.folder, missing, report["unexpected_keys"])
    if missing:
        raise CheckpointError(f"{info.folder}: the weights have no {', '.join(missing[:4])}; copy the checkpoint again")
    # The caller sets the head, so a tensor for the class's own head would be lost.
    loaded_head = heads - report["missing_keys"]
    replaced = [name for name in tensors if any(f".{name}".endswith(f".{own}") for own in loaded_head)]
    unexpected = {*report["unexpected_keys"], *replaced}
    unused = [] if with_head else unused_tensors(info, config, kind, unexpected, starts_at_0=starts_at_0)
    if unused:
        raise CheckpointError(
            f"{info.folder}: {kind.__name__} does not use {', '.join(unused[:6])}; without them the outputs would "
            "differ from the checkpoint's; docs/your-models.md lists the supported heads"
        )
    model.name_or_path = str(info.folder)
    if group is None:
        check_finite(model)  # before any probe, whose result would mean nothing
    model.config.architectures = [kind.__name__]
    _keep_stable(model, info)
    return model.eval()


def _check_body_prefix(info: CheckpointInfo, kind: Any, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if only some of the body's tensors have the prefix of the body in class `kind`.

    transformers takes any name without the prefix as the body's, whatever layer it was saved from.
    """
    prefix = f"{kind.base_model_prefix}."
    without_prefix = {name for name in tensors if not name.startswith(prefix)}
    if without_prefix and len(without_prefix) < len(tensors):
        own = empty_model(kind, config).state_dict().keys()
        if confused := sorted(name for name in without_prefix - own if f"{prefix}{name}" in own | tensors.keys()):
            odd = min(confused, sorted(tensors.keys() - without_prefix), key=len)[0]
            raise CheckpointError(
                f"{info.folder}: some of the body's tensors are stored under {prefix} and others are not ({odd}), so "
                f"these may belong to another layer; rename or remove {odd}"
            )


def _tensors_once(info: CheckpointInfo, with_head: bool) -> dict[str, Tensor]:
    """Return the checkpoint's tensors without duplicates of body or head, and without the head unless `with_head`."""
    tensors = stored_tensors(info)
    again = copies(info.head, tensors)
    if all(torch.equal(tensors[name], tensors[own]) for name, own in again.items()):
        tensors = {name: tensor for name, tensor in tensors.items() if name not in again}
    if info.head is None or with_head:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not info.head.owns(name)}


def _from_pretrained(
    info: CheckpointInfo, kind: Any, tensors: dict[str, Tensor], group: RankGroup | None, **settings: Any
) -> tuple[Any, Any]:
    """Load the tensors with transformers; return the model and transformers' report of missing and unused tensors."""
    try:
        with creating_model(info.folder):
            if group is None:
                return kind.from_pretrained(None, output_loading_info=True, state_dict=tensors, **settings)
            check_tensor_parallel(info.folder, group.size)
            return group.from_pretrained(kind, state_dict=tensors, **settings)
    except CheckpointError:
        if group is None:  # a group's error already names the rank
            _check_shapes(info, kind, tensors)
        raise


def _check_shapes(info: CheckpointInfo, kind: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor's shape contradicts config.json."""
    own = empty_model_of(info, kind).state_dict()
    for name, stored in tensors.items():
        shape = own.get(name, own.get(f"{kind.base_model_prefix}.{name}", stored)).shape
        if shape != stored.shape:
            keys = read_config(info.folder).items()
            sizes = [f"{key}: {value}" for key, value in keys if SIZES.search(key) and value in [*shape]]
            raise CheckpointError(
                f"{info.folder}: {name} has shape {list(stored.shape)}, but {CONFIG_FILE} implies {list(shape)} "
                f"({', '.join(sizes) or 'defaults'}); copy both files from the same model"
            )


def _as_named(tensors: dict[str, Tensor], kind: Any, config: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors with the body's names as in class `kind`, because some checkpoints name it differently.

    Bodies without a prefix are left to transformers. Raises CheckpointError if two tensors get the same name.
    """
    prefix = kind.base_model_prefix
    stored = layers_path(tensors)
    is_usual = stored.startswith(f"{prefix}.") and not stored.startswith(f"{prefix}.{prefix}.")
    if not prefix or is_usual or "." not in stored:
        return tensors
    inner = layers_path(empty_model(kind, config).state_dict()).removeprefix(f"{prefix}.")
    if not stored.endswith(f".{inner}"):
        return tensors
    root = stored.removesuffix(inner)
    outer = f"{root.partition('.')[0]}."  # a wrapper around a language model
    named = {
        f"{prefix}.{name.removeprefix(root)}" if name.startswith(root) else name.removeprefix(outer): tensor
        for name, tensor in tensors.items()
    }
    if twice := sorted(name for name in named.keys() & tensors.keys() if named[name] is not tensors[name]):
        raise CheckpointError(
            f"{folder}: {twice[0]} is stored twice with different values, once under {root}; remove one"
        )
    return named


def unused_tensors(
    info: CheckpointInfo, config: Any, kind: Any, unexpected: Iterable[str], *, starts_at_0: bool = False
) -> list[str]:
    """Return the names in `unexpected` (tensors that class `kind` does not load) that may change the outputs."""
    unused = {name for name in unexpected if not is_harmless(name, info.tensors.get(name), info.vocab_size)}
    if not unused:
        return []
    # Harmless: output layers of the family's language models and a pooler that the head does not read; without a
    # head, all layers of those models.
    body = f"{kind.base_model_prefix}."
    language_model_shapes = dict[str, tuple[int, ...]]()
    for mapping in LANGUAGE_MODELS:
        if (language := mapping.get(type(config), None)) is not None:
            shapes = {name: (*tensor.shape,) for name, tensor in empty_model(language, config).state_dict().items()}
            language_model_shapes |= shapes if info.head is not None else unwrapped(shapes, body)
    if info.head is None:
        for name in [*unused]:  # a layer of this name but of another shape is something else
            stored = info.tensors.get(name)
            shape = language_model_shapes.get(name.removeprefix(body))
            if shape is not None and (stored is None or stored.shape == shape):
                unused.remove(name)
        return sorted(unused)
    has_own_class = info.head.form.pooled or info.head.kind == "token"
    if info.head.form.pooled and starts_at_0:  # a critic, from the body alone
        language_model_shapes |= dict.fromkeys(empty_model(sequence_class(info, config), config).state_dict(), ())
    unused -= {name for name in unused if has_own_class and name.startswith(f"{body}pooler.")}
    return sorted(name for name in unused if name not in language_model_shapes or name.startswith(body))


def _keep_stable(model: Any, info: CheckpointInfo) -> None:
    fix_forward(model)
    limit = stable_length(model.config.to_dict())
    positions = getattr(model.config, "max_position_embeddings", None)
    if limit and positions and limit < positions:
        logger.warning(
            "%s: rows are limited to %d tokens, not max_position_embeddings (%d): a longer row would change the rotary "
            "table or the attention of every row in its forward pass",
            info.folder,
            limit,
            positions,
        )
