"""Dotted keys, of nested dictionaries and of sections."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel


def value_at(data: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dictionaries; None if there is none."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def with_value(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return nested dictionaries with the value of a dotted key. Raises ValueError if a part of it is not a section."""
    first, _, rest = key.partition(".")
    section = data.get(first)
    if rest and not isinstance(section, dict | None):
        raise ValueError(f"{first!r} is a value, not a section")
    return {**data, first: with_value(section or {}, rest, value) if rest else value}


def keys_of(section: type[BaseModel], prefix: str) -> list[str]:
    """Return the names of a section's keys and subsections, recursively, each with `prefix`."""
    keys = []
    for attribute, info in section.model_fields.items():
        name = info.alias or attribute
        keys.append(prefix + name)
        for part in (info.annotation, *get_args(info.annotation)):  # union members, as in `Section | None`
            if isinstance(part, type) and issubclass(part, BaseModel):
                keys += keys_of(part, f"{prefix}{name}.")
    return keys
