"""Samples: what the policy sampled and what it was given for it, one ragged row each until the training batch.

`n`: tokens of a sample, prompt included. Index t of its arrays belongs to token t.
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
from rlhf_triton.checkpoints.tokenization import without_end


@dataclass(frozen=True)
class Score:
    """Scores of a sample from servers and environment; rewards of a whole conversation belong to its last row."""

    reward: float = 0.0  # of the conversation
    outcome: float = 0.0  # the part of it that is not among `steps`
    steps: np.ndarray | None = None  # float32 [n], rewards at the tokens that they are given for; None: there are none
    ends: np.ndarray | None = None  # bool [n], whether one is given at the token
    values: np.ndarray | None = None  # float32 [n]; None without a critic
    version: int = -1  # of the critic's weights
    components: Mapping[str, float] = field(default_factory=dict)  # each reward; NaN where it failed or does not apply
    reward_version: int | None = None  # of a live reward model
    failure: str = ""  # why the sample cannot be trained on; empty: it can


UNSCORED = Score(failure="it was not scored")


@dataclass(frozen=True)
class SampledRow:
    """A prompt and its response, or one row of a conversation with an environment."""

    prompt: Prompt
    tokens: np.ndarray  # int64 [n]
    sampled: np.ndarray  # bool [n], by the policy
    ended: bool  # by an end-of-sequence token, a stop string or the environment, not by a limit
    logprobs: np.ndarray | None = None  # float32 [n], nats, of the engine that sampled; 0 where it did not
    turns: tuple[SampledTurn, ...] | None = None  # None without an environment
    messages: tuple[dict[str, Any], ...] = ()  # of the conversation behind the first row's prompt, for the reader
    known: int = 0  # how many of them the prompt has
    truncated: str = ""  # the limit that ended the conversation, such as `environment.max_turns`
    error: str = ""  # why the environment failed
    restarts: int = 0  # how often the conversation has begun again, as its environment was lost
    policy_logprobs: np.ndarray | None = None  # float32 [n], of a forward pass of the policy that sampled
    ref_logprobs: np.ndarray | None = None  # float32 [n], under the reference
    score: Score = UNSCORED

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SampledRow:
        """Return the sample that another rank has sent as JSON, before it was scored."""
        arrays = {"tokens": np.int64, "sampled": np.bool_, "logprobs": np.float32}
        given = {name: value for name, value in fields.items() if name != "score"}
        given |= {name: np.array(given[name], kind) for name, kind in arrays.items() if given[name] is not None}
        turns = given["turns"]
        if turns is not None:
            turns = tuple(SampledTurn(**{**turn, "tokens": tuple(turn["tokens"])}) for turn in turns)
        return cls(
            **{**given, "prompt": Prompt.of(given["prompt"]), "turns": turns, "messages": tuple(given["messages"])}
        )

    def scored(self, **changes: Any) -> SampledRow:
        """Return the sample with these fields of its score changed."""
        return dataclasses.replace(self, score=dataclasses.replace(self.score, **changes))


Conversation = tuple[SampledRow, ...]
"""The rows of a conversation, of which the last one has its end; a response to a prompt is one of a single row."""


@dataclass(frozen=True)
class Group:
    """The conversations about one prompt."""

    conversations: tuple[Conversation, ...]


def conversations_of(groups: Sequence[Group]) -> list[Conversation]:
    """Return the conversations of all groups, in order."""
    return [conversation for group in groups for conversation in group.conversations]


def rows_of(conversations: Sequence[Conversation]) -> list[SampledRow]:
    """Return the rows of all conversations, in order."""
    return [row for conversation in conversations for row in conversation]


def failure_of(conversation: Conversation) -> str:
    """Return why a conversation cannot be trained on: the failure of one of its rows; "" if there is none."""
    return next((row.score.failure for row in conversation if row.score.failure), "")


def sample_of(prompt: Prompt, response: PolicyTurn) -> SampledRow:
    """Return the sample of a prompt and its response."""
    size = len(prompt.tokens)
    row = np.concatenate([prompt.tokens, np.asarray(response.tokens, np.int64)])
    known = None if response.logprobs is None else np.array([0.0] * size + response.logprobs, np.float32)
    return SampledRow(prompt, row, np.arange(len(row)) >= size, response.ended, known)


def conversation_of(
    rows: Sequence[tuple[Prompt, RecordedRow]], *, truncated: str = "", error: str = "", known: int = 0
) -> Conversation:
    """Return the rows of a conversation that have begun with these prompts, in order; the last one has its end.

    Args:
        truncated, error, known: as of `SampledRow`.
    """
    found = []
    for prompt, row in rows:
        logprobs = np.array(row.logprobs, np.float32)
        found.append(
            SampledRow(
                prompt,
                np.array(row.tokens, np.int64),
                sampled=~np.array(row.observed, np.bool_),
                ended=bool(row.turns) and not truncated and not error,
                logprobs=None if np.isnan(logprobs).any() else logprobs,
                turns=tuple(row.turns),
                messages=tuple(row.messages),
                known=known,
                truncated=truncated,
                error=error,
            )
        )
    return tuple(found)


def text_places(sample: SampledRow, tokenizer: Any) -> list[int]:
    """Return the indices of the tokens that have a text for readers: all but those that end the policy's turns."""
    length = len(sample.tokens)
    ends = set[int]()
    turns = [(turn.start, turn.end) for turn in sample.turns or ()]
    for begin, end in turns or [(len(sample.prompt.tokens), length)]:
        said = without_end(tokenizer, sample.tokens[begin:end].tolist())
        ends.update(range(begin + len(said), end))
    return [place for place in range(length) if place not in ends]


def padded(rows: Sequence[np.ndarray]) -> Tensor:
    """Return arrays `[n]` as one tensor `[rows, longest n]`, padded with 0 on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
