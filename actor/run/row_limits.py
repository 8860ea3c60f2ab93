"""Compares the longest rows of a run with what policy, reward model, critic and reference take, before it starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import max_positions, stable_length
from python_backend.checkpoints.tokenization import LONGEST_ROW_TOKENS, same_tokenizer
from python_backend.config import ConfigError, RunConfig
from python_backend.store.durable import read_json


def check_lengths(config: RunConfig) -> None:
    """Check that no model refuses the longest rows of the run, so that no response is masked for its length.

    Of the policy, only a rotary table that depends on the length can be known here, unless vLLM serves it; the actor
    checks the rest. A model whose checkpoint is not on this machine is compared by its `max_length` alone.

    Raises:
        ConfigError: one line for each model that takes shorter rows only.
    """
    longest, why = config.longest_row
    limit_of = max_positions if config.actor.generation.engine == "vllm" else stable_length
    limits = {"actor.policy.model": _limit(limit_of, config.actor.policy.model) or longest}
    for role, section in config.served_sections.items():
        known = (section.max_length, _limit(max_positions, section.model))
        limits[f"{role}.model"] = min(filter(None, known), default=LONGEST_ROW_TOKENS)
    short = {key: limit for key, limit in limits.items() if limit < longest}
    if "reward.model" in short and not _reward_refuses(config):
        del short["reward.model"]
    if short:
        raise ConfigError(
            "\n".join(f"{key}: takes rows of at most {limit} tokens, but {why}" for key, limit in short.items())
        )


def _reward_refuses(config: RunConfig) -> bool:
    """Return whether the reward model refuses rows above its limit, counted in the policy's tokens.

    It truncates texts, except where the end of a row must be there. Texts in another model's tokens are not counted;
    those in the policy's are nearly as long as its rows, and must not lose the reply.
    """
    reward = config.reward
    if not reward.model.is_dir():
        return False
    needs_end = reward.process or reward.template or reward.logit
    return (needs_end or reward.text != "pair") and same_tokenizer(config.actor.policy.model, reward.model)


def _limit(limit_of: Callable[[dict[str, Any]], int | None], checkpoint: Path) -> int | None:
    try:
        return limit_of(read_json(checkpoint / "config.json") or {})
    except ValueError as error:
        raise ConfigError(f"{checkpoint}: {error}") from error
