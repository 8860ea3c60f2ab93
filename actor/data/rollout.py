"""Data of one training step, one frozen dataclass per stage, with the shape of every field.

`B`: number of responses. `S`: tokens of the longest prompt + response; other rows are padded on the right. Position t
of a tensor `[B, S-1]` belongs to token t+1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.checkpoints.tokenization import without_end


def response_mask(prompt_lengths: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Return a mask that is 1 where position t scores a response token: t in [prompt_length - 1, length - 1).

    The first 1 scores the first response token; the last 1, at `length - 2`, scores the last token of the
    sequence (the EOS, if the response has one). An empty response gives a row of zeros.

    Args:
        prompt_lengths: `[B]`, tokens of the prompt, at least 1, because no position scores token 0.
        lengths: `[B]`, tokens of prompt + response.
        num_tokens: S, the padded length.

    Returns: float32 mask `[B, S-1]`.
    Raises: ValueError unless 1 <= prompt_lengths <= lengths <= num_tokens in every row.
    """
    if prompt_lengths.ndim != 1 or prompt_lengths.shape != lengths.shape:
        shapes = f"{tuple(prompt_lengths.shape)} and {tuple(lengths.shape)}"
        raise ValueError(f"prompt_lengths and lengths must both be [B], got {shapes}")
    for row, (prompt, length) in enumerate(zip(prompt_lengths.tolist(), lengths.tolist(), strict=True)):
        if not 1 <= prompt <= length <= num_tokens:
            got = f"{prompt}, {length}, {num_tokens} in row {row}"
            raise ValueError(f"need 1 <= prompt_lengths <= lengths <= num_tokens, got {got}")
    positions = torch.arange(num_tokens - 1, device=lengths.device)
    return ((positions >= prompt_lengths[:, None] - 1) & (positions < lengths[:, None] - 1)).float()


def joined(tensors: Sequence[Tensor], width: int, *, padding: int = 0) -> Tensor:
    """Concatenate tensors `[B_i, S_i]`, padded on the right to `width`, into one of `[B, width]`."""
    return torch.cat([torch.nn.functional.pad(each, (0, width - each.shape[1]), value=padding) for each in tensors])


@dataclass(frozen=True)
class Trajectory:
    """How a conversation between the policy and an environment went."""

    turns: tuple[SampledTurn, ...]
    messages: tuple[dict[str, Any], ...] = ()  # of the chat, for the reader
    truncated: str = ""  # the limit that ended it, such as `environment.max_turns`; empty: none
    error: str = ""  # why the environment failed; empty: it did not
    restarts: int = 0  # how often it has begun again, as its environment was lost
    known: int = 0  # how many of `messages` the row's prompt has, too
    later: float = 0.0  # rewards of turns in other rows of the conversation, which came after this row's last one


@dataclass(frozen=True)
class Rollout:
    """Prompts and the policy's responses, or its conversations with environments."""

    prompts: list[Prompt]  # B
    tokens: Tensor  # int64 [B, S], prompt + response
    lengths: Tensor  # int64 [B], prompt + response
    prompt_lengths: Tensor  # int64 [B]
    is_end: Tensor  # bool [B], ended by an end-of-sequence token or a stop string, or by the environment
    logprobs: Tensor | None = None  # float32 [B, S-1] from generation, 0 outside the responses
    observed: Tensor | None = None  # bool [B, S], tokens of environments within the responses; None: there are none
    trajectories: list[Trajectory] | None = None  # B; None without environments
    others: tuple[Rollout, ...] = ()  # further rows of the same conversations
    owners: Tensor | None = None  # int64 [B], the row whose conversation each belongs to; None: its own

    @property
    def exact_turns(self) -> float:
        """Share of all turns whose tokens in the rows are those that were sampled."""
        exact = [
            [*turn.tokens] == row[turn.start : turn.end].tolist()
            for part in (self, *self.others)
            for row, trajectory in zip(part.rows(), part.trajectories or [], strict=True)
            for turn in trajectory.turns
        ]
        return sum(exact) / max(1, len(exact))

    @property
    def mask(self) -> Tensor:
        """1 where position t scores a token that the policy sampled, float32 `[B, S-1]`."""
        mask = response_mask(self.prompt_lengths, self.lengths, self.tokens.shape[1])
        return mask if self.observed is None else mask * ~self.observed[:, 1:]

    def rows(self, part: slice = slice(None)) -> list[np.ndarray]:
        """Return the unpadded token rows, int64 `[length]` each, by default of all prompts."""
        return [row[:n].numpy() for row, n in zip(self.tokens[part], self.lengths[part].tolist(), strict=True)]

    def select(self, rows: Tensor) -> Rollout:
        """Return the given rows (int64 indices `[n]`), in that order, without their others."""
        return Rollout(
            [self.prompts[i] for i in rows.tolist()],
            self.tokens[rows],
            self.lengths[rows],
            self.prompt_lengths[rows],
            self.is_end[rows],
            None if self.logprobs is None else self.logprobs[rows],
            None if self.observed is None else self.observed[rows],
            None if self.trajectories is None else [self.trajectories[i] for i in rows.tolist()],
        )


