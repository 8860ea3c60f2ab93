"""Rendering of conversations: the prompt, and what follows a reply. Sampled replies are never rendered again."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.actor.data.reply_parts import (
    THOUGHT_BEGIN,
    THOUGHT_END,
    ToolCall,
    split_thought,
    tool_call_of,
    tool_calls,
)
from rlhf_triton.checkpoints.special_tokens import reply_text
from rlhf_triton.checkpoints.tokenization import encode_bare_text
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import TOOLS, render_chat
from rlhf_triton.wire.messages import BadMessages

ChatMessage = dict[str, Any]
PROBE = "Yes."  # a reply in the check of a chat template
PROBE_MESSAGE: ChatMessage = {"role": "user", "content": PROBE}
THOUGHT = f"{THOUGHT_BEGIN}Hm.\n{THOUGHT_END}\n\n"  # templates remove thoughts from earlier replies


class TemplateError(RlhfError):
    """The chat template cannot be used for conversations; the message says why."""


class HistoryChanged(TemplateError):
    """The chat template changes earlier messages, so the next ones cannot be appended to the sampled tokens."""


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, which conversations whose prompts are messages need."""

    tokenizer: Any
    tools: Sequence[dict[str, Any]] | None = None  # JSON schemas of functions, for the template

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of the policy's and a reward model's template: the tools, or {} if the template ignores them."""
        if not self.tools:
            return {}
        options = {TOOLS: [*self.tools]}
        try:
            self._render([PROBE_MESSAGE], options)
        except BadMessages as error:
            warn_once(str(error).lstrip(": "))
            return {}
        except Exception:  # `prompt` reports errors of the conversation itself
            return options
        return options

    def prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text up to the start of the policy's first reply. Raises TemplateError."""
        try:
            return self._render(messages, self.options)
        except BadMessages as error:
            raise TemplateError(f"messages{error}") from error
        except Exception as error:  # templates are programs and may raise anything
            raise TemplateError(
                f"the policy's chat template cannot render a conversation: {reason_of(error)}"
            ) from error

    def _render(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> str:
        return render_chat(self.tokenizer, messages, options, owner="policy", generation_prompt=True)

    def after_reply(self, messages: Sequence[ChatMessage], last_token: int, text: str = "") -> list[int]:
        """Return the token ids between a reply and the policy's next reply.

        They hold the end of the reply, unless it was sampled, and the messages that answer it.

        Args:
            messages: the answers to the reply.
            last_token: the last sampled token of the reply.
            text: the reply.

        Raises TemplateError; HistoryChanged if the template would change the reply.
        """
        rest = self._after_probe(messages, THOUGHT + PROBE if THOUGHT_END in text else PROBE)
        tokens = encode_bare_text(self.tokenizer, rest)
        end = self.tokenizer.decode([last_token])
        # The reply was ended by the template's own end token, not by a stop string or another end-of-sequence token.
        # Llama 2's template writes a space before it; the sampled reply stands, with or without it.
        for following in (tokens, encode_bare_text(self.tokenizer, rest.lstrip())):
            if following[:1] == [last_token]:
                return following[1:]
        return encode_bare_text(self.tokenizer, rest.removeprefix(end)) if end.isspace() else tokens

    def parse_calls(self, before: Sequence[int], reply: Sequence[int]) -> list[ToolCall]:
        """Return the tool calls in the tokens `reply`, which follow the tokens `before`.

        The tokenizer's `response_template` defines their format; without one, it is the format of Hermes and Qwen.
        """
        if getattr(self.tokenizer, "response_template", None) is None:
            return tool_calls(split_thought(reply_text(self.tokenizer, reply))[1])
        try:
            message = self.tokenizer.parse_response([*reply], prefix=[*before], tools=self.tools and [*self.tools])
        except Exception as error:  # the policy may have written anything
            return [ToolCall(error=f"the reply cannot be parsed: {reason_of(error)}")]
        return [tool_call_of(call.get("function")) for call in message.get("tool_calls", ())]

    def check(self) -> None:
        """Raise TemplateError if the template cannot render the messages that follow a reply, such as tool results.

        Raise HistoryChanged if it renders earlier messages differently once others follow.
        """
        if self.has_template:
            self._after_probe([{"role": "tool", "name": "t", "content": PROBE} if self.tools else PROBE_MESSAGE], PROBE)

    def _after_probe(self, answers: Sequence[ChatMessage], reply: str) -> str:
        """Return the rendered text between `reply` and the next reply: the end of the reply, and `answers`."""
        opening = self.prompt([PROBE_MESSAGE])
        if opening.endswith(THOUGHT_BEGIN):  # the template opens a thought, so every reply continues one
            reply = THOUGHT + PROBE
        before = opening.removesuffix(THOUGHT_BEGIN)
        whole = self.prompt([PROBE_MESSAGE, {"role": "assistant", "content": reply}, *answers])
        # Llama 2's and Mistral's templates write a space before a reply; the sampled reply stands, with or without it.
        replied = whole.removeprefix(before).lstrip()
        if not (whole.startswith(before) and replied.startswith(reply)):
            raise HistoryChanged(
                "the policy's chat template changes earlier messages of a conversation when others follow"
                + (", such as the thoughts of a reply" if reply != PROBE else "")
            )
        return replied.removeprefix(reply)
