"""Copies a model and loads another checkpoint of the same architecture into the copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf_triton.checkpoints.heads import Head
from rlhf_triton.checkpoints.inspection import ADAPTERS_KEY, CONFIG_FILE, CheckpointError, CheckpointInfo
from rlhf_triton.errors import reason_of
from rlhf_triton.models.heads import ModelHead, build_head
from rlhf_triton.models.mapped_tensors import stored_tensors
from rlhf_triton.models.stored_heads import tensors_of_head
from rlhf_triton.models.transformers_classes import STANDARDISATION_KEYS, model_config

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.models.tensor_parallel import RankGroup

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
            f"{', '.join(origin.label_names)}, in this order; correct id2label in {CONFIG_FILE}, or train with "
            "the served labels"
        )
    check_same_architecture(model_config(origin, 1).to_dict(), info)
    if group is not None or info.tensors.keys() != origin.tensors.keys():
        return None
    own = model.state_dict()
    place = ModelHead(model)
    head = place.fitted(build_head(info.head, tensors_of_head(info, info.head)))
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
    module.name_or_path = str(folder)
    return module


def check_same_architecture(served: Mapping[str, Any], info: CheckpointInfo) -> None:
    """Raise CheckpointError if a checkpoint's architecture in config.json differs from the served model's, `served`."""
    folder = info.folder
    stored = model_config(info, 1).to_dict()
    if stored["model_type"] != served["model_type"]:
        raise CheckpointError(
            f"{folder} is a {stored['model_type']} model, but the served model is {served['model_type']}; another "
            "architecture needs a reload through Triton"
        )
    for key in sorted({*served, *stored} - NOT_ARCHITECTURE):
        # Compare every key: with equal shapes, the number of heads, the rotary base or the norms may still differ.
        if served.get(key) != stored.get(key):
            raise CheckpointError(
                f"{folder}: {key} in {CONFIG_FILE} is {stored.get(key)!r}, but {served.get(key)!r} in the served "
                "model; another architecture needs a reload through Triton"
            )