def text_places(rollout: Rollout, index: int, tokenizer: Any) -> list[int]:
    """Return the indices of a row's tokens that have a text for readers: all but those that end the policy's turns."""
    length, start = int(rollout.lengths[index]), int(rollout.prompt_lengths[index])
    turns = rollout.trajectories[index].turns if rollout.trajectories else ()
    ends = set[int]()
    for begin, end in [(turn.start, turn.end) for turn in turns] or [(start, length)]:
        said = without_end(tokenizer, rollout.tokens[index, begin:end].tolist())
        ends.update(range(begin + len(said), end))
    return [place for place in range(length) if place not in ends]


def join_rollouts(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Concatenate rollouts, padded to the longest row, without their others."""
    width = max(part.tokens.shape[1] for part in parts)
    observed = [part.observed for part in parts if part.observed is not None]
    owners = [part.owners for part in parts if part.owners is not None]
    return Rollout(
        [prompt for part in parts for prompt in part.prompts],
        joined([part.tokens for part in parts], width, padding=pad_id),
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.prompt_lengths for part in parts]),
        torch.cat([part.is_end for part in parts]),
        joined_logprobs([part.logprobs for part in parts], width),
        joined(observed, width) if observed else None,
        [each for part in parts for each in part.trajectories or ()] or None,
        owners=torch.cat(owners) if len(owners) == len(parts) else None,
    )


def joined_logprobs(parts: Sequence[Tensor | None], width: int) -> Tensor | None:
    """Concatenate log-probs `[B_i, S_i - 1]` of several rollouts, padded to `width - 1`; None if some have none."""
    known = [part for part in parts if part is not None]
    return joined(known, width - 1) if len(known) == len(parts) else None


@dataclass(frozen=True)
class ProcessRewards:
    """Rewards within the responses: of the steps, or of the tokens."""

    rewards: Tensor  # float32 [B, S], the reward given at token t; 0 where none
    ends: Tensor  # bool [B, S], tokens at which a reward is given
    outcome: Tensor  # float32 [B], score of the response beyond them: of the other terms of a weighted sum

    def select(self, rows: Tensor) -> ProcessRewards:
        """Return the rewards of `rows` (int64 indices `[n]`), in that order."""
        return ProcessRewards(self.rewards[rows], self.ends[rows], self.outcome[rows])

    def replaced(self, rows: Tensor, by: ProcessRewards) -> ProcessRewards:
        """Return these rewards, with those of `by` in `rows` (int64 indices `[n]`)."""
        return ProcessRewards(
            self.rewards.index_copy(0, rows, by.rewards),
            self.ends.index_copy(0, rows, by.ends),
            self.outcome.index_copy(0, rows, by.outcome),
        )


@dataclass(frozen=True)
class Scores:
    """The server's scores; `scored` is False in rows whose score is unavailable."""

    rewards: Tensor  # float32 [B]; 0 where not scored, and ignored there
    values: Tensor  # float32 [B, S]
    versions: Tensor  # int64 [B], weights version that computed the values; -1 without values
    scored: Tensor  # bool [B]
    failures: list[str]  # the distinct causes of unavailable scores
    components: dict[str, Tensor] = field(default_factory=dict)  # float32 [B] of each reward; NaN where it failed
    reward_versions: Tensor | None = None  # int64 [B], version of a live reward model, -1 where unavailable
    process: ProcessRewards | None = None  # `rewards` are then the aggregates of each response's steps

    @property
    def has_values(self) -> bool:
        """Whether a critic computed values."""
        return bool((self.versions >= 0).any())

    @property
    def reward_version(self) -> int | None:
        """Newest version of a live reward model among the rows; None if it is not live, or has scored no row."""
        newest = -1 if self.reward_versions is None else int(self.reward_versions.max())
        return None if newest < 0 else newest

    def select(self, rows: Tensor) -> Scores:
        """Return the scores of `rows` (int64 indices `[n]`), in that order."""
        components = {name: values[rows] for name, values in self.components.items()}
        return Scores(
            self.rewards[rows],
            self.values[rows],
            self.versions[rows],
            self.scored[rows],
            self.failures,
            components,
            None if self.reward_versions is None else self.reward_versions[rows],
            None if self.process is None else self.process.select(rows),
        )


@dataclass(frozen=True)
class ReferenceLogprobs:
    """Log-probs of a rollout under the reference, the policy's frozen initial weights."""

    logprobs: Tensor  # float32 [B, S-1]; 0 in rows that are not known
    known: Tensor  # bool [B], rows whose log-probs are available
    failures: list[str]  # the distinct causes of unavailable rows


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with everything that the advantages need."""

    rollout: Rollout
    scores: Scores
    logprobs: Tensor | None  # float32 [B, S-1], under the policy that sampled the responses; None: not needed
    ref_logprobs: Tensor | None  # float32 [B, S-1], under the reference; ignored where not scored; None: not needed
    old_logprobs: Tensor | None = None  # float32 [B, S-1], which the probability ratio compares with; None: `logprobs`
    others: ScoredRollout | None = None  # further rows of the same conversations, whose `owners` are rows of this one

    def select(self, rows: Tensor) -> ScoredRollout:
        """Return the given rows (int64 indices `[n]`), in that order."""
        given = (self.logprobs, self.ref_logprobs, self.old_logprobs)
        own, ref, old = (None if tensor is None else tensor[rows] for tensor in given)
        found = ScoredRollout(self.rollout.select(rows), self.scores.select(rows), own, ref, old)
        if self.others is None:
            return found
        return replace(found, others=self.others.of_owners({row: place for place, row in enumerate(rows.tolist())}))

    def of_owners(self, places: Mapping[int, int]) -> ScoredRollout | None:
        """Return the rows of the owners in `places`, whose values are their owners then; None if there are none."""
        assert self.rollout.owners is not None
        kept = [(i, places[owner]) for i, owner in enumerate(self.rollout.owners.tolist()) if owner in places]
        if not kept:
            return None
        rows, owners = torch.tensor(kept).T
        part = self.select(rows)
        return replace(part, rollout=replace(part.rollout, owners=owners))


@dataclass(frozen=True)
class PPOBatch:
    """The batch that policy and critic train on."""

    tokens: Tensor  # int64 [B, S]
    lengths: Tensor  # int64 [B]
    mask: Tensor  # float32 [B, S-1], 1 where a response token of a scored row is predicted
    policy_weights: Tensor  # float32 [B, S-1], weight of each token in the loss's means; 0 outside the mask
    logprobs: Tensor | None  # float32 [B, S-1], old log-probs; None if not needed because the ratio is 1
    ref_logprobs: Tensor | None  # float32 [B, S-1]; None if no KL is used or measured
    advantages: Tensor  # float32 [B, S-1], 0 outside the tokens that the policy learns from
    returns: Tensor  # float32 [B, S-1]
    prev_values: Tensor  # float32 [B, S-1]
    kl: Tensor | None  # float32 [B, S-1], KL estimate per token, not multiplied by kl_coef; None if not measured
    rewards_to_go: Tensor | None = None  # float32 [B, S-1], Monte-Carlo returns; None without a critic
    importance: Tensor | None = None  # float32 [B, S-1], factor of each token's policy loss; None: 1
    groups: Tensor | None = None  # int64 [B], equal for responses to the same prompt; None: all different
    versions: Tensor | None = None  # int64 [B], version of the critic that scored the row; None or -1 without a critic
    positive: Tensor | None = None  # bool [B], positive scores; None unless their likelihood is in the loss
    sampled_logprobs: Tensor | None = None  # float32 [B, S-1], of the engine that sampled, for importance factors

    def first(self, rows: int, width: int) -> PPOBatch:
        """Return the first rows, and of these the first `width` tokens."""
        found = {name: tensor[:rows] for name, tensor in vars(self).items() if tensor is not None}
        wide = {name: tensor for name, tensor in found.items() if tensor.ndim == 2}
        return replace(self, **found | {name: each[:, : width - (name != "tokens")] for name, each in wide.items()})
