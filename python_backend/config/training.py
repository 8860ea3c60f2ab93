"""Checks of the settings that the policy and the critic in training share."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from python_backend.config.sections import TrainerSection


class Trained(Protocol):
    """Settings of a model in training: `actor.policy` or `trainer`."""

    @property
    def attention(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...


def check_training(section: str, trained: Trained, optimizer: str, kind: str) -> None:
    """Raise ValueError if a setting needs another device or precision.

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
    if kind == "adamw_8bit" and trained.device == "cpu":
        raise ValueError(f"{optimizer}.kind: adamw_8bit needs CUDA, {on_cpu}; set it to adamw")


def check_trainer(trainer: TrainerSection) -> None:
    """Reject settings of the critic that need LoRA, or that several ranks do not support."""
    if trainer.ranks > 1 and trainer.optimizer.kind != "adamw":
        raise ValueError(
            f"trainer.optimizer.kind: {trainer.optimizer.kind} is not supported with trainer.ranks above 1; set adamw"
        )
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
