"""Reads the first rows of a run's prompt files as the run will, and checks that all models take them."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.actor.data.prompt_files import CONVERSATIONS, PromptError, read_rows
from rlhf_triton.actor.data.prompt_reader import Prompt, PromptReader, check_columns
from rlhf_triton.actor.run.row_limits import TRIAL_REPLY, check_lengths, check_renderings
from rlhf_triton.checkpoints.tokenization import num_embeddings
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.required_files import has_chat_template
from rlhf_triton.config.rewards import text_parameters
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, RESPONSE_KEY
from rlhf_triton.tools.checks.special_tokens import template_problem
from rlhf_triton.tools.served_rewards import reward_parameters
from rlhf_triton.wire.contract import ContractError, Limits

CHECKED_ROWS = 1000  # in each prompt file


@dataclass(eq=False)
class CheckedRun:
    """A configuration under check."""

    config: RunConfig
    serves_only: bool = False
    """Whether only the server starts (`serve`)."""

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts of the files' first rows, read once. Raises ConfigError as `check_prompts`."""
        return check_prompts(self.config)


def check_prompts(config: RunConfig) -> list[Prompt]:
    """Check the prompt files' first rows as the run will read them, and that all models take the longest rows.

    Returns the prompts of these rows, without those for validation. Raises ConfigError if a row or length is refused.
    """
    check_lengths(config)
    policy = config.actor.policy.model
    prompts = config.actor.prompts
    validation = config.actor.validation
    reader = PromptReader.from_config(config, load_tokenizer(policy), num_embeddings(policy))
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    paths = {key: path for key, path in {**prompts.paths, **held_out}.items() if path is not None}
    prompts_by_key = {key: _first_prompts(config, reader, key, path) for key, path in paths.items()}
    return [prompt for key in prompts.paths for prompt in prompts_by_key[key]]


def _first_prompts(config: RunConfig, reader: PromptReader, key: str, path: Path) -> list[Prompt]:
    """Return the prompts of a file's first rows; `key` names it in the configuration. Raises ConfigError."""
    declared = {name: value for name, value in reward_parameters(config).items() if value is not None}
    try:
        rows = [*itertools.islice(read_rows(path), CHECKED_ROWS)]
        if not rows:
            raise PromptError(f"{path} has no prompts")
        if any(isinstance(row.columns.get(name), list) for row in rows for name in CONVERSATIONS):
            _check_templates(config, key)
        prompts = [reader.prompt(row) for row in rows]
        if config.serves_rewards:
            check_columns(ServedModel.of(declared), prompts)
        if config.uses_reward_model:
            fitted = [prompt for prompt in map(reader.fitted, prompts) if prompt is not None]
            check_rendering(config, reader.tokenizer, fitted)
    except PromptError as error:
        raise ConfigError(f"{key}: {error}") from error
    return prompts


def check_rendering(config: RunConfig, tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Check that the server can render the prompts with a reply for the reward model, and that it takes all of them.

    `tokenizer`: the policy's. Raises PromptError, ConfigError.
    """
    section = config.reward
    reader = reward_reader(section.model, Limits(1), text_parameters(section).get)

    def size_of(prompt: Prompt) -> int:
        is_chat = MESSAGES_KEY in prompt.metadata
        try:
            if section.process is not None:  # whose rows have another form; it reads replies without the template
                reader.rendered(0, *row_texts(prompt, ""))
                return 0
            text, metadata = row_texts(prompt, TRIAL_REPLY)
            if section.text == "pair" and not is_chat:
                return len(reader.encoded(0, prompt.text, metadata, TRIAL_REPLY).ids)
            return len(reader.encoded(0, text, metadata).ids)
        except ContractError as error:
            raise PromptError(f"{prompt.where}: reward.model: {error.message_without_row}") from error

    check_renderings(config, tokenizer, prompts, size_of)


def _check_templates(config: RunConfig, prompts: str) -> None:
    """Check that the models that must render conversations have a chat template.

    Args:
        prompts: configuration key of a prompt file that contains conversations; for the error message.

    Raises:
        ConfigError: the policy has none, or the reward model, which renders them itself.
    """
    policy = config.actor.policy.model
    reward = config.reward.model
    if not has_chat_template(policy):
        raise ConfigError(
            f"actor.policy.model: {policy} has no chat template, but {prompts} contains conversations; save a "
            "template there as chat_template.jinja, or give the prompts as plain texts"
        )
    renders = config.uses_reward_model and config.reward.template is None
    if renders and not has_chat_template(reward):
        raise ConfigError(
            f"reward.model: {reward} has no chat template, but must render the conversations in {prompts} itself; save "
            "the template that it was trained with as chat_template.jinja in its folder "
            "(`{{ messages[-1]['content'] }}` scores only the reply), or give the prompts as plain texts"
        )
    folders = {"actor.policy.model": policy, **({"reward.model": reward} if renders else {})}
    for key, folder in folders.items():
        if problem := template_problem(folder):
            raise ConfigError(f"{key}: {problem}, or give the prompts in {prompts} as plain texts")


def row_texts(prompt: Prompt, reply: str) -> tuple[str, dict[str, Any]]:
    """Return the text and the metadata of a row with a made-up reply, as a run sends them."""
    row_metadata = {**prompt.metadata, **({RESPONSE_KEY: reply} if reply else {})}
    if MESSAGES_KEY in prompt.metadata:
        return reply, row_metadata
    return f"{prompt.text}{reply}", {**row_metadata, PROMPT_KEY: prompt.text}
