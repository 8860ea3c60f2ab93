"""Renders conversations with a chat template: one place for prompts, requests, pairs, and the checks before a run."""

import inspect
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from python_backend.wire.messages import BadMessages, with_arguments, without_nulls

TOOLS, TEMPLATE_VARIABLES = TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # TRL's names
MARK = "qzjx"  # in place of a content, to see whether a template writes it
Rendered = Callable[..., str]
_checked: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""For each tokenizer, the kinds of conversation that its template writes completely."""
MOST_KINDS = 10_000
PROBE, NEXT_PROBE = "Yes.", "Why?"  # contents of messages that show what a chat template writes around them
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TO_PARTS = (  # before a chat template; without an end that would remove white space at its start
    "{%% set of = namespace(parts=[]) %%}{%% for m in messages %%}"
    "{%% if m.content is string and m.role not in %s %%}"
    "{%% set m = dict(m, content=[{'type': 'text', 'text': m.content}]) %%}{%% endif %%}"
    "{%% set of.parts = of.parts + [m] %%}{%% endfor %%}{%% set messages = of.parts %%}{{ '' }}"
)
ROLES = ("system", "user", "assistant", "tool")  # that a template may write without naming them


def template_options(tokenizer: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the chat template in a row's columns `tools` and `chat_template_kwargs`, as in TRL.

    Raises:
        BadMessages: they are no JSON schemas, or not variables of a template; the message begins with the column.
    """
    tools, variables = (_parsed(columns.get(name)) for name in TEMPLATE_COLUMNS)
    tools = [*map(_parsed, tools)] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadMessages(
            f"{TOOLS}: must be a list of JSON schemas, or its JSON text, which the chat template receives, got "
            f"{columns[TOOLS]!r:.80}; rename the column if it is something else"
        )
    if variables and not isinstance(variables, dict):
        raise BadMessages(
            f"{TEMPLATE_VARIABLES}: must be an object with variables of the chat template, got "
            f"{columns[TEMPLATE_VARIABLES]!r:.80}"
        )
    variables = without_nulls(variables or {})
    own = inspect.signature(tokenizer.apply_chat_template).parameters if variables else {}
    reserved = {name for name in own if own[name].kind is not inspect.Parameter.VAR_KEYWORD} - {"documents"}
    taken = [name for name in variables if name in reserved | {"messages"}]
    if taken:
        raise BadMessages(f"{TEMPLATE_VARIABLES}: {taken[0]!r} is no variable of a chat template; remove it")
    return {**variables, TOOLS: without_nulls(tools)} if tools else variables


def _parsed(value: Any) -> Any:
    """Return a value, or what its JSON text holds."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    owner: str,
    generation_prompt: bool = False,
) -> str:
    """Return a conversation as text, rendered with the tokenizer's chat template.

    Args:
        options: further arguments, from `template_options`.
        owner: role of the model that the tokenizer belongs to, for the messages.

    Raises:
        BadMessages: the template leaves out a message or the tools; the message begins with the place.
        Exception: whatever else the template raises, which is a program.
    """

    def applied(shown: Sequence[Mapping[str, Any]], **options: Any) -> str:
        found = tokenizer.apply_chat_template(
            [*shown], tokenize=False, add_generation_prompt=generation_prompt, **options
        )
        return str(found)

    def rendered(shown: Sequence[Mapping[str, Any]], **options: Any) -> str:
        try:
            return applied(shown, **options)
        except Exception:  # DeepSeek's templates take the arguments of tool calls as JSON texts only
            written = [*map(_with_json_arguments, shown)]
            if written == [*shown]:
                raise
            return applied(written, **options)

    text = rendered(messages, **options)
    text.encode()  # raises on lone surrogates: JSON may contain them, tokenizers reject them
    kinds = _checked.setdefault(tokenizer, set())
    kind = _kind(messages, options, tokenizer.chat_template, generation_prompt)
    if kind not in kinds:
        _check_roles(messages, str(tokenizer.chat_template), owner)
        _check_tools(rendered, messages, options, text, owner)
        _check_messages(rendered, messages, options, text, owner)
        if len(kinds) < MOST_KINDS:
            kinds.add(kind)
    return text


def _with_json_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": with_arguments(calls, json.dumps)} if calls else {**message}


def _kind(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *more: Any) -> str:
    """Return what decides whether a template writes the messages: all but their contents."""
    shapes = [[message["role"], sorted(message), *_says(message)] for message in messages]
    return json.dumps([shapes, sorted(options.items()), more], sort_keys=True, default=str)


def _says(message: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a message says something by tool calls, or by its content alone; an empty one has no effect."""
    calls = bool(message.get("tool_calls"))
    return calls, not calls and bool((message.get("content") or "").strip())


