"""Mixtures of rewards that the server sums: reward names, metadata for reward functions, and causes of failures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt
from python_backend.rewards.function import PROMPT_KEY, RESPONSE_KEY
from python_backend.wire.contract import REWARD_COMPONENTS, REWARD_ERRORS, REWARDS


@dataclass(frozen=True)
class RewardMixture:
    """Names of the rewards that the server sums; empty if only the reward model is served."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> RewardMixture:
        """Create the mixture from the `parameters` of reward_model."""
        return cls(tuple(json.loads(parameters.get(REWARD_COMPONENTS) or "[]")))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs to request from reward_model."""
        return (REWARDS, REWARD_COMPONENTS, REWARD_ERRORS) if self.names else (REWARDS,)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise PromptError if a prompt column has a name that the actor uses for reward functions."""
        for prompt in prompts if self.names else ():
            taken = {PROMPT_KEY, RESPONSE_KEY} & prompt.metadata.keys()
            if taken:
                raise PromptError(
                    f"prompt {prompt.prompt_id} has a column {sorted(taken)[0]!r}, the name under which reward "
                    "functions receive the prompt's or the response's text; rename the column"
                )

    def metadata(self, prompt: Prompt, response: str) -> dict[str, Any]:
        """Return a row's metadata: the prompt's other columns and, for a mixture, the texts of prompt and response."""
        texts = {PROMPT_KEY: prompt.text, RESPONSE_KEY: response} if self.names else {}
        return {**prompt.metadata, **texts}

    def causes(self, answer: Mapping[str, np.ndarray]) -> list[str]:
        """Return why rows of the response `answer` have no reward, one entry per such row."""
        found = answer.get(REWARD_ERRORS)
        return [] if found is None else [item.decode("utf-8", "replace") for item in found[:, 0] if item]
