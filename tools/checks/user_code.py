"""Tries a user's code before a run: reward functions and environments, in workers as on the server and in the actor."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf_triton.actor.data.chat import Chat, TemplateError
from rlhf_triton.actor.data.prompt_files import PromptError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.environments.pool import SEED, EnvironmentFailed, Environments
from rlhf_triton.actor.run.row_limits import TRIAL_REPLY
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.required_files import tokenizer_folder
from rlhf_triton.config.run_config import ConfigError
from rlhf_triton.errors import FunctionError
from rlhf_triton.rewards.pool import FunctionCall, WorkerPool
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, Sample
from rlhf_triton.tools.checks.findings import Finding, failed, warning
from rlhf_triton.tools.checks.prompt_rows import CheckedRun, check_rendering, row_texts


def reward_functions(run: CheckedRun) -> Iterator[Finding]:
    """Call each reward function on the first prompt, with a made-up response."""
    config = run.config
    if not config.functions:
        return
    prompts = run.prompts
    tokenizer = load_tokenizer(tokenizer_folder(config) or config.actor.policy.model)
    columns = sorted({name for prompt in prompts for name in prompt.metadata})
    has_failed = False
    for name, term in config.functions.items():
        size = config.actor.algorithm.responses_per_prompt if term.groupwise else 1
        group = [_sample(prompts[0], tokenizer)] * size
        call = FunctionCall(
            spec=str(term.function),
            timeout_s=term.timeout_s,
            timeout_key=f"rewards.{name}.timeout_s",
            groupwise=term.groupwise,
            options=term.options,
            hidden_variables=config.hidden_variables(term.options),
            columns=columns,
        )
        if error := _trial(call, group):
            has_failed = True
            where = f"{term.function} fails on the first prompt ({prompts[0].where})"
            yield failed("rewards", f"rewards.{name}.function: {where}: {error}")
    if not has_failed:
        yield Finding("rewards", f"{', '.join(config.functions)}: called on the first prompt")


def _trial(call: FunctionCall, group: list[Sample]) -> str:
    """Call a reward function once, in its own worker; return the problem, "" if there is none."""
    try:
        with contextlib.closing(WorkerPool(call, num_workers=1)) as pool:
            (outcomes,) = pool.submit([group]).result()
            return next((outcome.error for outcome in outcomes if outcome.error), "")
    except FunctionError as error:
        return str(error)


def environment(run: CheckedRun) -> Iterator[Finding]:
    """Start a worker of the environment, which imports its class or agent, and its reward; try the first prompt.

    Its tools must be in the reward model's rendering, too.
    """
    config = run.config
    if config.environment is None:
        return
    prompts = run.prompts

    async def tools_of(settings: EnvironmentSection) -> Sequence[dict[str, Any]] | None:
        environments = Environments(
            settings.model_copy(update={"workers": 1}), hidden_variables=config.hidden_variables(settings.options)
        )
        try:
            await environments.start()
            if settings.class_ is not None and prompts:
                await _try_environment(environments, prompts[0])
        finally:
            await environments.close()
        return environments.tools

    try:
        chat = Chat(load_tokenizer(config.actor.policy.model), asyncio.run(tools_of(config.environment)))
        first = next((prompt for prompt in prompts if MESSAGES_KEY in prompt.metadata), None)
        if config.uses_reward_model and first is not None:
            tokens = chat.tokenizer(chat.prompt(first.metadata[MESSAGES_KEY]), add_special_tokens=False)["input_ids"]
            variables = {**first.metadata, **chat.options}
            check_rendering(config, chat.tokenizer, [replace(first, tokens=np.array(tokens), metadata=variables)])
    except EnvironmentFailed as error:
        if error.is_misused:
            yield failed("environment", str(error))
        else:
            where = prompts[0].where
            yield warning("environment", f"fails on the first prompt ({where}), which masks its responses: {error}")
    except (FunctionError, PromptError, TemplateError, ConfigError) as error:
        yield failed("environment", str(error))
    else:
        yield Finding("environment", "starts, and takes the first prompt")


async def _try_environment(environments: Environments, prompt: Prompt) -> None:
    """Reset an instance with the prompt, and let it answer a made-up reply if it has no tools.

    Raises EnvironmentFailed if `reset` fails, or if `step` returns an invalid result, or has a defect; `step` may
    refuse this reply.
    """
    shown = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
    instance = await environments.open({SEED: 0, **prompt.metadata, **shown})
    try:
        if environments.tools is None:
            await instance.step(TRIAL_REPLY)
    except EnvironmentFailed as error:
        if error.is_misused:
            raise
    finally:
        await instance.close()


def _sample(prompt: Prompt, tokenizer: Any) -> Sample:
    text, metadata = row_texts(prompt, TRIAL_REPLY)
    return Sample(text, tokenizer(text, add_special_tokens=False)["input_ids"], metadata)
