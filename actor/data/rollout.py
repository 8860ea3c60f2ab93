"""What travels through one PPO step: one frozen dataclass per hop, with the shape of every field.

`B` responses; `S` tokens of the longest prompt + response, padded on the right. Tensors `[B, S-1]` hold at position t
what belongs to token t+1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file."""

    prompt_id: str
    text: str
    tokens: np.ndarray  # int64 [P]
    metadata: dict[str, Any] = field(default_factory=dict)  # the line's other columns


@dataclass(frozen=True)
class Rollout:
    """What the policy wrote."""

    prompts: list[Prompt]  # B
    tokens: Tensor  # int64 [B, S], prompt + response
    lengths: Tensor  # int64 [B], prompt + response
    prompt_lengths: Tensor  # int64 [B]
    is_end: Tensor  # bool [B], the response ended by itself
    logprobs: Tensor | None = None  # float32 [B, S-1] as generation computed them, 0 outside the responses

    def rows(self) -> list[np.ndarray]:
        """Unpadded token rows, int64 `[length]` each."""
        return [row[:length].numpy() for row, length in zip(self.tokens, self.lengths.tolist(), strict=True)]

    def select(self, rows: Tensor) -> Rollout:
        """The given rows, int64 `[n]`, in that order."""
        return Rollout(
            [self.prompts[i] for i in rows.tolist()], self.tokens[rows], self.lengths[rows], self.prompt_lengths[rows],
            self.is_end[rows], None if self.logprobs is None else self.logprobs[rows],
        )  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """What the server said; a row whose score is unavailable is not `scored`."""

    rewards: Tensor  # float32 [B]; 0 where not scored, never used there
    values: Tensor  # float32 [B, S]
    versions: Tensor  # int64 [B], weights version of the values; -1 where there are none
    scored: Tensor  # bool [B]
    failures: list[str]  # the distinct causes
    components: dict[str, Tensor] = field(default_factory=dict)  # float32 [B] of each reward; NaN where it failed

    @property
    def has_values(self) -> bool:
        """Whether a critic was asked."""
        return bool((self.versions >= 0).any())

    def select(self, rows: Tensor) -> Scores:
        """The scores of `rows`, int64 `[n]`, in that order."""
        components = {name: values[rows] for name, values in self.components.items()}
        return Scores(
            self.rewards[rows], self.values[rows], self.versions[rows], self.scored[rows], self.failures, components
        )


@dataclass(frozen=True)
class ReferenceLogprobs:
    """What the policy's frozen start says of a rollout."""

    logprobs: Tensor  # float32 [B, S-1]; 0 where not known
    known: Tensor  # bool [B]
    failures: list[str]  # the distinct causes


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with everything that the advantages need."""

    rollout: Rollout
    scores: Scores
    logprobs: Tensor | None  # float32 [B, S-1], under the policy that sampled; None: not needed
    ref_logprobs: Tensor | None  # float32 [B, S-1], under the reference; never used where not scored; None: not needed


@dataclass(frozen=True)
class PPOBatch:
    """What both updates train on."""

    tokens: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [B]
    mask: Tensor  # float32 [B, S-1], 1 where a response token of a scored row is predicted
    policy_weights: Tensor  # float32 [B, S-1], what each token counts in the policy's loss; 0 outside the mask
    logprobs: Tensor | None  # float32 [B, S-1]; None where the update is the first since sampling
    ref_logprobs: Tensor | None  # float32 [B, S-1]; None where no KL is charged or measured
    advantages: Tensor  # float32 [B, S-1], 0 where the policy does not learn
    returns: Tensor  # float32 [B, S-1]
    prev_values: Tensor  # float32 [B, S-1]
    kl: Tensor | None  # float32 [B, S-1], estimate of each token, not weighed; None where it was not measured
    rewards_to_go: Tensor | None = None  # float32 [B, S-1], Monte-Carlo returns; None without a critic
