"""Where a chat's last reply begins, and the forms in which clients send it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_triton.rewards.sample import MESSAGES_KEY, REPLY_KEY, RESPONSE_KEY


def reply_start(messages: list[Any]) -> int:
    """Return the index of the first message of a chat's last reply; the number of messages if there is no reply."""
    end = len(messages)
    while end and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") in ("assistant", "tool"):
        end -= 1
    return end


def split_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any] | None]:
    """Return a chat's messages before its reply, and the reply's message or None.

    A client sends the reply as the row's text (an empty reply as `response` in the metadata) and other keys of its
    message, such as tool calls, in `reply_messages`. Alternatively, it sends the reply as the last of the messages,
    with no text or the same one, and without `reply_messages`.
    """
    response = metadata.get(RESPONSE_KEY)
    has_text = bool(text) or isinstance(response, str)
    sent = metadata.get(REPLY_KEY)
    last = messages[-1] if messages and _has_role(messages[-1], "assistant") else None
    content = last and (last.get("content") or "")
    is_apart = has_text and isinstance(sent, list)  # the last message may have the same content
    if last is not None and not is_apart and (text == content or (not text and response in (None, content))):
        return messages[:-1], last
    if not has_text:
        return messages, None
    text = text or str(response)
    replies = [message for message in sent if _has_role(message, "assistant")] if isinstance(sent, list) else []
    said = replies[-1] if replies else {}
    return messages, said if said and (said.get("content") or "") == text else {"role": "assistant", "content": text}


def _has_role(message: Any, role: str) -> bool:
    return isinstance(message, dict) and message.get("role") == role


def with_reply(messages: list[Any], text: str, metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert a chat's text and metadata to the form that the actor sends, however the client sent the reply.

    The text is the reply's content, also under `response`; `messages` are the messages before it. If the reply's
    message has more than content, or follows one of the assistant, it is in `reply_messages`.
    """
    before, reply = split_reply(messages, text, metadata)
    if reply is None:
        return text, {**metadata, MESSAGES_KEY: before}
    content = str(reply.get("content") or "")
    is_special = reply.keys() - {"role", "content"} or (before and _has_role(before[-1], "assistant"))
    whole = {REPLY_KEY: [reply]} if is_special and REPLY_KEY not in metadata else {}
    return content, {**metadata, MESSAGES_KEY: before, RESPONSE_KEY: content, **whole}


def last_reply(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the policy's last message; there must be one."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")
