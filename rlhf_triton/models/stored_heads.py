"""Reads a checkpoint's head: its tensors, its pooling, the weights of its outputs."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, GenerationConfig

from rlhf_triton.checkpoints.head_keys import OF_HEAD, keys_of, unread_keys
from rlhf_triton.checkpoints.heads import GATE_HEADERS, Head, Pooling
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, CheckpointInfo, read_config
from rlhf_triton.checkpoints.tokenization import encode_bare_text
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.models.heads import build_head
from rlhf_triton.models.mapped_tensors import map_tensors
from rlhf_triton.models.transformers_classes import head_path, model_config
from rlhf_triton.monitoring.log_lines import warn_once


def read_head(info: CheckpointInfo, head: Head) -> torch.nn.Module:
    """Read the head from the file, in fp32 regardless of the body's dtype. Raises CheckpointError."""
    return build_head(head, tensors_of_head(info, head), _gate_pattern(info, head))


def tensors_of_head(info: CheckpointInfo, head: Head) -> dict[str, Tensor]:
    """Return copies of the head's tensors: mapped tensors may be unaligned, which changes the last bits of outputs."""
    return {name: tensor.clone() for name, tensor in map_tensors(info.folder, info.tensors).items() if head.owns(name)}


def _gate_pattern(info: CheckpointInfo, head: Head) -> tuple[int, ...] | None:
    """Return the token ids of an answer's header, at which the head's gate is computed; None for another position.

    Raises CheckpointError if the ids are unknown.
    """
    if head.form.gate is None or not head.form.gate.at_turn:
        return None
    text, ids = GATE_HEADERS.get(info.model_type, ("", ()))
    if info.tokenizer is not None and text:
        tokenizer = load_tokenizer(info.folder)
        header = encode_bare_text(tokenizer, text)
        # If the tokenizer splits a special token, its parts also match text that only looks like a header. A tokenizer
        # without the token may also drop it or use its unknown token.
        is_header = len(header) <= len(ids) and _without_space(tokenizer.decode(header)) == _without_space(text)
        ids = tuple(header) if is_header else ()
    if not ids or max(ids) >= (info.vocab_size or 0):
        raise CheckpointError(
            f"{info.folder}: the gate {head.form.gate.prefix} reads at the header of an answer, {text!r}, but the "
            f"tokenizer of this {info.model_type} model has no tokens for it; use another checkpoint"
        )
    return ids


def _without_space(text: str) -> str:
    return "".join(text.split())


def placed_head(info: CheckpointInfo, head: Head, pooling: Pooling) -> Head:
    """Return the head with its pooling, which depends on whether config.json names the transformers class of this head.

    If it does, the head pools as that class does. Otherwise only the user or config.json can say how: if neither does,
    `pooling` stays `auto`, and the head counts as a head on each token.

    Raises:
        CheckpointError: config.json has a key about the head that its layers do not implement, or its pooling is
            unknown.
    """
    config = model_config(info, head.num_labels)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    fits = kind is not None and len(head.layers.names) == 1 and head_path(info, kind) == head.prefix
    is_own = fits and kind.__name__ == info.architecture
    _check_keys(info, head, pooling, type(config), kind, is_own=is_own)
    if head.form.pooled and fits and not is_own and pooling == "auto":
        raise CheckpointError(
            f"{info.folder}: how its head {head.prefix} pools is unknown: {CONFIG_FILE} names the class "
            f"{info.architecture}, not {kind.__name__}; if {kind.__name__} trained it, set architectures: "
            f"[{kind.__name__}] there, otherwise set pooling: last or mean"
        )
    if head.form.pooled and not is_own:
        return replace(head, form=replace(head.form, pooled=False), kind="value")
    return replace(head, pooling="last") if head.kind == "sequence" and is_own else head


def _check_keys(
    info: CheckpointInfo, head: Head, pooling: Pooling, config_class: Any, kind: Any, *, is_own: bool
) -> None:
    """Raise CheckpointError if config.json has a key about the head that its layers do not implement.

    Args:
        kind: transformers' sequence classification class of the family, or None.
        is_own: whether config.json names this class.
    """
    config_keys = read_config(info.folder)
    usual = config_class()
    modules = [owner.__module__ for owner in (config_class, kind) if owner]
    named = _keys_in_source(*modules) - vars(usual).keys()
    unread = unread_keys(config_keys, keys_of(head, config_keys) | named | vars(GenerationConfig()).keys(), usual)
    if odd := [key for key in unread if not OF_HEAD.fullmatch(key)]:
        warn_once(
            f"{CONFIG_FILE} has keys that nothing reads, for a {info.model_type} model: {', '.join(odd)}; if the model "
            "was trained with one of them, its scores differ"
        )
    for key, value in unread.items():
        if key in odd or (head.form.pooled and hasattr(usual, key)):  # transformers' own class reads it
            continue
        about_pooling = "pool" in key or key == "summary_type"
        if about_pooling and (pooling != "auto" or (key == "pooling" and head.pooling == value and not is_own)):
            continue
        is_linear = head.gate is None and len(head.layers.names) == 1
        remedy = (
            f"set pooling: last{' or mean' if is_linear else ''}, as it was trained"
            if about_pooling
            else f"remove {key} if it was trained without"
        )
        raise CheckpointError(
            f"{info.folder}: {CONFIG_FILE} has {key}: {value!r}, which the head {head.prefix} does not implement; "
            f"{remedy}"
        )


@functools.cache
def _keys_in_source(*modules: str) -> set[str]:
    """Return the keys of config.json that these modules' source names; some are not an attribute of any class."""
    text = "".join(inspect.getsource(sys.modules[name]) for name in modules)
    return {*re.findall(r"(?:config\.|config, \"|kwargs\.\w+\(\")(\w+)", text)}


def attribute_weights_of(info: CheckpointInfo, head: Head, weights: Sequence[float]) -> Tensor:
    """Return the weights `[A]` of a head's attributes. Raises CheckpointError unless they fit."""
    if len(weights) != head.num_labels:
        raise CheckpointError(
            f"{info.folder}: its head has {head.num_labels} outputs, but attribute_weights has {len(weights)}; give "
            "one weight per output"
        )
    return torch.tensor(list(weights), dtype=torch.float32)
