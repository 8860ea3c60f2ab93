"""pydantic's validation errors as sentences that name the key, the value and the nearest valid key."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rlhf_triton.config.keys import keys_of
from rlhf_triton.config.other_names import GENERIC, closest, has_keys, hint_at, hint_at_choice, hint_at_value, hint_near
from rlhf_triton.config.rewards import RewardTerm
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import reason_of_item

_TYPE = re.compile(r"[A-Z]\w*|.*[\[-].*|int|float|str|bool")  # matches type names in a location, but no key


def problems_of(errors: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield location and description of pydantic's errors; a union's errors, one per type, become one."""
    by_location: dict[str, list[Any]] = {}
    for item in errors:
        by_location.setdefault(_location(item), []).append(item)
    for location, items in by_location.items():
        if any(other.startswith(f"{location}.") for other in by_location):  # reported there, more precisely
            continue
        if len(items) == 1:
            yield from _describe(items[0], location)
        else:
            wanted = " or ".join(map(_expected_type, items))
            yield location, f"{location} must be {wanted}{_boolean_hint(items[0])} (got {items[0]['input']!r})"


def _location(item: Any) -> str:
    """Return the key of a pydantic error, without the names of union members that pydantic adds."""
    *parents, last = [part for part in item["loc"] if part != "[key]"] or [""]
    is_name = item["type"] in ("extra_forbidden", "missing")
    parts = [part for part in parents if not _TYPE.fullmatch(str(part))]
    return ".".join(map(str, [*parts, *([last] if is_name or not _TYPE.fullmatch(str(last)) else [])]))


def _expected_type(item: Any) -> str:
    if item["type"] == "model_type":
        return f"a section with keys of {', '.join(_keys_in(_location(item), keys_of(RunConfig, '')))}"
    if item["type"] in ("tuple_type", "list_type"):
        return "a list"
    return reason_of_item(item).removeprefix("must be ")


def _boolean_hint(item: Any) -> str:
    is_text = isinstance(item["input"], bool) and item["type"] in ("string_type", "literal_error")
    return "; YAML reads yes, no, on and off as true and false, so put such a text in quotes" if is_text else ""


def _describe(item: Any, location: str) -> Iterator[tuple[str, str]]:
    """Yield location and description of a pydantic error; of a section of another trainer, one for each key."""
    valid = [*keys_of(RunConfig, ""), *_term_keys(item["loc"])]
    if item["type"] in ("extra_forbidden", "path_type"):
        paths = [*_unknown_paths(location, item["input"], valid)]
        if item["type"] == "extra_forbidden" or paths != [location]:
            yield from ((path, _unknown(path, valid)) for path in paths)
            return
    yield location, _invalid(item, location, valid)


def _unknown_paths(path: str, value: Any, valid: list[str]) -> Iterator[str]:
    if isinstance(value, dict) and value and has_keys(path, valid):
        for name, inner in value.items():
            yield from _unknown_paths(f"{path}.{name}", inner, valid)
    else:
        yield path


def _invalid(item: Any, location: str, valid: list[str]) -> str:
    if item["type"] == "model_type":
        hint = hint_at_value(location, item["input"], _keys_in(location, valid))
        return f"{location} is a section, not a value (got {item['input']!r}); {hint}"
    if item["type"] == "dict_type" and location == "rewards":
        return (
            f"rewards names its terms (got {item['input']!r}): rewards: {{my_reward: {{function: FILE.py:NAME}}}}; a "
            "model is reward.model"
        )
    if item["type"] == "missing":
        return f"{location} is missing; set it"
    if item["type"] in ("tuple_type", "list_type"):
        return f"{location} must be a list (got {item['input']!r})"
    reason = reason_of_item(item) + _boolean_hint(item)
    if item["type"] == "literal_error":
        reason += hint_at_choice(item["input"], re.findall(r"'([^']+)'", item["ctx"]["expected"]))
    return f"{location}: {reason} (got {item['input']!r})" if location else reason


def _unknown(location: str, valid: list[str]) -> str:
    if location in valid:  # as a key of its own
        names = location.split(".")
        nested = ": {".join(names) + ": …" + "}" * (len(names) - 1)
        return f"{location} is a path of keys, for the command line; in a file, write {nested}"
    path = re.sub(r"\.\d+", "", location)
    section, _, name = path.rpartition(".")
    keys = _keys_in(section, valid)
    hint = hint_at(path, valid)
    if hint is None and name not in GENERIC:
        near = closest(name, keys)
        ours = keys[near] if near else _elsewhere(path, valid)
        hint = f"did you mean {ours}?" if ours else hint_near(path)
    return f"unknown key {location}; {hint or 'known: ' + ', '.join(keys.values())}"


def _elsewhere(path: str, valid: list[str]) -> str | None:
    """Return our key of this name in another section; None if there is none."""
    section, _, name = path.rpartition(".")
    root = section.partition(".")[0] or "actor"
    same = [key for key in valid if f".{key}".endswith(f".{name}")]
    inside = [key for key in same if key.startswith(section)]
    if not inside and "_" not in name and len(name) < 6:  # such as `coef` or `every`, which says little
        return None
    return min(inside or same, key=lambda key: not key.startswith(f"{root}."), default=None)


def _term_keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the valid keys of the reward term at `location`, [] elsewhere: `keys_of` does not know terms' names."""
    if len(location) < 2 or location[0] != "rewards":
        return []
    return [f"rewards.{location[1]}.{key}" for key in RewardTerm.model_fields]


def _keys_in(section: str, valid: list[str]) -> dict[str, str]:
    """Return the names and full keys of a section's keys and subsections; list entries have no number in `valid`."""
    prefix = re.sub(r"\.\d+\.", ".", f"{section}.") if section else ""
    keys = [key for key in valid if key.startswith(prefix)]
    return {key.removeprefix(prefix): key for key in keys if "." not in key.removeprefix(prefix)}
