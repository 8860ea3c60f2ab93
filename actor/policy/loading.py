"""Loads the models of the policy, and checks that they accept rows as long as the configuration allows.

On several ranks, each rank trains a slice of the weights, and holds whole copies as generator and reference.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_triton.checkpoints.inspection import CheckpointError, stored_dtypes
from rlhf_triton.checkpoints.language_models import check_tensors
from rlhf_triton.checkpoints.row_length import fix_forward, max_positions, stable_length
from rlhf_triton.config.actor import PolicySection
from rlhf_triton.models.precision import computing, use_bfloat16
from rlhf_triton.models.sharded_tensors import whole
from rlhf_triton.models.transformers_classes import creating_model
from rlhf_triton.training_engine import preparation
from rlhf_triton.training_engine.ranks import AnyRanks, Ranks
from rlhf_triton.training_engine.sharding import copy_with_empty_weights, is_sharded, shard

R = TypeVar("R")


class PolicyModels:
    """The model in training and its frozen copies."""

    def __init__(
        self,
        model: Any,
        settings: PolicySection,
        ranks: AnyRanks,
        *,
        keeps_reference: bool,
        keeps_generator: bool,
    ) -> None:
        """Create the copies and place all models; collective.

        Args:
            model: from `load_model`, the same on all ranks.

        Raises:
            CheckpointError: the model does not support one of the settings.
        """
        self.settings = settings
        self._shards = ranks.shards
        self.device = ranks.device_of(settings.device)
        # Weights to be sharded stay mapped from the file; sharding rounds the slices and moves them to the device.
        whole_settings = settings.model_copy(update={"precision": "float32"}) if ranks.shards else settings
        model = preparation.prepare(
            model, whole_settings, "actor.policy", model.get_output_embeddings(), task="CAUSAL_LM"
        )
        self.model = model.eval() if ranks.shards else model.eval().to(self.device)
        # With LoRA, the reference is the policy with its adapters disabled: no second copy needed.
        self.reference = self._frozen_copy() if keeps_reference and not settings.lora_rank else None
        self.generator = self._frozen_copy() if keeps_generator or ranks.shards else self.model
        if ranks.shards:
            self._shard(ranks)

    def causal(self, model: Any) -> Any:
        """Return the causal LM of `model`, without the wrapper of LoRA adapters."""
        return model.get_base_model() if self.settings.lora_rank else model

    def compute(self, model: Any, function: Callable[..., R], *args: Any) -> R:
        """Return `function(causal LM, *args)`; the weights of a sharded model are gathered during the call."""
        causal = self.causal(model)
        result: R = causal.gathered(function, *args) if is_sharded(causal) else function(causal, *args)
        return result

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager that makes forward passes compute in `actor.policy.precision`."""
        return computing(self.device, self.settings.precision)

    @torch.no_grad()
    def renew_generator(self) -> None:
        """Copy the trained weights into the generator; collective."""
        if self.generator is not self.model:
            for copied, trained in zip(self.generator.parameters(), self.model.parameters(), strict=True):
                if trained.requires_grad:
                    copied.copy_(whole(trained))

    def _use_precision(self, model: Any) -> None:
        """Prepare a model for forward passes in `actor.policy.precision`."""
        if self.settings.precision == "bfloat16":
            use_bfloat16(self.causal(model), self.causal(model).get_output_embeddings())

    def _frozen_copy(self) -> Any:
        if not self._shards:
            model = copy.deepcopy(self.model).requires_grad_(False)
            self._use_precision(model)
            return model.to(self.device)
        # `_shard` fills the copy later, so that no rank holds a second whole policy in its host's memory.
        model = copy_with_empty_weights(self.model, "meta").requires_grad_(False)
        self._to_float32(model)
        self._use_precision(model)
        return copy_with_empty_weights(model, self.device)

    def _shard(self, ranks: Ranks) -> None:
        causal = self.causal(self.model)
        precision = self.settings.precision
        head = causal.get_output_embeddings()

        def prepare(part: Any) -> None:
            self._to_float32(part)
            if precision == "bfloat16":
                use_bfloat16(part, head)

        causal.gathered = lambda function, *args: function(causal, *args)
        shard(causal, ranks, methods=["gathered"], prepare=prepare, precision=precision)
        copies = [model.parameters() for model in (self.reference, self.generator) if model is not None]
        with torch.no_grad():
            for trained, *copied in zip(self.model.parameters(), *copies, strict=True):
                weights = whole(trained)
                for parameter in copied:
                    parameter.copy_(weights)

    def _to_float32(self, part: Any) -> None:
        """Convert bfloat16 parameters to float32, unless LoRA freezes them."""
        for parameter in part.parameters():
            if parameter.dtype == torch.bfloat16 and not self.settings.lora_rank:
                parameter.data = parameter.data.float()


