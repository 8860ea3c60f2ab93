"""Loads Hugging Face modules from inspected checkpoints: body memory-mapped where possible, head in fp32."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import mmap
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    GenerationConfig,
)

from rlhf_triton.checkpoints.head_keys import OF_HEAD, keys_of, unread_keys
from rlhf_triton.checkpoints.head_tensors import copies, is_harmless, layers_path, shape_error, unwrapped
from rlhf_triton.checkpoints.heads import GATES, Head, Pooling
from rlhf_triton.checkpoints.inspection import (
    ADAPTERS_KEY,
    CONFIG_FILE,
    CheckpointError,
    CheckpointInfo,
    check_pickles,
    fix_forward,
    inspect_checkpoint,
    read_config,
    refused_key,
    stable_length,
)
from rlhf_triton.checkpoints.language_models import as_checkpoint_error, check_family, check_tensors
from rlhf_triton.checkpoints.safetensors_header import TensorInfo
from rlhf_triton.checkpoints.tensor_file import STORED_DTYPES
from rlhf_triton.checkpoints.tensor_parallel import check_tensor_parallel
from rlhf_triton.checkpoints.tokenization import load_tokenizer
from rlhf_triton.errors import reason_of
from rlhf_triton.models.adapters import with_stored_adapters
from rlhf_triton.models.heads import ModelHead, build_head, linear
from rlhf_triton.models.token_head import measure_causality
from rlhf_triton.wire.chats import warn_once

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.models.tensor_parallel import RankGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")
STANDARDISATION_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std", "do_normalize", "var", "pooling")
LANGUAGE_MODELS = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    MODEL_MAPPING,
)
SIZES = re.compile("size|dim|embd|positions|inner")  # keys of config.json that are parts of shapes
NOT_FORMULA = {  # keys of config.json about transformers' kernels and return values, which this module sets itself
    *("dtype", "torch_dtype", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("chunk_size_feed_forward", "torchscript", "gradient_checkpointing", "transformers_version", "name_or_path"),
}
OWN_PATHS: dict[Any, str] = {}  # transformers class -> path of its head
NOT_ARCHITECTURE = {  # keys of config.json that do not change the forward pass
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "reward_standardization",
    "id2label",
    "label2id",
    "use_cache",
    "distributed_config",
    ADAPTERS_KEY,
    *STANDARDISATION_KEYS,
}


def read_head(info: CheckpointInfo, head: Head) -> torch.nn.Module:
    """Read the head from the file, in fp32 regardless of the body's dtype. Raises CheckpointError."""
    return build_head(head, _head_tensors(info, head), _gate_pattern(info, head))


def _head_tensors(info: CheckpointInfo, head: Head) -> dict[str, Tensor]:
    """Return copies of the head's tensors: mapped tensors may be unaligned, which changes the last bits of outputs."""
    return {name: tensor.clone() for name, tensor in map_tensors(info.folder, info.tensors).items() if head.owns(name)}


def _gate_pattern(info: CheckpointInfo, head: Head) -> tuple[int, ...] | None:
    """Return the token ids of an answer's header, where the head's gate reads; None if it reads elsewhere.

    Raises CheckpointError if the ids are unknown.
    """
    if head.form.gate is None or not head.form.gate.at_turn:
        return None
    text, ids = GATES.get(info.model_type, ("", ()))
    if info.tokenizer is not None and text:
        tokenizer = load_tokenizer(info.folder)
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        # If the tokenizer splits a special token, its parts also match text that only looks like a header. A tokenizer
        # without the token may also drop it or use its unknown token.
        ids = (
            tuple(found)
            if len(found) <= len(ids) and _without_space(tokenizer.decode(found)) == _without_space(text)
            else ()
        )
    if not ids or max(ids) >= (info.vocab_size or 0):
        raise CheckpointError(
            f"{info.folder}: the gate {head.form.gate.prefix} reads at the header of an answer, {text!r}, but the "
            f"tokenizer of this {info.model_type} model has no tokens for it; use another checkpoint"
        )
    return ids


