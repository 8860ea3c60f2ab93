"""Texts of conversations: the prompt, and what follows a reply of the policy, which is never rendered again."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.checkpoints.tokenization import reply_text
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.wire.chats import TOOLS, render_chat, warn_once
from rlhf_triton.wire.messages import BadMessages

Message = dict[str, Any]
PROBE = "Yes."  # a reply in the check of a chat template
ASKED: Message = {"role": "user", "content": PROBE}
THOUGHT_BEGIN, THOUGHT_END = "<think>\n", "</think>"
THOUGHT = f"{THOUGHT_BEGIN}Hm.\n{THOUGHT_END}\n\n"  # which templates remove from earlier replies


class TemplateError(RlhfError):
    """The chat template cannot be used for conversations; the message says why."""


class HistoryChanged(TemplateError):
    """The chat template changes earlier messages, so the next ones cannot be appended to the sampled tokens."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template; conversations whose prompts are messages need one."""

    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None  # JSON schemas of functions, for the template

    @property
    def has_template(self) -> bool:
        """Whether messages have roles."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of the template, and of a reward model's: the tools, unless the policy does not see them."""
        if not self.tools:
            return {}
        options = {TOOLS: [*self.tools]}
        try:
            self._rendered([ASKED], options)
        except BadMessages as error:
            warn_once(str(error).lstrip(": "))
            return {}
        except Exception:  # `prompt` says what is wrong with the conversation itself
            return options
        return options

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text up to the start of the policy's first reply. Raises TemplateError."""
        try:
            return self._rendered(messages, self.options)
        except BadMessages as error:
            raise TemplateError(f"messages{error}") from error
        except Exception as error:  # templates are programs and may raise anything
            raise TemplateError(
                f"the policy's chat template cannot render a conversation: {reason_of(error)}"
            ) from error

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return render_chat(self.tokenizer, messages, options, owner="policy", generation_prompt=True)

    def after_reply(self, messages: Sequence[Message], last_token: int, text: str = "") -> list[int]:
        """Return the token ids between a reply that ends with `last_token` and the policy's next reply.

        They end the reply, whose text is `text`, if it has not done so itself, and have the messages that answer it.

        Raises TemplateError; HistoryChanged if the template would change the reply.
        """
        rest = self._after_probe(messages, THOUGHT + PROBE if THOUGHT_END in text else PROBE)
        tokens, end = self._ids(rest), self.tokenizer.decode([last_token])
        # The reply's own end is the template's, if it is not a stop string or another end-of-sequence token.
        if tokens[:1] == [last_token]:
            return tokens[1:]
        return self._ids(rest.removeprefix(end)) if end.isspace() else tokens

    def calls(self, before: Sequence[int], reply: Sequence[int]) -> "list[ToolCall]":
        """Return the tool calls in a reply behind the tokens `before`, in the format of the tokenizer's chat template.

        Its `response_template` tells transformers that format; without, it is that of Hermes and Qwen.
        """
        if getattr(self.tokenizer, "response_template", None) is None:
            return tool_calls(reply_text(self.tokenizer, reply))
        try:
            found = self.tokenizer.parse_response([*reply], prefix=[*before], tools=self.tools and [*self.tools])
        except Exception as error:  # of what the policy has written
            return [ToolCall(error=f"the reply cannot be parsed: {reason_of(error)}")]
        return [_checked(call.get("function")) for call in found.get("tool_calls", ())]

    def check(self) -> None:
        """Raise TemplateError if the template does not show the results of tools.

        Raise HistoryChanged unless it leaves a conversation as it is when messages follow: results, if there are tools.
        """
        if self.has_template:
            self._after_probe([{"role": "tool", "name": "t", "content": PROBE} if self.tools else ASKED], PROBE)

    def _after_probe(self, answers: Sequence[Message], reply: str) -> str:
        """Return the text between a reply and the next one: its end, and the messages that follow."""
        opening = self.prompt([ASKED])
        if opening.endswith(THOUGHT_BEGIN):  # every reply goes on with a thought
            reply = THOUGHT + PROBE
        before = opening.removesuffix(THOUGHT_BEGIN)
        whole = self.prompt([ASKED, {"role": "assistant", "content": reply}, *answers])
        # Llama 2's and Mistral's write a space before a reply: the policy's own one is kept, with or without it.
        replied = whole.removeprefix(before).lstrip()
        if not (whole.startswith(before) and replied.startswith(reply)):
            raise HistoryChanged(
                "the policy's chat template changes earlier messages of a conversation when others follow"
                + (", such as the thoughts of a reply" if reply != PROBE else "")
            )
        return replied.removeprefix(reply)

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]


HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply, possibly malformed."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    error: str = ""  # what is wrong with it, for the policy


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a reply, each as in `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen)."""
    return [_call(found.strip()) for found in HERMES.findall(text)]


def _call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the tool call is not valid JSON: {error}")
    return _checked(found)


def _checked(found: Any) -> ToolCall:
    arguments = found.get("arguments", {}) if isinstance(found, dict) else None
    if not isinstance(arguments, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error='a tool call must be an object with "name", a text, and "arguments", an object')
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # lone surrogates, NaN
        return ToolCall(error=f"the tool call cannot be written as JSON in UTF-8: {error}")
    return ToolCall(found["name"], arguments)
