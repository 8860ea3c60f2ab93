"""LoRA with peft: adds adapters to a model, saves and loads them, and merges them into the weights.

Shared by the policy and the critic in training.
"""

import contextlib
import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_triton.checkpoints.inspection import CheckpointError, StoredAdapters
from rlhf_triton.checkpoints.tensor_file import layout, write_tensors

LAYERS = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Lora:
    """The `lora_...` settings of one section of the configuration."""

    section: str  # for error messages: actor.policy or trainer
    rank: int
    alpha: int
    targets: str | Sequence[str]  # "all-linear", or names of layers


def with_adapters(model: Any, lora: Lora, output: nn.Module, *, task: str | None = None) -> Any:
    """Wrap the model with peft: trainable adapters on `lora.targets`, all other weights frozen. Returns the wrapper.

    peft inserts the adapters into `model` itself, which the wrapper's `get_base_model` returns.

    Args:
        output: the output layer, which gets no adapter.
        task: peft's task type; None for a model that cannot generate.

    Raises:
        CheckpointError: one of the targets matches no linear layer.
    """
    from peft import LoraConfig, get_peft_model  # takes seconds to import, and few runs need it

    outputs = {*output.modules()}
    named = named_layers(model, lora, output)
    # Subclasses are excluded: some mixture-of-experts routers subclass Linear and return more than the product.
    others = [
        path
        for path, module in model.named_modules()
        if isinstance(module, LAYERS) and (module in outputs or type(module) not in LAYERS)
    ]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=named or "all-linear",
        exclude_modules=others or None,
        task_type=task,
    )
    # peft warns about settings that it corrects (GPT-2's layers) or ignores (ranks of experts).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def named_layers(model: Any, lora: Lora, output: nn.Module) -> list[str]:
    """Return the paths of the linear layers that `lora.targets` names; [] for `all-linear`.

    Raises CheckpointError if a target matches no layer, which peft would silently ignore. `output` is as in
    `with_adapters`. The weights may be on the meta device.
    """
    if lora.targets == "all-linear":
        return []
    outputs = {*output.modules()}
    linear = [path for path, module in model.named_modules() if type(module) in LAYERS and module not in outputs]
    layers: list[str] = []
    for target in lora.targets:
        paths = [path for path in linear if path == target or path.endswith(f".{target}")]
        if not paths:
            last_parts = sorted({path.rpartition(".")[2] for path in linear})
            near = difflib.get_close_matches(target, last_parts, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise CheckpointError(
                f"{lora.section}.lora_targets: {target!r} matches no linear layer of {model.name_or_path} that "
                f"supports adapters{hint}; choose from {', '.join(last_parts)}"
            )
        layers += paths
    return layers


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != "base_layer")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in its own dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class MergedWeights(Mapping[str, Tensor]):
    """A model's weights on the CPU with the adapters merged in, under the names they have without peft.

    Each tensor is computed when it is read, so that merging needs the memory of one tensor only. If the model is
    sharded, reading is collective.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None, head: nn.Module | None = None) -> None:
        """
        Args:
            dtype: dtype of all floating-point tensors except the head's, which stay in at least float32; default: at
                least float32 for all.
        """
        self._dtype = dtype
        self._head = set() if head is None else {id(parameter) for parameter in head.parameters()}
        tensors = model.state_dict(keep_vars=True)
        self.plain = {_plain(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}
        """The base model's tensors, before the adapters are merged in."""
        self.adapted = {  # peft adapts the experts of a mixture by parameter, other layers by module
            f"{_plain(path)}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for path, layer in model.named_modules()
            if hasattr(layer, "lora_A")
        }

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        from rlhf_triton.models.sharded_tensors import (
            whole,  # adds seconds to the start of a serving process
        )

        tensor = self.plain[name].detach()
        if name in self.adapted:
            tensor = at_least_float32(tensor) + self.adapted[name].get_delta_weight("default")
        return whole(tensor.to(self.dtype(name))).cpu().contiguous()

    def __contains__(self, name: object) -> bool:
        return name in self.plain  # `Mapping.__contains__` would compute the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        own = self.plain[name]
        if not own.is_floating_point():
            return own.dtype
        if self._dtype is None or id(own) in self._head:
            return torch.promote_types(own.dtype, torch.float32)
        return self._dtype

    def shapes(self) -> dict[str, tuple[torch.dtype, Size]]:
        """Return the dtype and the unsharded shape of each tensor, without computing the tensors."""
        return {name: (self.dtype(name), tensor.shape) for name, tensor in self.plain.items()}

    def write(self, file: Path) -> str:
        """Write all tensors to a safetensors file; return its digest."""
        return write_tensors(file, self.shapes(), self.__getitem__)

    def gather(self) -> None:
        """Join another rank's `write`: read all tensors in the same order without writing them. Collective."""
        for name in layout(self.shapes())[1]:
            self[name]