def _without_space(text: str) -> str:
    return "".join(text.split())


def load_token_model(
    info: CheckpointInfo, head: torch.nn.Module | None, dtype: str, group: RankGroup | None = None
) -> Any:
    """Load the body with a head on each token; with `group`, this rank's part of the model.

    Uses the family's token classification class in transformers, or its sequence classification class if transformers
    has no token classification class for the family (OPT, GPT-J). If `head` is None, the head has one output and zero
    weights.
    """
    config = _config(info, 1)
    kind = _token_class(info, config)
    model = _load(info, kind, config, dtype, with_head=False, starts_at_0=head is None, group=group)
    if head is None:
        own: Any = ModelHead(model).module
        head = linear({"weight": torch.zeros(1, own.in_features)})
    _put_head(info, model, head)
    return model


def empty_token_model(folder: Path) -> Any:
    """Return the model of `load_token_model` on the meta device. Raises CheckpointError."""
    info = inspect_checkpoint(folder)
    model = _built(info, _token_class(info, _config(info, 1)))
    model.name_or_path = str(folder)
    return model


def _token_class(info: CheckpointInfo, config: Any) -> Any:
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    kind = kind or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise CheckpointError(f"{info.folder}: transformers has no classification class for {info.model_type} models")
    return kind


def _sequence_class(info: CheckpointInfo, config: Any) -> Any:
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or config.is_encoder_decoder:
        raise CheckpointError(
            f"{info.folder}: {info.model_type} models with a sequence classification head are not supported; use a "
            "decoder or an encoder"
        )
    return kind


def placed_head(info: CheckpointInfo, head: Head, pooling: Pooling) -> Head:
    """Return the head with its pooling, which depends on whether config.json names the transformers class of this head.

    If it does, the head pools as that class does. Otherwise only the user or config.json can say how: if neither does,
    `pooling` stays `auto`, and the head counts as a head on each token.

    Raises:
        CheckpointError: config.json has a key about the head that its layers do not implement, or its pooling is
            unknown.
    """
    config = _config(info, head.num_labels)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    fits = kind is not None and len(head.layers.names) == 1 and _own_path(info, kind) == head.prefix
    is_own = fits and kind.__name__ == info.architecture
    given = read_config(info.folder)
    usual = type(config)()
    named = _keys_in_source(*(each.__module__ for each in (type(config), kind) if each)) - vars(usual).keys()
    unread = unread_keys(given, keys_of(head, given) | named | vars(GenerationConfig()).keys(), usual)
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
    if head.form.pooled and fits and not is_own and pooling == "auto":
        raise CheckpointError(
            f"{info.folder}: how its head {head.prefix} pools is unknown: {CONFIG_FILE} names the class "
            f"{info.architecture}, not {kind.__name__}; if it was trained as the latter, name that in architectures, "
            "otherwise set pooling: last or mean"
        )
    if head.form.pooled and not is_own:
        return replace(head, form=replace(head.form, pooled=False), kind="value")
    return replace(head, pooling="last") if head.kind == "sequence" and is_own else head


@functools.cache
def _keys_in_source(*modules: str) -> set[str]:
    """Return the keys of config.json that the source of these modules names, as some are no attribute of any class."""
    text = "".join(inspect.getsource(sys.modules[name]) for name in modules)
    return {*re.findall(r"(?:config\.|config, \"|kwargs\.\w+\(\")(\w+)", text)}


def _own_path(info: CheckpointInfo, kind: Any) -> str:
    """Return the path of the head in a transformers class; cached, because live versions are loaded during requests."""
    if kind not in OWN_PATHS:
        OWN_PATHS[kind] = ModelHead(_built(info, kind)).path
    return OWN_PATHS[kind]


