"""Checks that a checkpoint's layers can be split over several devices; imports no torch of its own."""

import re
from pathlib import Path

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.language_models import as_checkpoint_error

HEADS = ("num_attention_heads", "num_key_value_heads")


def plan_key(name: str) -> str:
    """Return a module's or parameter's name as a key of transformers' tensor-parallel plan, such as `layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def check_tensor_parallel(folder: Path, size: int) -> None:
    """Check that transformers can split the model in `folder` over `size` devices.

    Raises:
        CheckpointError: the family has no tensor-parallel plan, or `size` does not divide the number of attention
            heads.
    """
    from transformers import AutoConfig  # slow to import
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    with as_checkpoint_error(folder):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    plan = config.base_model_tp_plan
    if not plan:
        raise CheckpointError(
            f"{folder}: transformers has no tensor-parallel plan for {config.model_type} models; set "
            "tensor_parallel: 1, or use a family that has one, such as Llama, Qwen, Mistral, Gemma or GPT-NeoX"
        )
    for name in HEADS:
        heads = getattr(config, name, None)
        if heads is not None and get_kv_heads_per_rank(plan, heads, size) is None:
            raise CheckpointError(
                f"{folder}: {name} is {heads}, which tensor_parallel ({size}) does not divide; "
                "set tensor_parallel to a divisor of it"
            )
