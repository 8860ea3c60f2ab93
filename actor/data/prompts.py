"""Makes prompts from the rows of prompt files: renders chats, tokenises, and checks or shortens the result."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actor.data.prompt_files import PromptError, PromptRow, read_rows, source_of
from actor.data.rollout import Prompt
from python_backend.checkpoints.tokenization import encode_prompt
from python_backend.rewards.function import MESSAGES_KEY

logger = logging.getLogger(__name__)
TooLong = Literal["error", "skip", "truncate"]


@dataclass(frozen=True)
class PromptReader:
    """Tokenises rows with `text`, or with chat `messages` that the tokenizer's template renders.

    A `prompt` column (the name in TRL) may hold either. All columns except the text and `prompt_id` become metadata,
    which also holds the chat messages, under `messages`.
    """

    tokenizer: Any
    max_tokens: int  # maximum prompt length
    too_long: TooLong = "error"  # a longer prompt is an error, skipped, or truncated to its last tokens
    vocab_size: int | None = None  # of the model's embeddings; None: tokens beyond them are not detected
    add_special_tokens: bool = True  # put BOS or the like before a text, as the tokenizer does; never before a chat

    def prompt(self, row: PromptRow) -> Prompt:
        """Return the prompt of `row`, which `fitted` has yet to truncate or skip.

        Raises:
            PromptError: the row is not a JSON object with one of the three columns; or the prompt is empty, too long
                under `too_long: error`, or has a token that the model has no embedding for.
        """
        prompt = self._prompt(row)
        size = prompt.tokens.size
        if not size or (size > self.max_tokens and self.too_long == "error"):
            raise PromptError(
                f"{row.where}: {size} tokens, but a prompt must have 1 to {self.max_tokens} (actor.prompts.max_tokens)"
            )
        if self.vocab_size is not None and (largest := int(prompt.tokens.max())) >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise PromptError(
                f"{row.where}: token {largest} ({token!r}) is outside the policy's {self.vocab_size} embeddings; "
                "remove it, or resize the embeddings to the tokenizer (resize_token_embeddings)"
            )
        return prompt

    def is_long(self, prompt: Prompt) -> bool:
        """Return whether `prompt` has more than `max_tokens` tokens."""
        return bool(prompt.tokens.size > self.max_tokens)

    def fitted(self, prompt: Prompt) -> Prompt | None:
        """Return `prompt`, truncated if it is too long; None if it is skipped."""
        if not self.is_long(prompt):
            return prompt
        if self.too_long == "skip":
            return None
        first, excess = prompt.num_special, prompt.tokens.size - self.max_tokens
        return replace(prompt, tokens=np.delete(prompt.tokens, slice(first, first + excess)))

    def _prompt(self, row: PromptRow) -> Prompt:
        columns, where = row.columns, row.where
        source = source_of(row)
        metadata = {name: value for name, value in columns.items() if name not in ("text", "prompt_id", source)}
        text, adds = columns[source], self.add_special_tokens
        if source == MESSAGES_KEY or (source == "prompt" and isinstance(text, list)):
            metadata[MESSAGES_KEY] = text
            text, adds = _rendered(text, f"{where}: {source}", self.tokenizer), False
        if not isinstance(text, str):
            raise PromptError(f"{where}: {source}: must be a string, got {text!r}")
        before, ids = (
            encode_prompt(self.tokenizer, text)
            if adds
            else ([], self.tokenizer(text, add_special_tokens=False)["input_ids"])
        )
        tokens = np.asarray([*before, *ids], dtype=np.int64)
        return Prompt(str(columns.get("prompt_id", row.number)), text, tokens, metadata, len(before))

    @property
    def long_prompt_action(self) -> str:
        """What happens to long prompts, for the log."""
        return "skipped" if self.too_long == "skip" else "truncated to their last tokens"


def read_prompts(path: Path, reader: PromptReader, *, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of `path` in order, at most `limit`; log the long ones.

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


def _rendered(messages: Any, where: str, tokenizer: Any) -> str:
    """Return the chat as text, rendered with the tokenizer's template up to the start of the reply."""
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{where}: the policy's tokenizer has no chat template; use a text prompt instead")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs and may raise anything
        raise PromptError(f"{where} cannot be rendered: {error}") from error