@contextlib.contextmanager
def with_merged_layers(model: Any) -> Iterator[None]:
    """Merge the adapters into their layers' weights within the block: two kernels per layer instead of six.

    Merged weights keep the dtype of the layer. In bfloat16, rounding them loses less than rounding the products of
    unmerged adapters does. The original tensors are put back at the end. Adapters on the experts of a mixture are not
    merged.
    """
    held: list[tuple[Any, Tensor]] = []
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            for layer in model.modules():
                if hasattr(layer, "lora_A") and not hasattr(layer, "parameter_name"):
                    weight = layer.get_base_layer().weight
                    held.append((layer, weight.data))
                    weight.data = (weight.float() + layer.get_delta_weight("default")).to(weight.dtype)
                    layer.merged_adapters.append("default")  # peft then computes the layer alone
        yield
    finally:
        for layer, data in held:
            layer.get_base_layer().weight.data = data
            layer.merged_adapters.clear()


def describe_adapters(model: Any, *, base: int) -> StoredAdapters:
    """Return the description of the model's adapters that a weights version with only `trained_tensors` stores.

    Raises:
        CheckpointError: experts of a mixture have adapters; only a merged version can hold these.
    """
    merged = MergedWeights(model)
    layers = merged.adapted
    if any(hasattr(layer, "parameter_name") for layer in layers.values()):
        raise CheckpointError(
            "trainer.publish.format: adapter does not support adapters on the experts of a mixture; set it to merged, "
            "or name other layers in trainer.lora_targets"
        )
    scales = {layer.scaling["default"] for layer in layers.values()}
    rounded = [name for name, tensor in merged.plain.items() if tensor.dtype == torch.bfloat16]
    transposed = [name for name, layer in layers.items() if layer.fan_in_fan_out]
    return StoredAdapters(base, scales.pop(), tuple(transposed), tuple(rounded))


def with_stored_adapters(
    base: Mapping[str, Tensor], trained: Mapping[str, Tensor], adapters: StoredAdapters
) -> dict[str, Tensor]:
    """Merge the `trained_tensors` of a version into `base`; return the same tensors as `MergedWeights`.

    Unchanged tensors are shared with `base`. Raises KeyError if the adapters do not fit `base`.
    """
    tensors = {**base, **{name: tensor for name, tensor in trained.items() if ".lora_" not in name}}
    for name in adapters.rounded:
        tensors[name] = base[name].bfloat16().float()
    for name, down in trained.items():
        layer, is_down, _ = name.partition(".lora_A.")
        if is_down:
            product = trained[name.replace(".lora_A.", ".lora_B.")] @ down
            weight = f"{layer}.weight"
            delta = product.T if weight in adapters.transposed else product
            tensors[weight] = (tensors[weight] + delta * adapters.scale).contiguous()
    return tensors


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Return the trainable parameters by name, unsharded and on the CPU; collective if the model is sharded."""
    from rlhf_triton.models.sharded_tensors import (
        whole,  # adds seconds to the start of a serving process
    )

    return {
        name: whole(parameter.detach()).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
