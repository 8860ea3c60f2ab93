"""A row of token ids during a conversation: sampled by the policy, or observed from the environment."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_triton.actor.data.chat import Message

Version = int | str | None  # of the policy's weights


@dataclass(frozen=True)
class PolicyTurn:
    """Tokens sampled after a prefix: the response to a prompt, one turn of a conversation, or the reply to a call."""

    tokens: list[int]  # n, with the end-of-sequence token or the stop string that ended them
    ended: bool  # by an end-of-sequence token or a stop string, not by a limit
    logprobs: list[float] | None = None  # n, nats, at the sampling temperature, before top-k and top-p
    versions: list[Version] | None = None  # n, of the weights that sampled each token


@dataclass(frozen=True)
class SampledTurn:
    """What the policy sampled between two observations of an environment."""

    start: int  # index of its first token in the row
    end: int  # index after its last token
    reward: float = 0.0  # given by the environment after it
    tokens: tuple[int, ...] = ()  # as they were sampled
    number: int = 0  # its place in time among the turns of the conversation, in whatever row


@dataclass
class RecordedRow:
    """The tokens of a conversation so far, n, with its prompt; nothing in it is ever rendered again."""

    tokens: list[int] = field(default_factory=list)  # n
    observed: list[bool] = field(default_factory=list)  # n; False: to train on
    logprobs: list[float] = field(default_factory=list)  # n, NaN where unknown; 0 where observed
    versions: list[Version] = field(default_factory=list)  # n; None where observed
    turns: list[SampledTurn] = field(default_factory=list)  # what is to train on
    messages: list[Message] = field(default_factory=list)

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that are not to train on."""
        self.tokens += tokens
        self.observed += [True] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [None] * len(tokens)

    def sample(self, turn: PolicyTurn, *, reward: float = 0.0, number: int = 0) -> None:
        """Append what the policy has sampled in a turn, by default the first one; see `SampledTurn`."""
        start, count = len(self.tokens), len(turn.tokens)
        self.tokens += turn.tokens
        self.observed += [False] * count
        self.logprobs += [math.nan] * count if turn.logprobs is None else turn.logprobs
        self.versions += [None] * count if turn.versions is None else turn.versions
        self.turns.append(SampledTurn(start, start + count, reward, tuple(turn.tokens), number))

    def reward(self, amount: float | None) -> None:
        """Add to the reward of the last turn."""
        if self.turns and amount is not None:
            self.turns[-1] = dataclasses.replace(self.turns[-1], reward=self.turns[-1].reward + amount)
