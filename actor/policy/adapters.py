"""LoRA with peft: adds adapters to a causal LM, and saves, loads and merges them."""

from __future__ import annotations

import contextlib
import copy
import difflib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import PolicySection

LAYERS = (nn.Linear, Conv1D)


def with_adapters(model: Any, settings: PolicySection) -> Any:
    """Return the model with trainable adapters on `settings.lora_targets`; all other weights are frozen.

    Raises:
        CheckpointError: one of the targets matches no linear layer.
    """
    from peft import LoraConfig, get_peft_model  # takes seconds to import, and few runs need it

    named = None if settings.lora_targets == "all-linear" else _layers_named(model, settings.lora_targets)
    # Subclasses are excluded: routers of some mixtures of experts subclass Linear and return more than the product.
    others = [path for path, module in model.named_modules() if isinstance(module, LAYERS) and not _is_layer(module)]
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout,
        target_modules=named or "all-linear", exclude_modules=others or None, task_type="CAUSAL_LM",
    )  # fmt: skip
    with (
        warnings.catch_warnings()
    ):  # peft warns about settings that it corrects (GPT-2's layers) or ignores (ranks of experts)
        warnings.simplefilter("ignore")
        return get_peft_model(model, config)


def _is_layer(module: nn.Module) -> bool:
    return type(module) in LAYERS


def _layers_named(model: Any, targets: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers that match `targets`; peft silently ignores a name without a match."""
    output = model.get_output_embeddings()
    linear = [
        path for path, module in model.named_modules()
        if _is_layer(module) and module is not output
    ]  # fmt: skip
    found: list[str] = []
    for target in targets:
        paths = [path for path in linear if path == target or path.endswith(f".{target}")]
        if not paths:
            known = sorted({path.rpartition(".")[2] for path in linear})
            near = difflib.get_close_matches(target, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise CheckpointError(
                f"actor.policy.lora_targets: {target!r} matches no linear layer of {model.name_or_path} that supports "
                f"adapters{hint}; choose from {', '.join(known)}"
            )
        found += paths
    return found


def adapter_dropouts(model: Any) -> list[nn.Module]:
    """Return the adapters' dropout layers; none if `lora_dropout` is 0."""
    return [
        module for path, module in model.named_modules() if ".lora_dropout." in path and isinstance(module, nn.Dropout)
    ]


@contextlib.contextmanager
def in_training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put these modules into training mode within the block, and into eval mode afterwards."""
    try:
        for module in modules:
            module.train()
        yield
    finally:
        for module in modules:
            module.eval()


def merged(model: Any) -> Any:
    """Return a float32 copy of the model with its adapters merged into the base weights."""
    return copy.deepcopy(model).float().merge_and_unload()


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Return the trainable parameters by name, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trained(model: Any, tensors: dict[str, Tensor], source: Path) -> None:
    """Load tensors that `trained_tensors` returned; `source` is their file, for error messages.

    Raises:
        CheckpointError: names or shapes differ from the model's adapters.
    """
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if {name: p.shape for name, p in own.items()} != {name: tensor.shape for name, tensor in tensors.items()}:
        raise CheckpointError(
            f"the adapters in {source} do not match actor.policy.lora_rank and actor.policy.lora_targets; restore "
            "these settings, or start a run in another folder (run.dir)"
        )
    for name, parameter in own.items():
        parameter.data.copy_(tensors[name])
