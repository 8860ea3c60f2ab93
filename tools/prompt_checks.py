"""Checks before anything slow starts: the first rows of the prompt files, chat templates, and the length of rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from actor.data.prompt_files import PromptError, read_rows, source_of
from python_backend.checkpoints.positions import max_positions, stable_length
from python_backend.checkpoints.tokenization import LONGEST_ROW_TOKENS, fingerprint, load_tokenizer
from python_backend.config import ConfigError, RunConfig
from python_backend.config.required_files import has_chat_template
from python_backend.store.durable import read_json

CHECKED_ROWS = 1000  # of each file


def check_prompts(config: RunConfig) -> None:
    """Check the prompt files' first rows, and that all models take the longest rows. Raises ConfigError if not."""
    _check_lengths(config)
    prompts, validation = config.actor.prompts, config.actor.validation
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    for key, path in {**prompts.paths, **held_out}.items():
        try:
            contents = [] if path is None else _first_contents(path)
            if any(isinstance(content, list) for content in contents):
                check_templates(config, key)
        except PromptError as error:
            raise ConfigError(f"{key}: {error}") from error


def _check_lengths(config: RunConfig) -> None:
    """Check that no model refuses the longest rows of the run, so that no response is masked for its length.

    Of the policy, only a rotary table that depends on the length can be known here; the actor checks the rest.
    """
    prompt, new = config.actor.prompts.max_tokens, config.actor.generation.max_new_tokens
    limits = {"actor.policy.checkpoint": stable_length(_settings(config.actor.policy.checkpoint)) or prompt + new}
    for role, section in config.served_sections.items():
        known = (section.max_length, max_positions(_settings(section.checkpoint)))
        limits[f"{role}.checkpoint"] = min(filter(None, known), default=LONGEST_ROW_TOKENS)
    short = {key: limit for key, limit in limits.items() if limit < prompt + new}
    if "reward.checkpoint" in short and _receives_texts(config):  # which the server truncates
        del short["reward.checkpoint"]
    if short:
        raise ConfigError(
            "\n".join(
                f"{key}: takes rows of at most {limit} tokens, but actor.prompts.max_tokens ({prompt}) + "
                f"actor.generation.max_new_tokens ({new}) is {prompt + new}; lower them"
                for key, limit in short.items()
            )
        )


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
    renders = config.uses_reward_model and config.reward.template is None and not has_chat_template(reward)
    if renders and _receives_texts(config):
        raise ConfigError(
            f"reward.checkpoint: {reward} has no chat template, but must render the conversations in {prompts}, "
            "because it receives texts (reward.text: pair, reward.process.mark, or another tokenizer than the "
            "policy's); save the template that the reward model was trained with there as chat_template.jinja "
            "(`{{ messages[-1]['content'] }}` scores only the reply), or give the prompts as plain texts"
        )


def _receives_texts(config: RunConfig) -> bool:
    """Return whether the actor sends the reward model texts instead of token ids."""
    reward = config.reward
    marks = reward.process is not None and reward.process.mark is not None
    if marks or reward.text == "pair" or reward.template is not None:
        return True
    folders = (config.actor.policy.checkpoint, reward.checkpoint)
    return len({fingerprint(load_tokenizer(folder.absolute())) for folder in folders}) > 1


def _settings(checkpoint: Path) -> dict[str, Any]:
    return read_json(checkpoint / "config.json") or {}
