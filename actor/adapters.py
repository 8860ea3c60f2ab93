"""LoRA through peft: adapters on a policy, their state, and the ordinary model that comes of merging them.
Given: a Hugging Face causal LM. Returns: a model with adapters; tensors by name; a model without adapters.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import Tensor

from python_backend.config import ActorSection


def with_adapters(model: Any, settings: ActorSection) -> Any:
    """The model with a trainable adapter on every linear layer but the output; all else is frozen."""
    from peft import LoraConfig, get_peft_model  # seconds to import, and few runs need it

    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, lora_dropout=0.0, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with warnings.catch_warnings():  # peft asks transformers under a name that goes away in version 6; both are pinned
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, config)


def merged(model: Any) -> Any:
    """A copy of the model with its adapters added to the weights that they belong to."""
    return copy.deepcopy(model).merge_and_unload()


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """The parameters that training changes, by name, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def load_trained(model: Any, tensors: dict[str, Tensor]) -> None:
    """Put tensors as `trained_tensors` gave them back. Raises ValueError if they are another model's."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if own.keys() != tensors.keys():
        raise ValueError(f"the adapters differ from the policy's: {sorted(own.keys() ^ tensors.keys())[:4]}")
    for name, parameter in own.items():
        parameter.data.copy_(tensors[name])
