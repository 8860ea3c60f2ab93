"""Checks of the settings that the policy and the critic in training share."""

import importlib.util

from rlhf_triton.config.optimizer import OptimizerSection, check_schedule
from rlhf_triton.config.trained import TrainedSection


def check_training(
    section: str, trained: TrainedSection, optimizer: OptimizerSection, *, ranks: int, total_steps: int = 0
) -> None:
    """Raise ValueError if a setting contradicts others, or is not supported on several ranks.

    Args:
        section: key of the section `trained`.
        total_steps: length of the learning-rate schedule if `max_steps` is None.
    """
    key, kind = _optimizer_of(section), optimizer.kind
    check_schedule(key, optimizer, total_steps=total_steps)
    on_cpu = f"and {section}.device is {trained.device}"
    if trained.attention == "flash_attention_2":
        if trained.device == "cpu":
            raise ValueError(f"{section}.attention: flash_attention_2 needs CUDA, {on_cpu}; set it to sdpa")
        if trained.precision != "bfloat16":
            raise ValueError(
                f"{section}.attention: flash_attention_2 needs {section}.precision: bfloat16, not {trained.precision}"
            )
    if kind != "adamw" and ranks > 1:
        raise ValueError(f"{key}.kind: {kind} is not supported with {key.partition('.')[0]}.ranks above 1; set adamw")
    if kind == "adamw_8bit" and trained.device == "cpu":
        raise ValueError(f"{key}.kind: adamw_8bit needs CUDA, {on_cpu}; set it to adamw")
    if not trained.lora_rank and trained.lora_targets != "all-linear":
        raise ValueError(
            f"{section}.lora_targets ({trained.lora_targets}) need {section}.lora_rank above 0; set it, or remove them"
        )


def missing_packages(section: str, trained: TrainedSection, optimizer: OptimizerSection) -> dict[str, str | None]:
    """Return the problem with each setting that needs a package which is not installed, by key; the others are None."""
    is_flash, has_8bit = trained.attention == "flash_attention_2", optimizer.kind == "adamw_8bit"
    return {
        f"{section}.attention": _lacking("flash_attn", "flash-attn", "sdpa", is_flash),
        f"{_optimizer_of(section)}.kind": _lacking("bitsandbytes", "bitsandbytes", "adamw", has_8bit),
    }


def _optimizer_of(section: str) -> str:
    """Return the key of the optimizer's section."""
    return f"{section.partition('.')[0]}.optimizer"


def _lacking(module: str, package: str, instead: str, is_needed: bool) -> str | None:
    if not is_needed or importlib.util.find_spec(module) is not None:
        return None
    return f"needs the package {package}, which is not installed; install it, or set {instead}"
