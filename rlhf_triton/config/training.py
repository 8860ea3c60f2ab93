"""Checks of the settings that the policy and the critic in training share."""

import importlib.util

from rlhf_triton.config.optimizer import CriticOptimizerSection, OptimizerSection
from rlhf_triton.config.trained import TrainedSection


def check_training(
    section: str, trained: TrainedSection, optimizer: OptimizerSection, *, ranks: int, total_steps: int
) -> None:
    """Raise ValueError if a setting contradicts others, or is not supported on several ranks.

    Args:
        section: key of the section `trained`.
        total_steps: length of the learning-rate schedule.
    """
    key, kind = f"{section.partition('.')[0]}.optimizer", optimizer.kind
    lr = optimizer.lr
    min_lr = optimizer.min_lr
    warmup = optimizer.warmup_steps
    if min_lr is not None and min_lr > lr:
        raise ValueError(f"{key}.min_lr ({min_lr:g}) is above {key}.lr ({lr:g}); lower it, or remove it")
    if warmup > total_steps:
        what = f"{key}.max_steps" if isinstance(optimizer, CriticOptimizerSection) else "those of the whole run"
        raise ValueError(f"{key}.warmup_steps ({warmup}) is more than {what} ({total_steps})")
    if kind != "adamw" and ranks > 1:
        raise ValueError(f"{key}.kind: {kind} is not supported with {key.partition('.')[0]}.ranks above 1; set adamw")
    if kind == "adamw_8bit" and trained.device == "cpu":
        raise ValueError(f"{key}.kind: adamw_8bit needs CUDA, and {section}.device is cpu; set it to adamw")
    if not trained.lora_rank and trained.lora_targets != "all-linear":
        raise ValueError(
            f"{section}.lora_targets ({trained.lora_targets}) need {section}.lora_rank above 0; set it, or remove them"
        )


def missing_package(optimizer: OptimizerSection) -> str | None:
    """Return the problem with `kind` if it needs a package which is not installed; otherwise None."""
    if optimizer.kind != "adamw_8bit" or importlib.util.find_spec("bitsandbytes") is not None:
        return None
    return "needs the package bitsandbytes, which is not installed; install it, or set adamw"