def _check_roles(messages: Sequence[Mapping[str, Any]], template: str, owner: str) -> None:
    """Raise BadMessages for a role that no model was trained on: many templates write whatever they are given."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in template:
            raise BadMessages(
                f"[{i}]: the role {role!r} is none of {', '.join(ROLES)}, nor named in the {owner}'s chat template; "
                "rename it"
            )


def _check_tools(
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    text: str,
    owner: str,
) -> None:
    others = {name: value for name, value in options.items() if name != TOOLS}
    if TOOLS in options and _result(rendered, messages, others) == text:
        raise BadMessages(
            f": the {owner}'s chat template leaves out the row's tools; describe them in a message and rename "
            f"the column `{TOOLS}`, or use a template that writes them"
        )


def _check_messages(
    rendered: Rendered,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    text: str,
    owner: str,
) -> None:
    """Raise BadMessages if another content of a message, or no tool calls, would give the same text.

    A template may choose by position, such as the last message alone; it leaves out a role that it does not write there
    either.
    """
    says = [*map(_says, messages)]
    without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    if any(calls for calls, _ in says) and _result(rendered, without, options) == text:
        i = next(i for i, (calls, _) in enumerate(says) if calls)
        raise BadMessages(
            f"[{i}]: the {owner}'s chat template leaves out the tool calls of the role {messages[i]['role']!r}; "
            "write them in the content, or use a template that writes them"
        )
    marks = [f"{MARK}{i}q" for i in range(len(messages))]
    marked = [
        {**message, "content": message["content"] + mark} if has_content else message
        for message, mark, (_, has_content) in zip(messages, marks, says, strict=True)
    ]
    found = (_result(rendered, marked, options) or "").casefold()  # one rendering for most conversations
    for i, (message, mark, (_, has_content)) in enumerate(zip(messages, marks, says, strict=True)):
        if not has_content or mark in found:
            continue
        other = {**message, "content": mark}
        if _result(rendered, [*messages[:i], other, *messages[i + 1 :]], options) != text:
            continue
        alone = _result(rendered, messages[: i + 1], options)
        if alone is None or _result(rendered, [*messages[:i], other], options) in (None, alone):
            raise BadMessages(
                f"[{i}]: the {owner}'s chat template leaves out the role {message['role']!r}; give the message "
                "another role, or use a template that writes it"
            )


def _result(rendered: Rendered, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str | None:
    """Return the rendering, or None if the template refuses the messages."""
    try:
        return rendered(messages, **options)
    except Exception:  # templates are programs and may raise anything
        return None


def template_of_texts(tokenizer: Any) -> str:
    """Return the chat template; one that reads contents only as lists of parts, such as LLaVA's, makes parts of texts.

    It may do so for some roles alone.
    """
    template, roles = str(tokenizer.chat_template), ("system", "user", "assistant")
    for known in (roles, roles[1:]):
        texts = {role: f"{role}: {PROBE}" for role in known}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        shown = rendered_probe(tokenizer, messages)
        plain = [role for role in roles if texts.get(role, "") in shown]
        tokenizer.chat_template = TO_PARTS % plain + template
        parted = rendered_probe(tokenizer, messages)
        if len(plain) < len(roles) and "'type'" not in parted and all(text in parted for text in texts.values()):
            return str(tokenizer.chat_template)
        tokenizer.chat_template = template
    return template


def rendered_probe(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> str:
    """Return messages in the chat template, with a tool and behind a system message if it needs them.

    Returns "" if it refuses them.
    """
    first: list[dict[str, str]]
    for tools, first in itertools.product((None, [TOOL]), ([], [{"role": "system", "content": NEXT_PROBE}])):
        try:
            return str(tokenizer.apply_chat_template([*first, *messages], tools=tools, tokenize=False, **options))
        except Exception:  # templates are programs and may raise anything; the caller that needs the text reports it
            continue
    return ""
