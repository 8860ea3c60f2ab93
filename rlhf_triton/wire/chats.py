"""Renders conversations with a chat template, for prompts, requests, pairs, and the checks before a run."""

import copy
import functools
import inspect
import itertools
import json
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_triton.errors import reason_of
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.messages import BadMessages, with_arguments, without_nulls

Messages = Sequence[Mapping[str, Any]]
TextPath = tuple[int | str, ...]  # path of a text in messages: index of the message, key, …
TOOLS, TEMPLATE_VARIABLES = TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # TRL's names
GENERATION_PROMPT = "add_generation_prompt"
MARK = "qzjx"  # added to a text to detect whether the template writes it
Rendered = Callable[[Messages, Mapping[str, Any]], str]
_checked: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""For each tokenizer, the kinds of conversation that its template is known to write completely."""
MAX_KINDS = 10_000
# contents of probe messages, to find what a chat template writes around them
PROBE = "Yes."
NEXT_PROBE = "Why?"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TO_PARTS = (  # prefix of a chat template; ends so that it does not strip white space at the template's start
    "{%% set of = namespace(parts=[]) %%}{%% for m in messages %%}"
    "{%% if m.content is string and m.role not in %s %%}"
    "{%% set m = dict(m, content=[{'type': 'text', 'text': m.content}]) %%}{%% endif %%}"
    "{%% set of.parts = of.parts + [m] %%}{%% endfor %%}{%% set messages = of.parts %%}{{ '' }}"
)
ROLES = ("system", "user", "assistant", "tool")  # roles that a template may support without naming them
# Keys that are not content: ids that link messages, and metadata from chat logs.
LINKS = ("role", "type", "id", "tool_call_id", "timestamp", "created_at", "model", "language", "finish_reason")
REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of reasoning in published templates
THOUGHT_END = "</think>"  # ends the reasoning within a content


def template_options(tokenizer: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the chat template from a row's columns `tools` and `chat_template_kwargs`, as in TRL.

    Raises:
        BadMessages: the tools are not JSON schemas, or the variables are invalid; the message starts with the column.
    """
    tools, variables = (_parsed(columns.get(name)) for name in TEMPLATE_COLUMNS)
    tools = [*map(_parsed, tools)] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadMessages(
            f"{TOOLS}: must be a list of JSON schemas for the chat template, or its JSON text, got "
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
    conflicting = [name for name in variables if name in reserved | {"messages"}]
    if conflicting:
        raise BadMessages(f"{TEMPLATE_VARIABLES}: {conflicting[0]!r} is reserved; remove it")
    return {**variables, TOOLS: without_nulls(tools)} if tools else variables


def _parsed(value: Any) -> Any:
    """Decode a JSON text; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def render_row(
    tokenizer: Any,
    messages: Messages,
    columns: Mapping[str, Any],
    *,
    owner: str,
    name: str,
    rejected: str,
    generation_prompt: bool = True,
) -> str:
    """Return the conversation of a row as text, rendered with the row's own arguments for the template.

    Args:
        messages: from `plain_messages`.
        columns: of the row, for `template_options`.
        owner: see `render_chat`.
        name: column or field of the messages, for error messages.
        rejected: start of the message if the template raises an error.

    Raises:
        BadMessages: the row cannot be rendered; the message starts with the column.
    """
    options = template_options(tokenizer, columns)
    try:
        return render_chat(tokenizer, messages, options, owner=owner, generation_prompt=generation_prompt)
    except BadMessages as error:
        raise BadMessages(f"{name}{error}") from error
    except Exception as error:  # the template is the checkpoint's own code and may raise any exception
        raise BadMessages(f"{rejected}: {reason_of(error)}") from error


def render_chat(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any], *, owner: str, generation_prompt: bool = False
) -> str:
    """Return a conversation as text, rendered with the tokenizer's chat template.

    Args:
        options: further arguments, from `template_options`.
        owner: role of the tokenizer's model, for error messages.

    Raises:
        BadMessages: the template omits the tools or a part of a message; the error starts with the place.
        Exception: any other error of the template, which is a program.
    """

    def rendered(shown: Messages, options: Mapping[str, Any]) -> str:
        try:
            return str(tokenizer.apply_chat_template([*shown], tokenize=False, **options))
        # DeepSeek's templates accept tool calls only with a content, and arguments only as JSON texts.
        except Exception:
            written = [*map(_with_texts, shown)]
            if written == [*shown]:
                raise
            return rendered(written, options)

    options = {**options, GENERATION_PROMPT: generation_prompt}
    template = str(tokenizer.chat_template)
    text = rendered(messages, options)
    text.encode()  # raises on lone surrogates: JSON may contain them, tokenizers reject them
    kinds = _checked.setdefault(tokenizer, set())
    kind = _kind(messages, options, template)
    if kind not in kinds:
        _check_roles(messages, template, owner)
        _check_tools(rendered, messages, options, text, owner)
        _check_texts(rendered, messages, options, text, template, owner)
        if len(kinds) < MAX_KINDS:
            kinds.add(kind)
    return text


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return {**message}
    calls = with_arguments(calls, lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments))
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def texts_in(messages: Messages) -> Iterator[tuple[TextPath, Any]]:
    """Yield place and value of all content in messages: texts and tool calls' arguments, except the keys in `LINKS`."""

    def content_of(value: Any, place: TextPath) -> Iterator[tuple[TextPath, Any]]:
        if isinstance(value, str) or (place[-1] == "arguments" and isinstance(value, dict)):
            if value.strip() if isinstance(value, str) else value:
                yield place, value
        elif isinstance(value, (dict, list)):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if key not in LINKS:
                    yield from content_of(inner, (*place, key))

    for i, message in enumerate(messages):
        is_result = message["role"] not in ("system", "user", "assistant")  # its name repeats the call's
        yield from content_of({key: message[key] for key in message if not (is_result and key == "name")}, (i,))


def _kind(messages: Messages, options: Mapping[str, Any], template: str) -> str:
    """Return a key for everything except the texts: conversations of one kind are rendered equally completely."""
    keys = [[message["role"], sorted(message)] for message in messages]
    places = [(place, THOUGHT_END in value) for place, value in texts_in(messages)]
    return json.dumps([keys, places, sorted(options.items()), template], sort_keys=True, default=str)


def _check_roles(messages: Messages, template: str, owner: str) -> None:
    """Raise BadMessages for an unknown role: many templates write any role, even if the model does not know it."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in template:
            raise BadMessages(
                f"[{i}]: the role {role!r} is neither one of {', '.join(ROLES)} nor named in the {owner}'s chat "
                "template; rename it"
            )


def _check_tools(rendered: Rendered, messages: Messages, options: Mapping[str, Any], text: str, owner: str) -> None:
    others = {name: value for name, value in options.items() if name != TOOLS}
    if TOOLS in options and _result(rendered, messages, others) == text:
        instead = (
            "score a text without them (reward.template)" if owner == "reward model" else "describe them in a message"
        )
        raise BadMessages(
            f": the {owner}'s chat template omits the tools; {instead}, or use a template that writes them"
        )


def _check_texts(
    rendered: Rendered, messages: Messages, options: Mapping[str, Any], text: str, template: str, owner: str
) -> None:
    """Raise BadMessages if the template omits a text, so that another text would give the same rendering.

    A template may select messages by position, such as only the last one. It may omit from earlier messages what it
    writes for the last one, and reasoning that it knows, as thinking templates do. Such omissions, and of a
    participant's name, are only logged, once.
    """

    def is_lost(place: TextPath, value: Any, shown: Messages = messages) -> bool:
        own = options if shown is messages else {**options, GENERATION_PROMPT: False}
        before = text if shown is messages else _result(rendered, shown, own)
        return before is None or _result(rendered, _changed(shown, {place: value}), own) == before

    texts = dict(texts_in(messages))
    marks = {place: f"{MARK}{n}q" for n, place in enumerate(texts)}
    marked = {place: _with_mark(texts[place], mark) for place, mark in marks.items()}
    # For most chats, this one rendering is enough.
    result = (_result(rendered, _changed(messages, marked), options) or "").casefold()
    for place, mark in marks.items():
        other = mark if isinstance(texts[place], str) else {mark: mark}
        if mark in result or not is_lost(place, other):
            continue
        i = int(place[0])
        key = place[1]
        role = messages[i]["role"]
        last = messages[: i + 1]
        alone = {"role": role, "content": mark}
        if is_lost((i,), alone) and not is_lost((i,), alone, last):
            continue
        is_known_reasoning = key in REASONING and THOUGHT_END in template and len(last) < len(messages)
        if key == "name":  # a participant's name: OpenAI's clients send it, but few templates write it
            warn_once(f"the {owner}'s chat template omits the name in messages of the role {role!r}")
            continue
        if is_lost(place, other, last) and not is_known_reasoning:
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
            if key == "content" and not messages[i].get("tool_calls"):
                raise BadMessages(
                    f"[{i}]: the {owner}'s chat template omits messages of the role {role!r}; give the message another "
                    "role, or use a template that writes it"
                )
            instead = "move it to a separate message" if key == "content" else "move it to the content, remove it"
            raise BadMessages(
                f"{path}: the {owner}'s chat template omits it in messages of the role {role!r}; {instead}, or use a "
                "template that writes it"
            )
        warn_once(f"the {owner}'s chat template omits {key} in earlier messages")
    if any(f"{MARK}{n}t" in marked[place] and f"{MARK}{n}t" not in result for n, place in enumerate(texts)) and result:
        warn_once(f"the {owner}'s chat template omits the reasoning in contents, before {THOUGHT_END}")


def _with_mark(value: Any, mark: str) -> Any:
    """Return a value from a message with a mark at its end, and another one at the end of its reasoning."""
    if not isinstance(value, str):
        return {**value, mark: mark}
    return value.replace(THOUGHT_END, f"{mark[:-1]}t{THOUGHT_END}", 1) + mark


def _changed(messages: Messages, values: Mapping[TextPath, Any]) -> list[Any]:
    """Return a copy of the messages with the given values at some places."""
    copied: Any = copy.deepcopy([*messages])
    for (*path, key), value in values.items():
        functools.reduce(operator.getitem, path, copied)[key] = value
    return list(copied)


def _result(rendered: Rendered, messages: Messages, options: Mapping[str, Any]) -> str | None:
    """Return the rendering, or None if the template rejects the messages."""
    try:
        return rendered(messages, options)
    except Exception:  # templates are programs and may raise anything
        return None


def template_of_texts(tokenizer: Any) -> str:
    """Return the chat template, extended to accept texts if it reads contents only as lists of parts, such as LLaVA's.

    A template may do so for some roles only.
    """
    template = str(tokenizer.chat_template)
    roles = ("system", "user", "assistant")
    for probed in (roles, roles[1:]):
        texts = {role: f"{role}: {PROBE}" for role in probed}
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
    """Render messages with the chat template; add a tool and a system message if it requires them.

    Returns "" if the template rejects the messages.
    """
    first: list[dict[str, str]]
    for tools, first in itertools.product((None, [TOOL]), ([], [{"role": "system", "content": NEXT_PROBE}])):
        try:
            return str(tokenizer.apply_chat_template([*first, *messages], tools=tools, tokenize=False, **options))
        except Exception:  # templates are programs and may raise anything; the caller that needs the text reports it
            continue
    return ""
