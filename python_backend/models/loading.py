"""Loads Hugging Face modules from inspected checkpoints: body memory-mapped where possible, head in fp32."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
)

from python_backend.checkpoints.inspection import (
    ADAPTERS_KEY,
    CONFIG_FILE,
    CheckpointError,
    CheckpointInfo,
    Head,
    Pooling,
    fix_forward,
    head_shape_error,
    inspect_checkpoint,
    stable_length,
)
from python_backend.checkpoints.language_models import check_tensors
from python_backend.checkpoints.safetensors_header import TensorInfo, read_header
from python_backend.checkpoints.tensor_file import STORED_DTYPES
from python_backend.checkpoints.tensor_parallel import check_tensor_parallel
from python_backend.models.adapters import with_stored_adapters
from python_backend.models.token_head import head_of, measure_causality

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from python_backend.models.tensor_parallel import RankGroup

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPENRLHF_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std")
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
    *OPENRLHF_KEYS,
}


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a linear head, in fp32."""

    weight: Tensor  # [A, hidden]
    bias: Tensor | None  # [A]

    def merged(self, weights: Tensor) -> HeadWeights:
        """Return a head with one output: the sum of the attributes, weighted by `weights` [A]."""
        bias = None if self.bias is None else (self.bias * weights).sum()[None]
        return HeadWeights(weights[None] @ self.weight, bias)


def read_head(info: CheckpointInfo, head: Head) -> HeadWeights:
    """Read the head's tensors from the file, as fp32 regardless of the body's dtype."""
    with as_checkpoint_error(info.folder):
        weight = _read_one(info, head.weight_name).float()
        return HeadWeights(weight, _read_one(info, head.bias_name).float() if head.has_bias else None)


def load_token_model(info: CheckpointInfo, head: HeadWeights | None, dtype: str, group: RankGroup | None = None) -> Any:
    """Load the body with a linear head on each token; with `group`, this rank's part of it.

    Uses the family's token classification class in transformers, or its sequence classification class if transformers
    has no token classification class for the family (OPT, GPT-J). If `head` is None, the head has one output and zero
    weights.
    """
    num_labels = 1 if head is None else head.weight.shape[0]
    config = _config(info, num_labels)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    kind = kind or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise CheckpointError(f"{info.folder}: transformers has no classification class for {info.model_type} models")
    model = _load(info, kind, config, dtype, with_head=False, group=group)
    _put_head(info, model, head or HeadWeights(torch.zeros(1, head_of(model).in_features), None))
    return model


def load_pooled_model(info: CheckpointInfo, head: Head, dtype: str) -> Any:
    """Load a sequence classification model that has its own layers and pooling before the last linear layer."""
    config = _config(info, head.num_labels)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or config.is_encoder_decoder:
        raise CheckpointError(
            f"{info.folder}: {info.model_type} models with a sequence classification head are not supported; use a "
            "decoder or an encoder"
        )
    model = _load(info, kind, config, dtype, with_head=False)
    _put_head(info, model, read_head(info, head))
    return model


def load_classifier(info: CheckpointInfo, head: Head, device: str, dtype: str, pooling: Pooling) -> Any:
    """Load a classifier with its own pooling. Raises CheckpointError if it, or `pooling`, does not fit."""
    if pooling != "auto":
        raise CheckpointError(
            f"{info.folder}: pooling: {pooling} does not fit the head {head.prefix}, trained with the pooling of "
            f"its {info.architecture or 'class'}; set pooling: auto"
        )
    model = load_pooled_model(info, head, dtype).to(device)
    # A decoder's pooling searches for the padding id, which a row may contain: it would pool the wrong token.
    if measure_causality(model):
        raise CheckpointError(
            f"{info.folder}: a causal body under the head {head.prefix} of {info.architecture} is not supported; "
            "use a checkpoint whose head is a linear `score`"
        )
    return model


def attribute_weights_of(info: CheckpointInfo, head: Head, given: Sequence[float] | None) -> Tensor:
    """Return the weights `[A]` of a head's attributes, by default 1/A each. Raises CheckpointError unless they fit."""
    weights = [1 / head.num_labels] * head.num_labels if given is None else list(given)
    if len(weights) != head.num_labels:
        raise CheckpointError(
            f"{info.folder}: its head has {head.num_labels} outputs, but attribute_weights has {len(weights)}; give "
            "one weight per output"
        )
    return torch.tensor(weights, dtype=torch.float32)


def load_causal_model(info: CheckpointInfo, dtype: str, group: RankGroup | None = None) -> Any:
    """Load a causal language model; with `group`, this rank's part of it."""
    config = _config(info, 1)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise CheckpointError(f"{info.folder}: transformers has no causal language model for {info.model_type} models")
    return _load(info, kind, config, dtype, with_head=True, group=group)


