"""The settings that `run.deterministic` fixes: all that could make two runs differ in one bit.

Not covered: reward functions that return something else the second time, another processor or torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

from python_backend.config.sections import UNMEASURED

AnySection = TypeVar("AnySection", bound=BaseModel)

MODELS = ("reward", "critic", "reference")
FIXED: dict[str, Any] = {
    "actor.max_staleness": 0,  # otherwise the server's speed decides which version scores a row
    "actor.max_failed_fraction": 0.0,  # a row that is left out changes what is learnt
    "actor.one_step_off_policy": False,  # a run that resumes has no rollout of the policy before
    "trainer.publish.every": 1,  # without it there is no staleness 0
    **{
        f"{role}.{name}": value
        for role in MODELS
        for name, value in {
            "micro_batch_rows": 1,  # a row's last bits depend on the rows beside it
            "compile": False,  # compiled for the shapes that happen to come first
        }.items()
    },
    **{f"{room}.device": "cpu" for room in (*MODELS, "trainer", "actor")},
}


def with_fixed_values(config: AnySection) -> AnySection:
    """The configuration with every value in `FIXED`, and with a number wherever `auto` would measure the machine.

    Raises:
        ValueError: another value was given for one of them; the message names key, value and the way out.
    """
    for key, value in FIXED.items():
        config = _put(config, key.split("."), value, key)
    for role in MODELS:
        section = getattr(config, role)
        settled = {name: section.settled(name) for name in UNMEASURED}
        config = config.model_copy(update={role: section.model_copy(update=settled)})
    return config


def _put(section: AnySection, names: list[str], value: Any, key: str) -> AnySection:
    name, *rest = names
    old = getattr(section, name)
    if rest:
        return section.model_copy(update={name: _put(old, rest, value, key)})
    if name in section.model_fields_set and old != value:
        raise ValueError(
            f"{key}: {old!r}, but run.deterministic: true needs {value!r}; leave {key} out, or run.deterministic"
        )
    return section.model_copy(update={name: value})
