"""Checks of the settings that the policy and the critic in training share."""

import importlib.util
from typing import TypeAlias

from rlhf_triton.config.actor import PolicySection
from rlhf_triton.config.sections import TrainerSection

Trained: TypeAlias = PolicySection | TrainerSection
"""Settings of a model in training."""


def check_training(section: str, trained: Trained, optimizer: str, kind: str, *, ranks: int) -> None:
    """Raise ValueError if a setting needs another device or precision, or is not supported on several ranks.

    Args:
        section: key of the section `trained`.
        optimizer: key of the optimizer's section.
        kind: the optimizer's kind.
    """
    on_cpu = f"and {section}.device is {trained.device}"
    if trained.attention == "flash_attention_2":
        if trained.device == "cpu":
            raise ValueError(f"{section}.attention: flash_attention_2 needs CUDA, {on_cpu}; set it to sdpa")
        if trained.precision != "bfloat16":
            raise ValueError(
                f"{section}.attention: flash_attention_2 needs {section}.precision: bfloat16, not {trained.precision}"
            )
    if kind != "adamw" and ranks > 1:
        raise ValueError(
            f"{optimizer}.kind: {kind} is not supported with {optimizer.partition('.')[0]}.ranks above 1; set adamw"
        )
    if kind == "adamw_8bit" and trained.device == "cpu":
        raise ValueError(f"{optimizer}.kind: adamw_8bit needs CUDA, {on_cpu}; set it to adamw")


def check_trainer(trainer: TrainerSection) -> None:
    """Reject settings of the critic that need LoRA."""
    if trainer.publish.format == "adapter" and not trainer.lora_rank:
        raise ValueError("trainer.publish.format: adapter needs trainer.lora_rank above 0; set it, or set merged")
    if not trainer.lora_rank and trainer.lora_targets != "all-linear":
        raise ValueError(
            f"trainer.lora_targets ({trainer.lora_targets}) need trainer.lora_rank above 0; set it, or remove them"
        )


def missing_packages(section: str, trained: Trained, optimizer: str, kind: str) -> dict[str, str | None]:
    """Return the problem with each setting that needs a package which is not installed, by key; the others are None."""
    return {
        f"{section}.attention": _lacking("flash_attn", "flash-attn", "sdpa", trained.attention == "flash_attention_2"),
        f"{optimizer}.kind": _lacking("bitsandbytes", "bitsandbytes", "adamw", kind == "adamw_8bit"),
    }


def _lacking(module: str, package: str, instead: str, is_needed: bool) -> str | None:
    if not is_needed or importlib.util.find_spec(module) is not None:
        return None
    return f"needs the package {package}, which is not installed; install it, or set {instead}"