def _put_head(info: CheckpointInfo, model: Any, head: HeadWeights) -> None:
    """Replace the weights of the model's head with those of `head`, in fp32.

    A head without bias sets an existing bias to 0; a head with bias adds one if the model's has none.
    """
    linear = head_of(model)
    if info.head is not None and head.weight.shape[1] != linear.in_features:
        raise head_shape_error(
            info.folder,
            info.head.weight_name,
            info.tensors[info.head.weight_name],
            f"[num_labels, {linear.in_features}], as wide as the body's hidden states",
        )
    bias = head.bias if head.bias is not None or linear.bias is None else torch.zeros(head.weight.shape[0])
    linear.weight = torch.nn.Parameter(head.weight.clone())
    linear.bias = None if bias is None else torch.nn.Parameter(bias.clone())


def load_weights(model: Any, folder: Path) -> None:
    """Copy the weights that `model.save_pretrained` wrote to `folder` into `model`.

    Loads them through transformers, because for some families the saved names and shapes differ from the module's: a
    mixture of experts, for example, is saved as one tensor per expert, but the module has one tensor for all experts.

    Raises:
        CheckpointError: names or shapes differ, or a file is damaged.
    """
    from python_backend.models.sharded_tensors import sharded_like  # adds seconds to the start of a serving process

    info = inspect_checkpoint(folder)
    with as_checkpoint_error(folder):
        saved, report = type(model).from_pretrained(
            None,
            config=copy.deepcopy(model.config),
            state_dict=map_tensors(info.files),
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


def twin(model: Any, info: CheckpointInfo, group: RankGroup | None = None) -> Any:
    """Return a module of the same class, configuration and dtypes as `model`, with the weights of `info`.

    With `group`, `model` is its skeleton, and the module is this rank's part of the new weights, on its device.

    Raises:
        CheckpointError: the architecture, names or shapes differ.
    """
    _check_same_architecture(model.config.to_dict(), info.folder)
    return _with_tensors(model, stored_tensors(info), info.folder, group)


def twin_with_head(
    model: Any, origin: CheckpointInfo, info: CheckpointInfo, group: RankGroup | None = None
) -> Any | None:
    """Return a module like `model`, which was loaded from `origin`, with the weights of another reward model.

    Returns None if only transformers can load them: because it has to rename or convert tensors, or for `group`.

    Raises:
        CheckpointError: the architecture or the head differs from that of `origin`, or a shape.
    """
    if info.head != origin.head:
        raise CheckpointError(f"{info.folder} has another head than the served model: {info.head}, not {origin.head}")
    _check_same_architecture(_read_config(origin.folder), info.folder)
    if group is not None:
        return None
    own, tensors, linear = model.state_dict(), stored_tensors(info), head_of(model)
    prefix = next(name for name, module in model.named_modules() if module is linear)
    assert info.head is not None
    # A copy, because the mapped tensors may not be aligned, and the last bits would depend on that (see TokenHead).
    tensors[f"{prefix}.weight"] = tensors.pop(info.head.weight_name).clone()
    if linear.bias is not None:
        tensors[f"{prefix}.bias"] = tensors.pop(info.head.bias_name, torch.zeros_like(linear.bias))
    if not own.keys() <= tensors.keys():
        return None
    return _with_tensors(model, {name: tensors[name] for name in own}, info.folder)


def check_finite(module: torch.nn.Module) -> None:
    """Raise CheckpointError naming the first parameter that holds NaN or infinity."""
    check_sums({name: parameter.detach().sum() for name, parameter in module.named_parameters()})


def check_sums(sums: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError naming the first tensor with a NaN or infinity, given the sum of each."""
    # A sum is not finite if any element is NaN or infinite; it costs a tenth of `isfinite` on every element.
    # All sums are checked together first, and one by one only to name the parameter.
    if not torch.stack([value.double() for value in sums.values()]).isfinite().all():
        name = next(name for name, value in sums.items() if not value.isfinite())
        raise CheckpointError(f"{name} has values that are not finite")


def _with_tensors(model: Any, tensors: dict[str, Tensor], folder: Path, group: RankGroup | None = None) -> Any:
    # Constructing the class again would hold the GIL of a serving process five times as long. The copy first shares
    # every tensor with `model`. The strict assignment then replaces the tensors in the checkpoint, while computed
    # tensors (rotary frequencies) stay shared.
    module = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if group is not None:
        group.attach(module)
    # Each tensor is converted before it goes to the card, which so holds no more than the new version beside the old.
    place = (lambda _, tensor, dtype: tensor.to(model.device, dtype)) if group is None else group.part
    _assign(module, {name: place(name, tensor, dtypes.get(name)) for name, tensor in tensors.items()}, folder)
    return module


def stored_tensors(info: CheckpointInfo) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, mapped from its files; adapters are merged into the version they belong to.

    Raises:
        CheckpointError: a file is damaged, or the adapters do not fit.
    """
    tensors = map_tensors(info.files)
    if info.adapters is None:
        return tensors
    base = inspect_checkpoint(info.folder.parent / str(info.adapters.base))
    with as_checkpoint_error(info.folder):
        return with_stored_adapters(map_tensors(base.files), tensors, info.adapters)


def map_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Return all tensors of safetensors files, memory-mapped copy-on-write: processes share unmodified pages.

    The safetensors library is not used here, because its version 0.8.0 leaks two numbers per tensor that it passes to
    torch, and a serving process loads many versions.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            tensors |= {name: _view(mapped, info) for name, info in read_header(file).items()}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file.parent}: unreadable {file.name}: {error}") from error
    return tensors


def _view(mapped: mmap.mmap, info: TensorInfo) -> Tensor:
    """Return a tensor of a mapped file without copying it. Raises ValueError if its dtype is not supported."""
    dtype = STORED_DTYPES.get(info.dtype)
    if dtype is None:
        raise ValueError(f"tensors of type {info.dtype} are not supported")
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=dtype)
    count = info.num_bytes // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.start).reshape(info.shape)


