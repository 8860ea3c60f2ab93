"""Metadata that the server receives with a row: the prompt's other columns and, where needed, texts and group."""

from __future__ import annotations

from typing import Any

from rlhf_triton.actor.scoring.row_texts import RowText
from rlhf_triton.client.served import ServedModel
from rlhf_triton.rewards.groups import GROUP_KEY
from rlhf_triton.rewards.replies import last_reply
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY
from rlhf_triton.wire.chats import TEMPLATE_COLUMNS


def row_metadata(reward: ServedModel, text: RowText) -> dict[str, Any]:
    """Return a row's metadata: columns and texts for reward functions, or the chat or response for a reward model.

    A reward model refuses a row with a reply that is too long for it; it would truncate a mere text. If a function is
    groupwise, a request has a single group.
    """
    prompt, response, reply = text
    if not reward.reads_texts:
        if MESSAGES_KEY not in prompt.metadata:
            return {RESPONSE_KEY: response}
        empty = {} if response else {RESPONSE_KEY: ""}  # an empty sentence alone would not be a reply
        last_message = {REPLY_KEY: [reply[last_reply(reply)]]} if reply else {}  # it may have tool calls
        options = {name: prompt.metadata[name] for name in TEMPLATE_COLUMNS if prompt.metadata.get(name)}
        return {MESSAGES_KEY: prompt.metadata[MESSAGES_KEY], **options, **empty, **last_message}
    prompt_text = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
    texts = {**prompt_text, RESPONSE_KEY: response, **({REPLY_KEY: [*reply]} if reply else {})}
    return {**prompt.metadata, **texts, **({GROUP_KEY: 0} if reward.groupwise else {})}