def _empty(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        return kind(config)


def load_classifier(info: CheckpointInfo, head: Head, dtype: str, pooling: Pooling) -> Any:
    """Load a classifier that pools itself. Raises CheckpointError if `pooling` is set or the body is causal."""
    if pooling != "auto":
        raise CheckpointError(
            f"{info.folder}: pooling: {pooling} does not fit the head {head.prefix}, trained with the pooling of "
            f"its {info.architecture or 'class'}; set pooling: auto"
        )
    config = _config(info, head.num_labels)
    model = _load(info, _sequence_class(info, config), config, dtype, with_head=False)
    _put_head(info, model, read_head(info, head))
    # A decoder's pooling searches for the padding id, which a row may contain: it would pool the wrong token.
    if measure_causality(model):
        raise CheckpointError(
            f"{info.folder}: the head {head.prefix} of {info.architecture} needs a bidirectional body, but this body "
            "is causal; use a checkpoint whose head is a linear `score`"
        )
    return model


def attribute_weights_of(info: CheckpointInfo, head: Head, weights: Sequence[float]) -> Tensor:
    """Return the weights `[A]` of a head's attributes. Raises CheckpointError unless they fit."""
    if len(weights) != head.num_labels:
        raise CheckpointError(
            f"{info.folder}: its head has {head.num_labels} outputs, but attribute_weights has {len(weights)}; give "
            "one weight per output"
        )
    return torch.tensor(list(weights), dtype=torch.float32)


def load_causal_model(info: CheckpointInfo, dtype: str, group: RankGroup | None = None) -> Any:
    """Load a causal language model; with `group`, this rank's part of the model."""
    config = _config(info, 1)
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


def load_weights(model: Any, folder: Path) -> None:
    """Copy the weights that `model.save_pretrained` wrote to `folder` into `model`.

    Loads them through transformers, because for some families the saved names and shapes differ from the module's: a
    mixture of experts, for example, is saved as one tensor per expert, but the module has one tensor for all experts.

    Raises:
        CheckpointError: names or shapes differ, or a file is damaged.
    """
    from rlhf_triton.models.sharded_tensors import (
        sharded_like,  # adds seconds to the start of a serving process
    )

    info = inspect_checkpoint(folder)
    with as_checkpoint_error(folder):
        saved, report = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=map_tensors(info.folder, info.tensors),
            dtype=model.dtype,
            output_loading_info=True,
        )
    differing = sorted({*report["missing_keys"], *report["unexpected_keys"]} - set(model.all_tied_weights_keys))
    if differing:
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__}; missing or unexpected tensors: {', '.join(differing[:4])}"
        )
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in saved.state_dict().items():
            own[name].copy_(sharded_like(tensor, own[name]))


def twin_with_head(
    model: Any, origin: CheckpointInfo, info: CheckpointInfo, group: RankGroup | None = None
) -> Any | None:
    """Return a copy of `model`, which was loaded from `origin`, with the weights of another reward model, `info`.

    Returns None if only transformers can load them: it has to rename or convert tensors, or `group` is given.

    Raises:
        CheckpointError: the architecture, the head or a shape differs from `origin`.
    """
    if info.head is None or info.head != origin.head:
        raise CheckpointError(
            f"{info.folder}: its head is {_shown(info.head)}, but the served model's is {_shown(origin.head)}; train "
            "from the served checkpoint"
        )
    if info.head.num_labels > 1 and info.label_names != origin.label_names:
        raise CheckpointError(
            f"{info.folder}: its labels are {', '.join(info.label_names)}, but the served model's are "
            f"{', '.join(origin.label_names)}, in this order; correct id2label in {CONFIG_FILE}, or train on these"
        )
    check_same_architecture(_config(origin, 1).to_dict(), info)
    if group is not None or info.tensors.keys() != origin.tensors.keys():
        return None
    own, place = model.state_dict(), ModelHead(model)
    head = place.fitted(build_head(info.head, _head_tensors(info, info.head)))
    tensors = {name: tensor for name, tensor in stored_tensors(info).items() if not info.head.owns(name)}
    tensors |= {f"{place.path}.{name}": tensor for name, tensor in head.state_dict().items()}
    if not own.keys() <= tensors.keys():
        return None
    return with_tensors(model, {name: tensors[name] for name in own}, info.folder)


