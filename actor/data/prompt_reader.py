"""Turns rows of prompt files into prompts: renders chats, tokenises, checks and truncates. Imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_triton.actor.data.prompt_files import (
    EMPTY,
    SOURCES,
    PromptError,
    PromptRow,
    read_rows,
    source_of,
    with_empty_prompt,
)
from rlhf_triton.checkpoints.tokenization import encode_prompt, without_embedding
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import reason_of
from rlhf_triton.rewards.groups import GROUP_KEY
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY
from rlhf_triton.wire.chats import TEMPLATE_COLUMNS, render_row
from rlhf_triton.wire.contract import STEP_ENDS
from rlhf_triton.wire.messages import BadMessages, is_text_of_messages, prompt_messages

logger = logging.getLogger(__name__)
TooLong = Literal["error", "skip", "truncate"]
PROMPT_ID = "prompt_id"


@dataclass(frozen=True)
class Prompt:
    """One tokenised row of the prompt file."""

    prompt_id: str
    text: str
    tokens: np.ndarray  # int64 [P]
    metadata: dict[str, Any] = field(default_factory=dict)  # the row's other columns
    num_special: int = 0  # special tokens at the start, such as BOS, which truncation keeps
    where: str = ""  # file and row, for error messages

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Prompt:
        """Return the prompt that another rank has sent as JSON."""
        return cls(**{**fields, "tokens": np.array(fields["tokens"], np.int64)})


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Tokenises rows with `text`, or with chat `messages` that the tokenizer's template renders.

    A `prompt` column (the name in TRL) may hold either. All columns except the text and `prompt_id` become metadata,
    which also holds the chat messages, under `messages`. For a chat, the columns `tools` and `chat_template_kwargs`
    are passed to the template, as in TRL.
    """

    tokenizer: Any
    max_tokens: int  # maximum prompt length
    too_long: TooLong = "error"  # what happens to a longer prompt: an error, skipped, or truncated to its last tokens
    vocab_size: int | None = None  # number of the model's embeddings; None: tokens beyond them are not detected
    add_special_tokens: bool = True  # add the tokenizer's special tokens, such as BOS, to texts; never to chats
    has_environment: bool = False  # then a row without a prompt is a chat with an empty message

    @classmethod
    def from_config(cls, config: RunConfig, tokenizer: Any, vocab_size: int | None) -> PromptReader:
        """Return the reader of a run."""
        prompts = config.actor.prompts
        has_environment = config.environment is not None
        return cls(
            tokenizer=tokenizer,
            max_tokens=prompts.max_tokens,
            too_long=prompts.too_long,
            vocab_size=vocab_size,
            add_special_tokens=prompts.add_special_tokens,
            has_environment=has_environment,
        )

    def prompt(self, row: PromptRow) -> Prompt:
        """Return the prompt of `row`, before `fitted` truncates or skips it.

        Raises:
            PromptError: the row does not have exactly one prompt; or the prompt cannot be rendered or tokenised, is
                empty, ends with a reply, is too long under `too_long: error`, or has a token without an embedding.
        """
        try:
            return self._check(self._prompt(with_empty_prompt(row) if self.has_environment else row))
        except PromptError:
            raise
        except BaseException as error:  # tokenizers may raise anything; a Rust panic is not an Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise PromptError(f"{row.where}: cannot be tokenised: {reason_of(error)}") from error

    def _check(self, prompt: Prompt) -> Prompt:
        size = prompt.tokens.size
        if not size or (size > self.max_tokens and self.too_long == "error"):
            raise PromptError(
                f"{prompt.where}: {size} tokens, but a prompt must have 1 to {self.max_tokens} "
                "(actor.prompts.max_tokens); set actor.prompts.too_long: skip to leave out longer prompts"
            )
        if problem := without_embedding(self.tokenizer, prompt.tokens.tolist(), self.vocab_size):
            raise PromptError(f"{prompt.where}: {problem}")
        return prompt

    def is_long(self, prompt: Prompt) -> bool:
        """Return whether `prompt` has more than `max_tokens` tokens."""
        return bool(prompt.tokens.size > self.max_tokens)

    def fitted(self, prompt: Prompt) -> Prompt | None:
        """Return `prompt`, truncated if it is too long, or None if it is skipped."""
        if not self.is_long(prompt):
            return prompt
        if self.too_long == "skip":
            return None
        first = prompt.num_special
        excess = prompt.tokens.size - self.max_tokens
        tokens = np.delete(prompt.tokens, slice(first, first + excess))
        # A reward model reads the text that the policy has read, but the whole messages of a chat.
        is_chat = MESSAGES_KEY in prompt.metadata
        text = prompt.text if is_chat else self.tokenizer.decode(tokens[first:].tolist())
        return replace(prompt, text=text, tokens=tokens)

    def _prompt(self, row: PromptRow) -> Prompt:
        columns = row.columns
        where = row.where
        source = source_of(row)
        metadata = {name: value for name, value in columns.items() if name not in (*SOURCES, PROMPT_ID)}
        text = columns[source]
        adds = self.add_special_tokens
        if text in EMPTY:
            raise PromptError(f"{where}: {source} is empty")
        if isinstance(text, str) and is_text_of_messages(text):
            raise PromptError(
                f"{where}: {source} holds messages written as a text; store the list itself in that column"
            )
        if source == MESSAGES_KEY or (source == "prompt" and isinstance(text, list)):
            metadata[MESSAGES_KEY] = messages = _read_messages(text, f"{where}: {source}")
            text = self._render(messages, columns, where, source)
            adds = False
        if not isinstance(text, str):
            raise PromptError(f"{where}: {source}: must be a string, got {text!r}")
        prompt_id = row.number if columns.get(PROMPT_ID) is None else columns[PROMPT_ID]
        for name, value in ((source, text), (PROMPT_ID, str(prompt_id))):
            _check_characters(value, f"{where}: {name}")
        before, ids = encode_prompt(self.tokenizer, text, special=adds)
        starts = [getattr(self.tokenizer, name, None) for name in ("bos_token_id", "cls_token_id")]
        num_special = len(before) or int(bool(ids) and ids[0] in starts)  # a template or a text may start with one
        tokens = np.asarray([*before, *ids], dtype=np.int64)
        return Prompt(str(prompt_id), text, tokens, metadata, num_special, where)

    def _render(self, messages: list[dict[str, Any]], columns: Mapping[str, Any], where: str, source: str) -> str:
        """Return the chat rendered with the tokenizer's template, up to the start of the reply. Raises PromptError."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError(
                f"{where}: {source}: the policy's tokenizer has no chat template; use a text prompt instead"
            )
        unavailable = [name for name in TEMPLATE_COLUMNS if self.has_environment and columns.get(name)]
        if unavailable:
            raise PromptError(
                f"{where}: {unavailable[0]}: not available with an environment, which defines the tools of all "
                "conversations and continues them with the template's defaults; remove or rename the column"
            )
        rejected = f"{source} cannot be rendered"
        try:
            return render_row(self.tokenizer, messages, columns, owner="policy", name=source, rejected=rejected)
        except BadMessages as error:
            raise PromptError(f"{where}: {error}") from error

    @property
    def long_prompt_action(self) -> str:
        """The rule for long prompts, for the log."""
        return "skipped" if self.too_long == "skip" else "truncated to their last tokens"


def read_prompts(path: Path, reader: PromptReader, *, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of `path` in order, at most `limit`; warn of long ones.

    Raises:
        PromptError: the file is unreadable, has no prompts, or has one that `reader` refuses.
    """
    prompts: list[Prompt] = []
    long: list[str] = []
    for row in read_rows(path):
        prompt = reader.prompt(row)
        if reader.is_long(prompt):
            long.append(f"{row.number} ({prompt.tokens.size} tokens)")
        if (fitted := reader.fitted(prompt)) is not None:
            prompts.append(fitted)
        if len(prompts) == limit:
            break
    if long:
        logger.warning(
            "%s: %d prompts of more than %d tokens were %s: rows %s",
            path,
            len(long),
            reader.max_tokens,
            reader.long_prompt_action,
            ", ".join(long[:5]) + (", …" if len(long) > 5 else ""),
        )
    if not prompts:
        raise PromptError(f"{path} has no prompts" + (f" of at most {reader.max_tokens} tokens" if long else ""))
    return prompts