@contextlib.contextmanager
def as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert exceptions from transformers and safetensors to a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} cannot be loaded: {reason[:400]}") from error


def _config(info: CheckpointInfo, num_labels: int) -> Any:
    with as_checkpoint_error(info.folder):
        config = AutoConfig.from_pretrained(
            str(info.folder), num_labels=num_labels, local_files_only=True, trust_remote_code=False
        )
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{info.folder} is quantised; use the unquantised checkpoint")
    # `inspect_checkpoint` has read OpenRLHF's keys already; a saved critic stores the same facts under our own keys.
    for key in (*OPENRLHF_KEYS, ADAPTERS_KEY):
        if hasattr(config, key):
            delattr(config, key)
    return config


def _load(
    info: CheckpointInfo, kind: Any, config: Any, dtype: str, *, with_head: bool, group: RankGroup | None = None
) -> Any:
    """Load a checkpoint into class `kind` through transformers; if not `with_head`, the caller sets the head.

    transformers renames and converts tensors and initialises missing ones. It does not copy tensors whose dtype already
    matches, so mapped tensors stay mapped. Missing tensors are an error, except those of a head that the caller sets.
    """
    tensors = stored_tensors(info)
    if info.head is not None and not with_head:
        tensors.pop(info.head.weight_name)
        tensors.pop(info.head.bias_name, None)
    arguments = {"config": config, "state_dict": tensors, "dtype": DTYPES[dtype]}
    with as_checkpoint_error(info.folder):
        if group is None:
            model, report = kind.from_pretrained(None, output_loading_info=True, **arguments)
        else:
            check_tensor_parallel(info.folder, group.size)
            model, report = group.from_pretrained(kind, **arguments)
    heads = {id(parameter) for parameter in head_of(model).parameters()}
    others = {name for name, parameter in model.named_parameters() if with_head or id(parameter) not in heads}
    lacking = sorted(others.intersection(report["missing_keys"]))
    if with_head:
        check_tensors(info.folder, lacking, report["unexpected_keys"])
    if lacking:
        raise CheckpointError(f"{info.folder}: the weights lack {', '.join(lacking[:4])}")
    model.config.architectures = [kind.__name__]
    _keep_stable(model, info)
    return model.eval()


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


def _read_one(info: CheckpointInfo, name: str) -> Tensor:
    with safe_open(str(info.folder / info.tensors[name].file), framework="pt") as file:
        return file.get_tensor(name)


def _check_same_architecture(mine: Mapping[str, Any], folder: Path) -> None:
    theirs = _read_config(folder)
    if theirs["model_type"] != mine["model_type"]:
        raise CheckpointError(
            f"{folder} is a {theirs['model_type']} model, but the served model is {mine['model_type']}"
        )
    for key in sorted({*mine, *theirs} - NOT_ARCHITECTURE):
        # Compare every key: with equal shapes, the number of heads, the rotary base or the norms may still differ.
        if mine.get(key) != theirs.get(key):
            raise CheckpointError(
                f"{folder}: {key} in {CONFIG_FILE} is {theirs.get(key)!r}, but {mine.get(key)!r} in the served model; "
                "a different architecture needs a reload through Triton"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return _read_architecture((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: unreadable {CONFIG_FILE}: {error}") from error


@functools.lru_cache(maxsize=4)
def _read_architecture(text: str) -> dict[str, Any]:
    """Return all keys of a config.json, defaults included; cached, because the text rarely changes between versions."""
    given = json.loads(text)
    if not isinstance(given, dict) or "model_type" not in given:
        raise ValueError("it has no model_type")
    return AutoConfig.for_model(**given).to_dict()


def _assign(module: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} does not fit the served model: {reason[:400]}") from error
