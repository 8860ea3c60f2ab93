"""Requests that cost the gateway much: bodies, heads and conversations that are large, deep, or of many items."""

import json

from bad_requests import METADATA_TEXTS
from hypothesis import strategies as st

GATEWAY_KEY = "sesame"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {GATEWAY_KEY}"}
SHORT_TEXTS = ("a", "word ", '"\\', "\u00e4\U0001f600")
ROWS = (1, 2, 1500, 4096, 4097, 200_000)
INVALID = ({}, [], 5, {"text": 1}, {"tokens": ["a"] * 100}, {"messages": [{}] * 100})
ITEMS = ({}, [], "", "\u0101", {"a": 1}, 1000, 1.5)
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "A list"}
PLACES = (  # where many items go; `**`: a quarter of them, as fields
    b'{"inputs": [{"text": "a", "metadata": {"a": %s}}]}',
    b'{"inputs": [{"tokens": %s}]}',
    b'{"inputs": %s}',
    b'{"inputs": [{"text": "a"}], **}',
    b'{"inputs": [{"text": "a", "metadata": {**}}]}',
)


def _head(path, length, headers):
    lines = [f"POST {path} HTTP/1.1", "Host: fuzz", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def _post(path, body, headers=HEADERS):
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return _head(path, len(content), headers) + content


def _repeated(item, number):
    """Return the JSON of a list; `json` would hold the interpreter's lock for seconds, which the good client needs."""
    return b"[%s]" % b", ".join([json.dumps(item, ensure_ascii=False).encode()] * number)


def _many_items(item, number, place):
    if b"**" not in place:
        return _post("/v1/rewards", place % _repeated(item, number))
    value = json.dumps(item, ensure_ascii=False).encode()
    fields = b", ".join(b'"%d": %s' % (i, value) for i in range(number // 4))
    return _post("/v1/rewards", place.replace(b"**", fields))


def _long(*lengths):
    return st.builds(lambda text, length: text * length, st.sampled_from(SHORT_TEXTS), st.sampled_from(lengths))


def _headers(sizes, headers_of):
    return st.sampled_from(list(sizes)).map(lambda size: _head("/get_reward", 0, headers_of(size)))


def _conversation(path, **fields):
    return _post(f"/sessions/fuzz{path}", {"model": "m", "max_tokens": 5, "messages": [USER], **fields})


def _unread(length):
    """Return a conversation in which what no template renders is long."""
    function = {"name": "f" * length, "arguments": "{}"}
    asked = {"role": "assistant", "tool_calls": [{"id": "i" * length, "type": "function", "function": function}]}
    answered = {"role": "tool", "tool_call_id": "i" * length, "content": "1", "name": "n" * length}
    return _conversation(CHAT, messages=[USER, asked, answered])


def _deep(depth):
    """Return a conversation with a tool whose schema is nested."""
    schema = b'{"a":' * depth + b"1" + b"}" * depth
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % schema
    return _post(f"/sessions/fuzz{CHAT}", b'{"model": "m", "messages": [], "tools": [%s]}' % tool)


ATTACKS = {
    "product": st.builds(
        lambda text, rows: _post("/score", {"text_1": text, "text_2": ["b"] * rows}),
        _long(1, 100, 1_000_000),
        st.sampled_from(ROWS),
    ),
    "long texts": st.builds(
        lambda text, rows: _post("/get_reward", {"query": [text] * rows}),
        _long(10_000, 300_000, 3_000_000),
        st.sampled_from((1, 5)),
    ),
    "invalid inputs": st.builds(
        lambda item, number: _post("/v1/rewards", b'{"inputs": %s}' % _repeated(item, number)),
        st.sampled_from(INVALID),
        st.sampled_from(ROWS),
    ),
    "items": st.builds(
        _many_items, st.sampled_from(ITEMS), st.sampled_from((1000, 400_000, 2_000_000)), st.sampled_from(PLACES)
    ),
    "metadata": st.sampled_from(METADATA_TEXTS).map(
        lambda text: _post("/v1/rewards", b'{"inputs": [{"text": "a"}, {"text": "a", "metadata": %s}]}' % text)
    ),
    "long head": _headers((60_000, 1_000_000, 50_000_000), lambda size: {"X": "a" * size}),
    "many headers": _headers((1000, 100_000), lambda size: {f"X{i}": "a" for i in range(size)}),
    "no key": st.builds(
        lambda path, size: _post(path, b" " * size, {}),
        st.sampled_from(("/get_reward", "/healthz")),
        st.sampled_from((10, 100_000, 17_000_000)),
    ),
    "long conversation": st.builds(
        lambda path, text: _conversation(path, messages=[{"role": "user", "content": text}]),
        st.sampled_from((CHAT, "/v1/messages")),
        _long(100_000, 300_000),
    ),
    "many messages": st.sampled_from((1000, 200_000)).map(lambda count: _conversation(CHAT, messages=[USER] * count)),
    "unread": st.sampled_from((201, 1_000_000, 4_000_000)).map(_unread),
    "deep": st.sampled_from((100, 1000, 100_000)).map(_deep),
}
"""What is sent over one connection, by kind."""
LEFT_OPEN = {
    "nothing": b"",
    "half a head": b"GET /hea",
    "part of a body": _head("/healthz", 10, {}) + b"{",
    "a head alone": _head("/get_reward", 10, HEADERS),
    "a conversation that is being sampled": _conversation(CHAT, user="x" * 1_000_000),
}
"""What is sent over connections that are left open."""
