"""Reads keys of a checkpoint's config.json and checks their JSON types; no torch."""

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
D = TypeVar("D")

KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    list: "a list",
    dict: "an object",
}


def read_key(config: Mapping[str, Any], key: str, kind: type[T], default: D) -> T | D:
    """Return a key's value, or `default` if the key is absent or null, which transformers writes for unset keys.

    Raises:
        ValueError: the value does not have the type `kind`; the message names the key and the value.
    """
    value: Any = config.get(key)
    if value is None:
        return default
    if kind is bool and value in (False, True):  # 0 and 1 compare equal to these
        return kind(value)  # type: ignore[call-arg]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number and abs(value) <= sys.float_info.max:
        return kind(value)  # type: ignore[call-arg]
    if kind is int and is_number and not isinstance(value, float) and abs(value) < 2**31:
        return value
    if kind in (str, list, dict) and isinstance(value, kind):
        return value
    raise ValueError(f"config.json: {key} is {str(value)[:80]!r}, must be {KINDS[kind]}")