def _shown(head: Head | None) -> str:
    if head is None:
        return "none"
    layers = f"{len(head.layers.names)} layers ({head.layers.activation})"
    return f"{head.prefix} with {head.num_labels} outputs of {layers}, pooling {head.pooling}, {head.form.formula}"


def check_finite(module: torch.nn.Module) -> None:
    """Raise CheckpointError naming the first parameter that holds NaN or infinity."""
    sums = {name: parameter.detach().sum() for name, parameter in module.named_parameters()}
    # A sum is not finite if any element is NaN or infinite. It costs a tenth of `isfinite` on every element.
    # All sums are checked together first, and one by one only to name the parameter.
    if not torch.stack([value.double() for value in sums.values()]).isfinite().all():
        name = next(name for name, value in sums.items() if not value.isfinite())
        raise CheckpointError(f"{name} has values that are not finite")


def with_tensors(model: Any, tensors: dict[str, Tensor], folder: Path) -> Any:
    """Return a module of the same class, configuration and dtypes as `model`, with the tensors of a checkpoint.

    Raises:
        CheckpointError: names or shapes differ.
    """
    # Constructing the class again would hold the GIL of a serving process five times as long. The copy first shares
    # every tensor with `model`. The strict assignment then replaces the tensors in the checkpoint, while computed
    # tensors (rotary frequencies) stay shared.
    module = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    # Tensors are converted before they go to the GPU, so it never holds more than the old and the new version.
    placed = {name: tensor.to(model.device, dtypes.get(name)) for name, tensor in tensors.items()}
    try:
        module.load_state_dict(placed, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not fit the served model: {reason_of(error)}") from error
    return module


def stored_tensors(info: CheckpointInfo) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, mapped from its files; an adapter version is merged into its base version.

    Raises:
        CheckpointError: a file is damaged, or the adapters do not fit.
    """
    tensors = map_tensors(info.folder, info.tensors)
    if info.adapters is None:
        return tensors
    base = inspect_checkpoint(info.folder.parent / str(info.adapters.base))
    with as_checkpoint_error(info.folder):
        return with_stored_adapters(stored_tensors(base), tensors, info.adapters)


def map_tensors(folder: Path, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Memory-map tensors of a folder's safetensors files, copy-on-write: processes share unmodified pages.

    Does not use the safetensors library: version 0.8.0 leaks two numbers per tensor, and a serving process loads many
    versions.
    """
    mapped: dict[str, mmap.mmap] = {}
    with as_checkpoint_error(folder):
        for file in {info.file for info in infos.values()}:
            with (folder / file).open("rb") as stream:
                mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return {name: _view(mapped[info.file], info) for name, info in infos.items()}


def _view(mapped: mmap.mmap, info: TensorInfo) -> Tensor:
    """Return a tensor of a mapped file without copying its data. Raises ValueError if its dtype is not supported."""
    dtype = STORED_DTYPES.get(info.dtype)
    if dtype is None:
        raise ValueError(f"tensors of type {info.dtype} are not supported")
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    count = info.num_bytes // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start).reshape(info.shape)


def _config(info: CheckpointInfo, num_labels: int) -> Any:
    check_family(info)
    given = read_config(info.folder)
    config = _name_bad_key(info, given, lambda keys: _read(info, keys, num_labels))
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{info.folder} is quantised; use the unquantised checkpoint")
    return config


def _read(info: CheckpointInfo, given: Mapping[str, Any], num_labels: int) -> Any:
    """Return the transformers configuration with the keys `given` of config.json."""
    # `AutoConfig.from_pretrained` makes the same exception.
    kind = "ministral" if info.model_type == "mistral" and "layer_types" in given else info.model_type
    # `inspect_checkpoint` has read OpenRLHF's keys already; a saved critic stores the same facts under our own keys.
    unread = {*NOT_FORMULA, *STANDARDISATION_KEYS, ADAPTERS_KEY}
    keys = {key: value for key, value in given.items() if key not in unread}
    return CONFIG_MAPPING[kind].from_dict({**keys, "model_type": kind, "num_labels": num_labels})


def _name_bad_key(info: CheckpointInfo, given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], T]) -> T:
    """Return `build(given)`. Raises CheckpointError naming the key of config.json that makes it fail."""
    try:
        return build(given)
    except Exception as error:  # process edge: what transformers does with a key may raise anything
        cause = refused_key(given, build) or "it cannot be read"
        raise CheckpointError(f"{info.folder / CONFIG_FILE}: {cause}: {reason_of(error)}") from error


