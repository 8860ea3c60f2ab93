"""Checks what a run needs before anything starts, for `tools run`, which refuses to start, and `tools doctor`.

Each reward function is called once, in a worker as on the server, on the first prompt of the run.
"""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Iterator
from typing import Any

from actor.data.prompt_files import read_rows, source_of
from python_backend.checkpoints.tokenization import fingerprint, load_tokenizer
from python_backend.config import ConfigError, RewardTerm, RunConfig
from python_backend.config.required_files import check_files, tokenizer_folder
from python_backend.rewards.function import MESSAGES_KEY, PROMPT_KEY, RESPONSE_KEY, FunctionError, Sample
from python_backend.rewards.pool import FunctionCall, ScoreOutcome, WorkerPool
from tools.prompt_checks import check_prompts
from tools.server.vllm import check_vllm, starts_vllm

RESPONSE = "This is a trial response."


def check_run(config: RunConfig) -> None:
    """Raise ConfigError with one line for each problem that would end the run, or leave it without rewards."""
    check_files(config, server=True, actor=config.has_actor)
    problems = []
    if config.has_actor:
        check_prompts(config)
        if starts_vllm(config):
            check_vllm(config)
        problems = [*_missing_trackers(config), *_tokenizers(config), *_functions(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _missing_trackers(config: RunConfig) -> Iterator[str]:
    for name in config.actor.trackers:
        if importlib.util.find_spec(name) is None:
            yield f"actor.trackers: {name} is not installed; pip install {name}, or remove it"


def _tokenizers(config: RunConfig) -> Iterator[str]:
    """The critic's values belong to the policy's tokens; a reward model with another tokenizer receives texts."""
    if not config.serves_critic:
        return
    folders = (config.actor.policy.checkpoint, config.critic.checkpoint)
    if len({fingerprint(load_tokenizer(folder.absolute())) for folder in folders}) > 1:
        yield (
            f"critic.checkpoint: the tokenizer of {folders[1]} differs from that of actor.policy.checkpoint "
            f"({folders[0]}), but values belong to the policy's tokens; start the critic from a model with the policy's"
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
        if error := trial(term, [_sample(row.columns, content, tokenizer)] * size):
            yield f"rewards.{name}.function: {term.function} fails on the first prompt ({row.where}): {error}"


def trial(term: RewardTerm, group: list[Sample]) -> str:
    """Call a reward function once, in a worker of its own; return what went wrong, "" for nothing."""
    call = FunctionCall(str(term.function), term.timeout_s, term.groupwise, term.options)
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
