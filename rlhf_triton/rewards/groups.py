"""Groups the rows that a groupwise reward function receives in one call: the responses to one prompt."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_triton.rewards.replies import reply_start
from rlhf_triton.rewards.sample import PROMPT_KEY
from rlhf_triton.wire.contract import MESSAGES, METADATA, ContractError

GROUP_KEY = "group"  # metadata key, reserved if a reward function is groupwise
GroupKey = tuple[str, str | int]


def group_key(metadata: Mapping[str, Any]) -> GroupKey:
    """Return the key that the rows of one group share: the group's id or, without an id, the prompt.

    Raises ContractError if the row has neither, or the id is not a string or an integer.
    """
    group = metadata.get(GROUP_KEY)
    if isinstance(group, (str, int)) and not isinstance(group, bool):
        return GROUP_KEY, group
    if group is not None:
        raise ContractError(f"{METADATA}.{GROUP_KEY}: {group!r:.80}, must be a string or an integer")
    messages = metadata.get(MESSAGES)  # may end with a reply, if it is not a single text (gateway)
    chat = messages[: reply_start(messages)] or None if isinstance(messages, list) else None
    prompt = metadata.get(PROMPT_KEY, chat)
    if prompt is None:
        raise ContractError(
            f"{METADATA} has neither {GROUP_KEY} nor {PROMPT_KEY}, but a groupwise function groups a request's rows "
            "by one of them; send one"
        )
    try:
        return PROMPT_KEY, json.dumps(prompt, sort_keys=True)
    except RecursionError as error:
        raise ContractError(f"{METADATA}.{PROMPT_KEY}: nested too deeply for JSON; send {GROUP_KEY} instead") from error


def grouped(rows: Iterable[Mapping[str, Any]]) -> tuple[list[list[int]], dict[int, str]]:
    """Return the row indices of each group, given all rows' metadata, and the error of each row without a group."""
    groups: dict[GroupKey, list[int]] = {}
    errors = {}
    for i, metadata in enumerate(rows):
        try:
            groups.setdefault(group_key(metadata), []).append(i)
        except ContractError as error:
            errors[i] = str(error)
    return [*groups.values()], errors
