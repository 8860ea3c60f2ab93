"""Rows of tokens that the policy sampled, with their log-probs and scores; ragged until the training batch.

`n`: tokens of a row, prompt included. Index t of its arrays belongs to token t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow, SampledTurn
from rlhf_triton.checkpoints.special_tokens import without_end


@dataclass(frozen=True, kw_only=True)
class Score:
    """Scores of a row from servers and environment; the reward of a whole conversation belongs to its last row."""

    reward: float = 0.0  # total reward of the conversation
    outcome: float = 0.0  # the part of `reward` that is not in `steps`
    steps: np.ndarray | None = None  # float32 [n], process rewards, each at the last token of its step; None: none
    ends: np.ndarray | None = None  # bool [n], tokens that have a process reward
    values: np.ndarray | None = None  # float32 [n]; None without a critic
    version: int = -1  # version of the critic's weights; -1 without a critic
    components: Mapping[str, float] = field(default_factory=dict)  # terms of the reward; NaN: failed or not applicable
    reward_version: int | None = None  # version of a live reward model
    failure: str = ""  # why the row cannot be trained on; empty if it can
    weights: Mapping[str, float] = field(default_factory=dict)  # a component's weight in the reward; 0: only charted


UNSCORED = Score(failure="it was not scored")


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """A prompt and its response, or one row of a conversation with an environment."""

    prompt: Prompt
    tokens: np.ndarray  # int64 [n]
    sampled: np.ndarray  # bool [n], True where the policy sampled the token
    ended: bool  # ended by an end-of-sequence token, a stop string or the environment, not by a limit
    logprobs: np.ndarray | None = None  # float32 [n], nats, from the engine that sampled; 0 for other tokens
    policy_steps: np.ndarray | None = None  # int64 [n], last update in the weights that sampled the token; -1: none
    turns: tuple[SampledTurn, ...] | None = None  # None without an environment
    messages: tuple[dict[str, Any], ...] = ()  # messages of the conversation after the first row's prompt
    num_prompt_messages: int = 0  # how many of `messages` this row's prompt contains
    truncated: str = ""  # the limit that ended the conversation, such as `environment.max_turns`
    error: str = ""  # why the environment failed, or the policy could not be sampled
    restarts: int = 0  # how often the conversation restarted because its environment was lost
    policy_logprobs: np.ndarray | None = None  # float32 [n], see `Policy.sampled_logprobs`
    ref_logprobs: np.ndarray | None = None  # float32 [n], under the reference
    score: Score = UNSCORED

    def with_score(self, **changes: Any) -> RolloutRow:
        """Return a copy with these fields of the score changed."""
        return dataclasses.replace(self, score=dataclasses.replace(self.score, **changes))


Conversation = tuple[RolloutRow, ...]
"""The rows of a conversation, in order. A response to a plain prompt is a conversation with a single row."""


@dataclass(frozen=True)
class Group:
    """The conversations that start from one prompt."""

    conversations: tuple[Conversation, ...]
    number: int = -1  # its place in the order of prompts; -1 if no step has taken it


def conversations_of(groups: Sequence[Group]) -> list[Conversation]:
    """Return the conversations of all groups, in order."""
    return [conversation for group in groups for conversation in group.conversations]


def rows_of(conversations: Sequence[Conversation]) -> list[RolloutRow]:
    """Return the rows of all conversations, in order."""
    return [row for conversation in conversations for row in conversation]


def failure_of(conversation: Conversation) -> str:
    """Return why a conversation cannot be trained on: the first failure among its rows; "" if there is none."""
    return next((row.score.failure for row in conversation if row.score.failure), "")


def scores_of(conversations: Sequence[Conversation]) -> list[Score]:
    """Return the scores of the conversations that can be trained on."""
    return [conversation[-1].score for conversation in conversations if not failure_of(conversation)]


def fit_float32(scores: Sequence[Score]) -> bool:
    """Return whether the rewards of a conversation's rows are finite in float32, the batch's dtype, in any sum."""
    parts = [np.append(score.outcome, [] if score.steps is None else score.steps) for score in scores]
    return bool(np.abs(np.concatenate(parts)).sum() <= np.finfo(np.float32).max)


def row_of_response(prompt: Prompt, response: PolicyTurn) -> RolloutRow:
    """Return the row of a prompt and its response."""
    size = len(prompt.tokens)
    row = np.concatenate([prompt.tokens, np.asarray(response.tokens, np.int64)])
    logprobs = None if response.logprobs is None else np.array([0.0] * size + response.logprobs, np.float32)
    steps = None if response.versions is None else np.array([-1] * size + response.versions, np.int64)
    return RolloutRow(
        prompt=prompt,
        tokens=row,
        sampled=np.arange(len(row)) >= size,
        ended=response.ended,
        logprobs=logprobs,
        policy_steps=steps,
        error=response.error,
    )


def conversation_of(
    rows: Sequence[tuple[Prompt, RecordedRow]], *, truncated: str = "", error: str = "", num_prompt_messages: int = 0
) -> Conversation:
    """Return the conversation with these rows, in order, each given with the prompt that it starts with.

    `truncated`, `error` and `num_prompt_messages` are fields of `RolloutRow`.
    """
    converted = []
    for prompt, row in rows:
        logprobs = np.array(row.logprobs, np.float32)
        converted.append(
            RolloutRow(
                prompt=prompt,
                tokens=np.array(row.tokens, np.int64),
                sampled=~np.array(row.observed, np.bool_),
                ended=bool(row.turns) and not truncated and not error,
                logprobs=None if np.isnan(logprobs).any() else logprobs,
                policy_steps=np.array([-1 if step is None else step for step in row.versions], np.int64),
                turns=tuple(row.turns),
                messages=tuple(row.messages),
                num_prompt_messages=num_prompt_messages,
                truncated=truncated,
                error=error,
            )
        )
    return tuple(converted)


def policy_staleness(rows: Sequence[RolloutRow], step: int, *, warmup_steps: int = 0) -> int:
    """Return the number of updates between the oldest weights that sampled a token of the rows and those of `step`.

    `warmup_steps`: first steps of the run, which do not update the policy.
    """
    oldest = [row.policy_steps[row.sampled].min() for row in rows if row.policy_steps is not None and row.sampled.any()]
    last = max(step - 1, warmup_steps)
    return last - max(warmup_steps, int(min(oldest, default=last)))


def text_indices(row: RolloutRow, tokenizer: Any) -> list[int]:
    """Return the indices of all tokens except the end tokens of the policy's turns, which readers do not need."""
    length = len(row.tokens)
    ends = set[int]()
    turns = [(turn.start, turn.end) for turn in row.turns or ()]
    for begin, end in turns or [(len(row.prompt.tokens), length)]:
        text_tokens = without_end(tokenizer, row.tokens[begin:end].tolist())
        ends.update(range(begin + len(text_tokens), end))
    return [index for index in range(length) if index not in ends]


def padded(rows: Sequence[np.ndarray]) -> Tensor:
    """Return arrays `[n]` as one tensor `[rows, longest n]`, padded with 0 on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
