"""The served reward, often a mixture of several: what it takes and replies with, metadata, and causes of failures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt
from python_backend.config.reward_terms import MODEL_TERM
from python_backend.rewards.function import PROMPT_KEY, RESPONSE_KEY
from python_backend.rewards.groups import GROUP_KEY
from python_backend.wire.contract import (
    GROUPWISE,
    PROCESS,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_WEIGHTS,
    REWARDS,
    STEP_ENDS,
    STEP_REWARDS,
    TEXTS_ONLY,
)


@dataclass(frozen=True)
class RewardMixture:
    """Names and weights of the rewards that the server sums, empty if only the reward model is served."""

    names: tuple[str, ...] = ()
    groupwise: bool = False  # whether all responses to a prompt must be in one request
    weights: tuple[float, ...] = ()
    granularity: str | None = None  # of a process reward: `step` or `token`
    texts_only: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> RewardMixture:
        """Create the mixture from the `parameters` of reward_model."""
        names, weights = (json.loads(parameters.get(key) or "[]") for key in (REWARD_COMPONENTS, REWARD_WEIGHTS))
        is_groupwise = parameters.get(GROUPWISE) == "true"
        texts_only = parameters.get(TEXTS_ONLY) == "true"
        return cls(tuple(names), is_groupwise, tuple(weights), parameters.get(PROCESS), texts_only)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs to request from reward_model."""
        components = (REWARD_COMPONENTS, REWARD_ERRORS) if self.names else ()
        return (REWARDS, *components, *((STEP_REWARDS, STEP_ENDS) if self.granularity else ()))

    @property
    def model_weight(self) -> float:
        """Weight of the reward model's score."""
        return dict(zip(self.names, self.weights, strict=True)).get(MODEL_TERM, 1.0)

    def beyond_the_model(self, components: Tensor) -> Tensor:
        """Return the weighted sum `[n]` of the components `[n, C]` that are not the reward model's."""
        others = [0.0 if name == MODEL_TERM else weight for name, weight in zip(self.names, self.weights, strict=True)]
        return components.nan_to_num() @ torch.tensor(others)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise PromptError if a prompt column has a name that the actor uses for rewards."""
        reserved = {PROMPT_KEY, RESPONSE_KEY, *((GROUP_KEY,) if self.groupwise else ())}
        for prompt in prompts if self._needs_texts else ():
            taken = reserved & prompt.metadata.keys()
            if taken:
                raise PromptError(
                    f"prompt {prompt.prompt_id} has a column {sorted(taken)[0]!r}, the name under which reward "
                    "functions receive the prompt's or the response's text or group; rename the column"
                )
        for prompt in prompts if self.granularity else ():
            if STEP_ENDS in prompt.metadata:
                raise PromptError(
                    f"prompt {prompt.prompt_id} has a column {STEP_ENDS!r}, the name of a response's steps in its "
                    "metadata; rename the column"
                )

    @property
    def _needs_texts(self) -> bool:
        return bool(self.names or self.granularity or self.texts_only)

    def metadata(self, prompt: Prompt, response: str, group: int) -> dict[str, Any]:
        """Return a row's metadata: the prompt's other columns and, where needed, the texts of prompt and response.

        `group` is the row's group within the request, sent if a function is groupwise.
        """
        texts = {PROMPT_KEY: prompt.text, RESPONSE_KEY: response} if self._needs_texts else {}
        return {**prompt.metadata, **texts, **({GROUP_KEY: group} if self.groupwise else {})}

    def causes(self, answer: Mapping[str, np.ndarray]) -> list[str]:
        """Return why rows of the response `answer` have no reward, one entry per such row."""
        found = answer.get(REWARD_ERRORS)
        return [] if found is None else [item.decode("utf-8", "replace") for item in found[:, 0] if item]
