"""Loads the causal LM of the policy, and checks that it takes rows as long as the configuration allows."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from python_backend.checkpoints.inspection import CheckpointError, stored_dtypes
from python_backend.checkpoints.positions import fix_forward, max_positions, stable_length
from python_backend.config import PolicySection


def load_model(settings: PolicySection, *, as_stored: bool = False) -> Any:
    """Load the causal LM in float32, or in bfloat16 if it is stored so and its frozen matrices stay so.

    Weights in the dtype that they are stored in stay in the pages of the file, which processes share.

    Args:
        as_stored: keep weights that are all trained in that dtype, if all have the same; the caller converts them.

    Raises OSError or ValueError.
    """
    load = functools.partial(
        AutoModelForCausalLM.from_pretrained,
        str(settings.checkpoint),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    stays = bool(settings.lora_rank) and settings.precision == "bfloat16"
    if (stays or (as_stored and not settings.lora_rank)) and stored_dtypes(settings.checkpoint) == {"BF16"}:
        model = load(dtype=torch.bfloat16)
        # Some families compute tables in the dtype that they are loaded in; those would be less exact.
        if all(buffer.dtype != torch.bfloat16 for buffer in model.buffers()):
            if not stays:
                model.config.dtype = torch.float32  # of the weights that training will write
            return model
    return load(dtype=torch.float32)


def check_positions(model: Any, folder: Path, max_prompt_tokens: int, max_new_tokens: int) -> None:
    """Keep the model's forward pass as loaded; raise CheckpointError if rows may exceed the model's positions."""
    fix_forward(model)
    config, longest = model.config.to_dict(), max_prompt_tokens + max_new_tokens
    limit, reason = stable_length(config), "beyond which the model's forward pass changes with the row length"
    if limit is None:
        limit, reason = max_positions(config), "the number of positions that the model has embeddings for"
        if limit is not None and longest > limit and _takes_rows_of(model, longest):
            return
    if limit is not None and longest > limit:
        raise CheckpointError(
            f"{folder}: actor.prompts.max_tokens ({max_prompt_tokens}) + actor.generation.max_new_tokens "
            f"({max_new_tokens}) is above {limit}, {reason}; lower them"
        )


@torch.no_grad()
def _takes_rows_of(model: Any, length: int) -> bool:
    """Return whether the model accepts rows of `length` tokens, e.g. because it computes its position embeddings.

    Call it while the model is on the CPU, where an index beyond an embedding table raises an error.
    """
    last = {"position_ids": torch.tensor([[length - 1]])}
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    width, inputs = (1, last) if takes_positions else (length, {})
    try:
        model(input_ids=torch.zeros(1, width, dtype=torch.int64), use_cache=False, **inputs)
    except (IndexError, RuntimeError):
        return False
    return True