def _read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a prompt's chat messages. Raises PromptError if `value` is not a list of messages or ends with a reply."""
    try:
        messages = prompt_messages(value)
    except BadMessages as error:
        raise PromptError(f"{where}{error}") from error
    _check_characters(json.dumps(messages, ensure_ascii=False), where)
    return messages


def _check_characters(text: str, where: str) -> None:
    """Raise PromptError if the text has a lone surrogate, which JSON may contain and tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise PromptError(
            f"{where}: {half!r} is half a character (a lone surrogate), which UTF-8 cannot encode; fix or drop the row"
        ) from error


def check_columns(reward: ServedModel, prompts: Sequence[Prompt]) -> None:
    """Raise PromptError if a prompt column has a name that the actor reserves for reward functions."""
    reserved = {PROMPT_KEY, RESPONSE_KEY, REPLY_KEY, *((GROUP_KEY,) if reward.groupwise else ())}
    reserved |= {STEP_ENDS} if reward.granularity else set()
    for prompt in prompts if reward.reads_texts else ():
        if clashing := sorted(reserved & prompt.metadata.keys()):
            raise PromptError(
                f"{prompt.where}: the column {clashing[0]!r} has a reserved name, under which reward functions receive "
                "the response's text, steps or group; rename the column"
            )
