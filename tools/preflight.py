"""Checks what a run needs before anything starts, for `tools run`, which refuses to start, and `tools doctor`.

Reads the first rows of the prompt files, and calls each reward function once, in a worker as on the server, on the
first prompt of the run.
"""

from __future__ import annotations

import importlib.util
import itertools
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actor.data.prompt_files import PromptError, read_rows, source_of
from actor.run.row_limits import check_lengths, receives_texts
from python_backend.checkpoints.inspection import stored_dtypes
from python_backend.checkpoints.tokenization import load_tokenizer, same_tokenizer
from python_backend.config import ConfigError, RewardTerm, RunConfig
from python_backend.config.required_files import check_files, has_chat_template, tokenizer_folder
from python_backend.rewards.function import MESSAGES_KEY, PROMPT_KEY, RESPONSE_KEY, FunctionError, Sample
from python_backend.rewards.pool import FunctionCall, ScoreOutcome, WorkerPool
from tools.render.rewards import hidden_variables
from tools.server.vllm import check_vllm, starts_vllm

CHECKED_ROWS = 1000  # of each prompt file
RESPONSE = "This is a trial response."


def check_run(config: RunConfig) -> None:
    """Raise ConfigError with one line for each problem that would end the run, or leave it without rewards."""
    check_files(config, server=True, actor=config.has_actor)
    if not config.has_actor:
        return
    stored_dtypes(config.actor.policy.checkpoint)  # reads each file's header: one of several may be missing
    check_prompts(config)
    if starts_vllm(config):
        check_vllm(config)
    problems = [*_missing_trackers(config), *_tokenizers(config), *_functions(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_prompts(config: RunConfig) -> None:
    """Check the prompt files' first rows, and that all models take the longest rows. Raises ConfigError if not."""
    check_lengths(config)
    prompts, validation = config.actor.prompts, config.actor.validation
    held_out = {"actor.validation.prompts": validation.prompts} if validation.size else {}
    for key, path in {**prompts.paths, **held_out}.items():
        try:
            contents = [] if path is None else _first_contents(path)
            if any(isinstance(content, list) for content in contents):
                _check_templates(config, key)
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


def _check_templates(config: RunConfig, prompts: str) -> None:
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
    if renders and receives_texts(config):
        raise ConfigError(
            f"reward.checkpoint: {reward} has no chat template, but must render the conversations in {prompts}, "
            "because it receives texts (reward.text: pair, reward.process.mark, or another tokenizer than the "
            "policy's); save the template that the reward model was trained with there as chat_template.jinja "
            "(`{{ messages[-1]['content'] }}` scores only the reply), or give the prompts as plain texts"
        )


def _missing_trackers(config: RunConfig) -> Iterator[str]:
    for name in config.actor.trackers:
        if importlib.util.find_spec(name) is None:
            yield f"actor.trackers: {name} is not installed; pip install {name}, or remove it"


def _tokenizers(config: RunConfig) -> Iterator[str]:
    """The critic's values belong to the policy's tokens; a reward model with another tokenizer receives texts."""
    if not config.serves_critic:
        return
    policy, critic = config.actor.policy.checkpoint, config.critic.checkpoint
    if not same_tokenizer(policy, critic):
        yield (
            f"critic.checkpoint: the tokenizer of {critic} differs from that of actor.policy.checkpoint "
            f"({policy}), but values belong to the policy's tokens; start the critic from a model with the policy's"
        )


def _functions(config: RunConfig) -> Iterator[str]:
    """Call each reward function on the first prompt, with a made-up response."""
    if not config.functions:
        return
    row = next(iter(read_rows(next(iter(config.actor.prompts.paths.values())))))
    content = row.columns[source_of(row)]
    tokenizer = load_tokenizer(tokenizer_folder(config).absolute())
    for name, term in config.functions.items():
        size = config.actor.algorithm.responses_per_prompt if term.groupwise else 1
        group = [_sample(row.columns, content, tokenizer)] * size
        if error := trial(term, group, hidden_variables=hidden_variables(term, config)):
            yield f"rewards.{name}.function: {term.function} fails on the first prompt ({row.where}): {error}"


def trial(term: RewardTerm, group: list[Sample], *, hidden_variables: Sequence[str]) -> str:
    """Call a reward function once, in a worker of its own; return what went wrong, "" for nothing."""
    call = FunctionCall(str(term.function), term.timeout_s, term.groupwise, term.options, hidden_variables)
    outcomes: queue.SimpleQueue[list[ScoreOutcome]] = queue.SimpleQueue()
    try:
        pool = WorkerPool(call, num_workers=1, memory_mib=term.memory_mib)
    except FunctionError as error:
        return str(error)
    try:
        pool.submit([(group, outcomes.put)])
        return next((outcome.error for outcome in outcomes.get() if outcome.error), "")
    finally:
        pool.close()


def _sample(columns: dict[str, Any], content: Any, tokenizer: Any) -> Sample:
    is_chat = isinstance(content, list)
    prompt = "\n".join(str(message["content"]) for message in content) if is_chat else content
    text = RESPONSE if is_chat else f"{prompt}{RESPONSE}"
    metadata = {**columns, PROMPT_KEY: prompt, RESPONSE_KEY: RESPONSE, **({MESSAGES_KEY: content} if is_chat else {})}
    return Sample(text, tokenizer(text, add_special_tokens=False)["input_ids"], metadata)
