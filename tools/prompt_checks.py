"""Checks the first rows of the prompt files, and that chats can be rendered, before anything slow starts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from actor.data.prompt_files import PromptError, read_rows, source_of
from python_backend.config import ConfigError, RunConfig
from python_backend.config.required_files import has_chat_template

CHECKED_ROWS = 1000  # of each file


def check_prompts(config: RunConfig) -> None:
    """Check the first rows of the prompt files before anything slow starts. Raises ConfigError if one is invalid."""
    prompts, validation = config.actor.prompts, config.actor.validation
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    for key, path in {**prompts.paths, **held_out}.items():
        try:
            contents = [] if path is None else _first_contents(path)
            if any(isinstance(content, list) for content in contents):
                check_templates(config, key)
        except PromptError as error:
            raise ConfigError(f"{key}: {error}") from error


def _first_contents(path: Path) -> list[Any]:
    """Return the text or messages of the first rows of a prompt file. Raises PromptError if it or a row is empty."""
    contents = []
    for row in itertools.islice(read_rows(path), CHECKED_ROWS):
        contents.append(row.columns[source_of(row)])
        if not contents[-1]:
            raise PromptError(f"{row.where}: {source_of(row)} is empty")
    if not contents:
        raise PromptError(f"{path} has no prompts")
    return contents


def check_templates(config: RunConfig, prompts: str) -> None:
    """Check that the models that must render conversations have a chat template.

    Args:
        prompts: configuration key of a prompt file that contains conversations; for the error message.

    Raises:
        ConfigError: the policy has none, or the reward model has none and receives texts.
    """
    policy, reward = config.actor.policy.checkpoint, config.reward.checkpoint
    if not has_chat_template(policy):
        raise ConfigError(
            f"actor.policy.checkpoint: {policy} has no chat template, but {prompts} contains conversations; save a "
            "template there as chat_template.jinja, or give the prompts as plain texts"
        )
    marks = config.reward.process is not None and config.reward.process.mark is not None
    by_settings = marks or config.reward.text == "pair"
    renders = config.uses_reward_model and config.reward.template is None and not has_chat_template(reward)
    if renders and (by_settings or not _same_tokenizer(policy, reward)):
        raise ConfigError(
            f"reward.checkpoint: {reward} has no chat template, but must render the conversations in {prompts}, "
            "because it receives texts (reward.text: pair, reward.process.mark, or another tokenizer than the "
            "policy's); save the template that the reward model was trained with there as chat_template.jinja "
            "(`{{ messages[-1]['content'] }}` scores only the reply), or give the prompts as plain texts"
        )


def _same_tokenizer(*folders: Path) -> bool:
    from python_backend.checkpoints.tokenization import fingerprint, load_tokenizer  # transformers: slow to import

    return len({fingerprint(load_tokenizer(folder.absolute())) for folder in folders}) == 1
