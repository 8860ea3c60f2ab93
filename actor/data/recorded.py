"""A row of token ids during a conversation: sampled by the policy, or observed from the environment."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_triton.actor.data.chat import Message

Version = int | str | None  # of the policy's weights


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

    def sample(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        versions: Sequence[Version] | None = None,
        *,
        reward: float = 0.0,
        number: int = 0,
    ) -> None:
        """Append what the policy has sampled in a turn, by default the first one; see `SampledTurn`."""
        start, count = len(self.tokens), len(tokens)
        self.tokens += tokens
        self.observed += [False] * count
        self.logprobs += [math.nan] * count if logprobs is None else logprobs
        self.versions += [None] * count if versions is None else versions
        self.turns.append(SampledTurn(start, start + count, reward, tuple(tokens), number))

    def reward(self, amount: float | None) -> None:
        """Add to the reward of the last turn."""
        if self.turns and amount is not None:
            self.turns[-1] = dataclasses.replace(self.turns[-1], reward=self.turns[-1].reward + amount)