def _built(info: CheckpointInfo, kind: Any) -> Any:
    """Build class `kind` on the meta device. Raises CheckpointError naming the key of config.json that fails."""
    return _name_bad_key(info, read_config(info.folder), lambda keys: _empty(kind, _read(info, keys, 1)))


def _check_shapes(info: CheckpointInfo, kind: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a tensor's shape contradicts config.json."""
    own, given = _built(info, kind).state_dict(), read_config(info.folder)
    for name, stored in tensors.items():
        found = own.get(name, own.get(f"{kind.base_model_prefix}.{name}", stored)).shape
        if found != stored.shape:
            said = [f"{key}: {each}" for key, each in given.items() if SIZES.search(key) and each in [*found]]
            raise CheckpointError(
                f"{info.folder}: {name} has shape {list(stored.shape)}, but {CONFIG_FILE} implies {list(found)} "
                f"({', '.join(said) or 'defaults'}); copy both files from the same model"
            )


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
    # transformers takes any name without the body's prefix as the body's, whatever layer it was saved from.
    prefix = f"{kind.base_model_prefix}."
    beside = {name for name in tensors if not name.startswith(prefix)}
    if beside and len(beside) < len(tensors):
        own = _empty(kind, config).state_dict().keys()
        if confused := sorted(name for name in beside - own if f"{prefix}{name}" in own | tensors.keys()):
            odd = min(confused, sorted(tensors.keys() - beside), key=len)[0]
            raise CheckpointError(
                f"{info.folder}: some of the body's tensors are stored under {prefix} and others are not ({odd}), so "
                f"these may belong to another layer; rename or remove {odd}"
            )
    model, report = _from_pretrained(info, kind, tensors, group, config=config, dtype=getattr(torch, dtype))
    heads = set() if with_head else ModelHead(model).names
    computed = {name for name, _ in model.named_buffers() if is_harmless(name, None, None)}
    missing = sorted(report["missing_keys"] - heads - computed)
    if with_head:
        check_tensors(info.folder, missing, report["unexpected_keys"])
    if missing:
        raise CheckpointError(f"{info.folder}: the weights have no {', '.join(missing[:4])}; copy the checkpoint again")
    # The caller sets the head, so a tensor for the class's own head would be lost.
    taken = heads - report["missing_keys"]
    lost = [name for name in tensors if any(f".{name}".endswith(f".{own}") for own in taken)]
    unexpected = {*report["unexpected_keys"], *lost}
    unused = [] if with_head else unused_tensors(info, config, kind, unexpected, starts_at_0=starts_at_0)
    if unused:
        raise CheckpointError(
            f"{info.folder}: {kind.__name__} does not use {', '.join(unused[:6])}; without them the outputs would "
            "differ from the checkpoint's; docs/your-models.md lists the supported heads"
        )
    if group is None:
        check_finite(model)  # before any probe, whose result would mean nothing
    model.config.architectures = [kind.__name__]
    model.name_or_path = str(info.folder)
    _keep_stable(model, info)
    return model.eval()


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
        with as_checkpoint_error(info.folder):
            if group is None:
                return kind.from_pretrained(None, output_loading_info=True, state_dict=tensors, **settings)
            check_tensor_parallel(info.folder, group.size)
            return group.from_pretrained(kind, state_dict=tensors, **settings)
    except CheckpointError:
        if group is None:  # a group's error already names the rank
            _check_shapes(info, kind, tensors)
        raise


def _as_named(tensors: dict[str, Tensor], kind: Any, config: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors with the body's names as in class `kind`, because some checkpoints name it differently.

    Bodies without a prefix are left to transformers. Raises CheckpointError if two tensors get the same name.
    """
    prefix, stored = kind.base_model_prefix, layers_path(tensors)
    is_usual = stored.startswith(f"{prefix}.") and not stored.startswith(f"{prefix}.{prefix}.")
    if not prefix or is_usual or "." not in stored:
        return tensors
    inner = layers_path(_empty(kind, config).state_dict()).removeprefix(f"{prefix}.")
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
    """Return which of the tensors `unexpected` by `kind` may change a checkpoint's outputs."""
    left = {name for name in unexpected if not is_harmless(name, info.tensors.get(name), info.vocab_size)}
    if not left:
        return []
    # Harmless: output layers of the family's language models and a pooler that the head does not read; without a
    # head, all layers of those models.
    body, known = f"{kind.base_model_prefix}.", dict[str, tuple[int, ...]]()
    for mapping in LANGUAGE_MODELS:
        if (language := mapping.get(type(config), None)) is not None:
            shapes = {name: (*tensor.shape,) for name, tensor in _empty(language, config).state_dict().items()}
            known |= shapes if info.head is not None else unwrapped(shapes, body)
    if info.head is None:
        for name in [*left]:  # a layer of this name but of another shape is something else
            stored, shape = info.tensors.get(name), known.get(name.removeprefix(body))
            if shape is not None and (stored is None or stored.shape == shape):
                left.remove(name)
        return sorted(left)
    has_own_class = info.head.form.pooled or info.head.kind == "token"
    if info.head.form.pooled and starts_at_0:  # a critic, from the body alone
        known |= dict.fromkeys(_empty(_sequence_class(info, config), config).state_dict(), ())
    left -= {name for name in left if has_own_class and name.startswith(f"{body}pooler.")}
    return sorted(name for name in left if name not in known or name.startswith(body))


def _keep_stable(model: Any, info: CheckpointInfo) -> None:
    fix_forward(model)
    limit, positions = stable_length(model.config.to_dict()), getattr(model.config, "max_position_embeddings", None)
    if limit and positions and limit < positions:
        logger.warning(
            "%s: rows are limited to %d tokens, not max_position_embeddings (%d): a longer row would change the rotary "
            "table or the attention of every row in its forward pass",
            info.folder,
            limit,
            positions,
        )


def check_same_architecture(mine: Mapping[str, Any], info: CheckpointInfo) -> None:
    """Raise CheckpointError if a checkpoint's architecture in config.json differs from the served model's, `mine`."""
    folder, theirs = info.folder, _config(info, 1).to_dict()
    if theirs["model_type"] != mine["model_type"]:
        raise CheckpointError(
            f"{folder} is a {theirs['model_type']} model, but the served model is {mine['model_type']}; another "
            "architecture needs a reload through Triton"
        )
    for key in sorted({*mine, *theirs} - NOT_ARCHITECTURE):
        # Compare every key: with equal shapes, the number of heads, the rotary base or the norms may still differ.
        if mine.get(key) != theirs.get(key):
            raise CheckpointError(
                f"{folder}: {key} in {CONFIG_FILE} is {theirs.get(key)!r}, but {mine.get(key)!r} in the served model; "
                "another architecture needs a reload through Triton"
            )
