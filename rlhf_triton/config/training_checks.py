"""Checks of the settings that policy and critic in training share."""

import importlib.util

from rlhf_triton.config.optimizer import OptimizerSection
from rlhf_triton.config.trained_model import TrainedSection


def check_training(
    section: str, trained: TrainedSection, optimizer: OptimizerSection, *, ranks: int, total_steps: int
) -> None:
    """Raise ValueError if a setting contradicts others, or is not supported on several ranks.

    Args:
        section: key of the section `trained`.
        total_steps: length of the learning-rate schedule.
    """
    key = f"{section.partition('.')[0]}.optimizer"
    kind = optimizer.kind
    lr = optimizer.lr
    min_lr = optimizer.min_lr
    warmup = optimizer.warmup_steps
    if min_lr is not None and min_lr > lr:
        raise ValueError(f"{key}.min_lr ({min_lr:g}) is above {key}.lr ({lr:g}); lower it, or remove it")
    if warmup > total_steps:
        raise ValueError(f"{key}.warmup_steps ({warmup}) is above {optimizer.length} ({total_steps}); lower it")
    if kind != "adamw" and ranks > 1:
        raise ValueError(f"{key}.kind: {kind} is not supported with {key.partition('.')[0]}.ranks above 1; set adamw")
    if kind == "adamw_8bit" and trained.device == "cpu":
        raise ValueError(f"{key}.kind: adamw_8bit needs CUDA, and {section}.device is cpu; set it to adamw")
    if not trained.lora_rank and trained.lora_targets != "all-linear":
        targets = ", ".join(trained.lora_targets)
        raise ValueError(
            f"{section}.lora_targets ([{targets}]) needs {section}.lora_rank above 0; set it, or remove "
            f"{section}.lora_targets"
        )


def missing_package(optimizer: OptimizerSection) -> str | None:
    """Return an error message if `kind` needs a package that is not installed; otherwise None."""
    if optimizer.kind != "adamw_8bit" or importlib.util.find_spec("bitsandbytes") is not None:
        return None
    return "adamw_8bit needs the package bitsandbytes, which is not installed; install it, or set adamw"
