"""The rows of a conversation in progress: token ids that the policy sampled or observed from the environment."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_triton.actor.data.chat import ChatMessage

RecordedVersion = int | str | None  # the policy's step of the weights, or a server's name for them


@dataclass(frozen=True)
class PolicyTurn:
    """The `n` tokens of one policy turn: a response to a prompt, a turn of a conversation, or a reply to a call."""

    tokens: list[int]  # n, including the end-of-sequence token or stop string that ended the turn
    ended: bool  # ended by an end-of-sequence token or a stop string, not by a limit
    logprobs: list[float] | None = None  # n, nats, at the sampling temperature, before top-k and top-p
    versions: list[RecordedVersion] | None = None  # n, version of the weights that sampled each token
    error: str = ""  # why it could not be sampled; it then has no tokens


@dataclass(frozen=True)
class SampledTurn:
    """The place of one turn of the policy in its row, between two observations of an environment."""

    start: int  # index of the turn's first token in the row
    end: int  # index after the turn's last token
    reward: float = 0.0  # the environment's reward for the turn
    number: int = 0  # counts the turns of the conversation in time, over all of its rows


@dataclass(kw_only=True)
class RecordedRow:
    """The `n` tokens of a conversation so far, with its prompt, as they were sampled or observed."""

    tokens: list[int] = field(default_factory=list)  # n
    observed: list[bool] = field(default_factory=list)  # n; the policy trains on tokens with False
    logprobs: list[float] = field(default_factory=list)  # n, NaN where unknown; 0 where observed
    versions: list[RecordedVersion] = field(default_factory=list)  # n; None where observed
    turns: list[SampledTurn] = field(default_factory=list)  # the turns that the policy trains on
    messages: list[ChatMessage] = field(default_factory=list)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy observes and does not train on."""
        self.tokens += tokens
        self.observed += [True] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [None] * len(tokens)

    def add_turn(self, turn: PolicyTurn, *, reward: float = 0.0, number: int = 0) -> None:
        """Append a turn of the policy; `reward` and `number` as in `SampledTurn`."""
        start = len(self.tokens)
        count = len(turn.tokens)
        self.tokens += turn.tokens
        self.observed += [False] * count
        self.logprobs += [math.nan] * count if turn.logprobs is None else turn.logprobs
        self.versions += [None] * count if turn.versions is None else turn.versions
        self.turns.append(SampledTurn(start, start + count, reward, number))

    def add_reward(self, amount: float | None) -> None:
        """Add `amount` to the reward of the last turn; no-op without turns, or if it is None."""
        if self.turns and amount is not None:
            self.turns[-1] = dataclasses.replace(self.turns[-1], reward=self.turns[-1].reward + amount)
