"""Checks before a run that policy, reward model, critic and reference accept the longest rows of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.actor.data.prompt_files import PromptError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, read_config
from rlhf_triton.checkpoints.row_length import max_positions, stable_length
from rlhf_triton.checkpoints.tokenization import MAX_ROW_TOKENS, encode_bare_text
from rlhf_triton.checkpoints.tokenizer_loading import same_tokenizer
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import ModelSection

TRIAL_REPLY = "This is a trial response."


def check_lengths(config: RunConfig) -> None:
    """Check that every model accepts the longest rows of the run, so that no response is masked for its length.

    For the policy, unless vLLM serves it, only a rotary table that depends on the length is checked here; the actor
    checks the rest. A model whose checkpoint is not on this machine is checked by its `max_length` alone.

    Raises:
        ConfigError: has a line for each model whose limit is lower.
    """
    longest, why = config.longest_row
    limit_of = max_positions if config.actor.generation.engine == "vllm" else stable_length
    limits = {"actor.policy.model": _positions(limit_of, config.actor.policy.model) or longest}
    for role, section in config.served_sections.items():
        limits[f"{role}.model"] = _limit(section)
    short = {key: limit for key, limit in limits.items() if limit < longest}
    if "reward.model" in short and not _reward_refuses(config):
        del short["reward.model"]
    if short:
        raise ConfigError(
            "\n".join(f"{key}: takes rows of at most {limit} tokens, but {why}" for key, limit in short.items())
        )


def check_renderings(
    config: RunConfig, tokenizer: Any, prompts: Sequence[Prompt], size_of: Callable[[Prompt], int]
) -> None:
    """Check that the reward model's own rendering of each prompt with a reply fits its limit; it truncates no reply.

    The rendering may have more tokens than the policy's row: special tokens, the end of a turn, the template's system
    prompt, or a whole chat that is truncated for the policy.

    Args:
        tokenizer: the policy's tokenizer.
        prompts: some prompts of the run, from `PromptReader.fitted`.
        size_of: returns the number of tokens in the reward model's rendering of a prompt and `TRIAL_REPLY`.

    Raises:
        PromptError: no reply fits behind a prompt.
        ConfigError: the longest rows of the run would not fit.
    """
    limit = _limit(config.reward)
    longest, why = config.longest_row
    counts = _reward_refuses(config) and config.reward.template is None
    in_policy = len(encode_bare_text(tokenizer, TRIAL_REPLY))
    for prompt in prompts:
        size = size_of(prompt)
        if size > limit:
            raise PromptError(
                f"{prompt.where}: {size} tokens as reward.model renders it with a short reply, but its limit is "
                f"{limit} (reward.max_length); shorten or remove the row"
            )
        extra = size - prompt.tokens.size - in_policy
        if counts and longest + extra > limit:
            raise ConfigError(
                f"reward.model: takes rows of at most {limit} tokens, and its own rendering of {prompt.where} has "
                f"{extra} more than the policy's, but {why}"
            )


def _reward_refuses(config: RunConfig) -> bool:
    """Return whether the reward model tokenises as the policy does, so that it would refuse rows above its limit.

    With another tokenizer the number of its tokens is unknown. A row with a reply is never truncated.
    """
    return config.reward.model.is_dir() and same_tokenizer(config.actor.policy.model, config.reward.model)


def _limit(section: ModelSection) -> int:
    """Return the maximum number of tokens in a row of a served model."""
    limits = (section.max_length, _positions(max_positions, section.model))
    return min(filter(None, limits), default=MAX_ROW_TOKENS)


def _positions(limit_of: Callable[[dict[str, Any]], int | None], checkpoint: Path) -> int | None:
    if not (checkpoint / CONFIG_FILE).is_file():
        return None
    try:
        return limit_of(read_config(checkpoint))
    except ValueError as error:
        raise ConfigError(f"{checkpoint}: {error}") from error
