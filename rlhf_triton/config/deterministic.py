"""Settings that `run.deterministic` fixes, so that two runs are bit-identical.

Results can still differ with nondeterministic reward functions, on another processor, or with another torch version.
"""

from typing import Any, TypeVar

from pydantic import BaseModel

AnySection = TypeVar("AnySection", bound=BaseModel)

MODELS = ("reward", "critic", "reference")
REQUIRED_VALUES: dict[str, Any] = {
    "actor.max_staleness": 0,  # otherwise timing decides which critic version scores a row
    "actor.rewards.max_failed_fraction": 0.0,  # a masked row changes the update
    "actor.max_off_policy_steps": 0,  # timing decides which tokens an older policy samples
    "trainer.publish.every": 1,  # staleness 0 requires it
    **{f"{section}.device": "cpu" for section in (*MODELS, "trainer", "actor.policy")},
}


def with_fixed_values(config: AnySection) -> AnySection:
    """Return the configuration with the values in `REQUIRED_VALUES` and machine-independent values for `threads`.

    Sets `token_budget` to 1, so that each row gets its own forward pass.

    Raises:
        ValueError: a key in `REQUIRED_VALUES` was set to another value; the message names key, value and remedy.
    """
    for key, value in REQUIRED_VALUES.items():
        config = _with_setting(config, key.split("."), value, key)
    for role in MODELS:
        section = getattr(config, role)
        fixed = {
            "threads": section.threads or 1,
            "token_budget": 1,  # a row's last bits depend on the other rows of its forward pass
        }
        config = config.model_copy(update={role: section.model_copy(update=fixed)})
    return config


def _with_setting(section: AnySection, names: list[str], value: Any, key: str) -> AnySection:
    name, *rest = names
    old = getattr(section, name)
    if rest:
        return section.model_copy(update={name: _with_setting(old, rest, value, key)})
    if name in section.model_fields_set and old != value:
        raise ValueError(
            f"{key}: {old!r}, but run.deterministic: true needs {value!r}; remove {key} or run.deterministic"
        )
    return section.model_copy(update={name: value})