def empty_causal_lm(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the causal LM of a folder's config.json, without weights (on the meta device). Raises CheckpointError."""
    with creating_model(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def check_lora_targets(settings: PolicySection) -> None:
    """Raise CheckpointError if a name in `lora_targets` matches no layer; reads config.json, not the weights."""
    preparation.check_lora_targets(
        settings, "actor.policy", lambda: empty_causal_lm(settings.model), lambda causal: causal.get_output_embeddings()
    )


def load_model(settings: PolicySection, *, as_stored: bool = False) -> Any:
    """Load the causal LM in float32, or in bfloat16 if it is stored in bfloat16 and LoRA trains it at that precision.

    Weights that keep their stored dtype stay in the pages of the file, which processes share.

    Args:
        as_stored: without LoRA, keep the stored dtype if it is bfloat16 throughout; the caller converts the weights.

    Raises CheckpointError if the folder cannot be loaded, lacks tensors of the model, or has unexpected ones.
    """

    def load(dtype: torch.dtype) -> Any:
        with creating_model(settings.model):
            model, report = AutoModelForCausalLM.from_pretrained(
                str(settings.model),
                dtype=dtype,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        lacking = report["missing_keys"].intersection(name for name, _ in model.named_parameters())
        check_tensors(settings.model, lacking, report["unexpected_keys"])
        return model

    stays = bool(settings.lora_rank) and settings.precision == "bfloat16"
    if (stays or (as_stored and not settings.lora_rank)) and stored_dtypes(settings.model) == {"BF16"}:
        model = load(torch.bfloat16)
        # Some model families compute tables in the loading dtype; in bfloat16 these would be less exact.
        if all(buffer.dtype != torch.bfloat16 for buffer in model.buffers()):
            if not stays:
                model.config.dtype = torch.float32  # the dtype of the weights that training writes
            return model
    return load(torch.float32)


def check_positions(model: Any, folder: Path, longest: int, why: str) -> None:
    """Fix the model's forward pass as loaded; raise CheckpointError if rows may exceed the model's positions.

    Args:
        longest: maximum tokens of a row.
        why: the settings that define `longest`, for the error message.
    """
    fix_forward(model)
    config = model.config.to_dict()
    limit = stable_length(config)
    reason = "beyond which the model's forward pass changes with the row length"
    if limit is None:
        limit = max_positions(config)
        reason = "the number of positions that the model has embeddings for"
        if limit is not None and longest > limit and _takes_rows_of(model, longest):
            return
    if limit is not None and longest > limit:
        raise CheckpointError(f"{folder}: rows may have more than {limit} tokens, {reason}: {why}")


@torch.no_grad()
def _takes_rows_of(model: Any, length: int) -> bool:
    """Return whether the model accepts rows of `length` tokens, e.g. because it computes its position embeddings.

    Call while the model is on the CPU, where an index beyond an embedding table raises an error.
    """
    last = {"position_ids": torch.tensor([[length - 1]])}
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    width, inputs = (1, last) if takes_positions else (length, {})
    try:
        model(input_ids=torch.zeros(1, width, dtype=torch.int64), use_cache=False, **inputs)
    except (IndexError, RuntimeError):
        return False
    return True
