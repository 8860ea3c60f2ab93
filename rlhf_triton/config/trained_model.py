"""Settings that policy and critic in training share, and marks for settings that may change when a run resumes."""

from enum import Enum
from typing import Annotated, Any

from rlhf_triton.config.fields import (
    AUTO_PRECISION,
    Count,
    CountOrZero,
    Device,
    LoraTargets,
    Patterns,
    Precision,
    Section,
)


class Resume(Enum):
    """Mark of a setting: what changes if a run resumes with another value.

    A setting without a mark affects the weights that training produces.
    """

    FIXED = "refused: checkpoints cannot be loaded with another value"
    ROUNDING = "rounding only"
    FREE = "nothing"


class TrainedSection(Section):
    """A model in training: precision, devices and memory, and which weights are trained."""

    token_budget: Annotated[Count, Resume.ROUNDING] = 4096
    """Maximum tokens in one forward pass, padding included; does not change the result. 1024 to 2048 is faster on
    CPUs."""
    device: Annotated[Device, Resume.ROUNDING] = "cpu"
    """Device on which the model is trained; further ranks use the next GPUs."""
    precision: Precision = AUTO_PRECISION
    """Compute type of forward passes (autocast) and of frozen matrices; `auto`: bfloat16 on a GPU, float32 on a CPU.
    Trained weights and log-probs stay in float32."""
    gradient_checkpointing: Annotated[bool, Resume.ROUNDING] = False
    """Recompute activations in the backward pass: less memory, same result."""
    lora_rank: Annotated[CountOrZero, Resume.FIXED] = 0
    """Train only LoRA adapters of this rank, and a critic's value head; 0: train all weights."""
    lora_alpha: Annotated[Count, Resume.FIXED] = 16
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    lora_targets: Annotated[LoraTargets, Resume.FIXED] = "all-linear"
    """Linear layers with adapters: all except the output layer, or a list of the last parts of their names, such as
    [q_proj, v_proj]."""
    freeze: Annotated[Patterns, Resume.FIXED] = ()
    """Regular expressions; parameters in whose name one is found are not trained (for a critic, names as in
    `weights/critic/0`): [embed_tokens], or ['layers\\.[0-9]\\.'] for the first ten layers."""


def decisive_settings(key: str, section: Section) -> dict[str, Any]:
    """Return the settings of the section `key` that are not `Resume.FREE`, by full key, as JSON values."""
    values = section.model_dump(mode="json")
    settings: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        if Resume.FREE in field.metadata:
            continue
        if isinstance(inner, Section):
            settings |= decisive_settings(f"{key}.{name}", inner)
        else:
            settings[f"{key}.{name}"] = values[name]
    return settings


def resume_marks(key: str, section: type[Section]) -> dict[str, Resume]:
    """Return the marks of the fields of the section `key`, by full key."""
    return {
        f"{key}.{name}": mark
        for name, field in section.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Resume)
    }
