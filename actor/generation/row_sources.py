"""Sources of the rows that an engine decodes: jobs of prompts, with one response or a conversation for each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.rollout_rows import Conversation, row_of_response

ROW_STEP = 1 << 32  # difference between the numbers of a conversation's rows; the first number is the conversation's
DRAWN_AT_ONCE = 64
Finished = Callable[[int, Conversation], None]
IsPaused = Callable[[], bool]
NewRow = tuple[int, Sequence[int]]  # number of a row, and its tokens so far


@dataclass
class SamplingJob:
    """The prompts of a step or of a validation, which are sampled with one seed."""

    prompts: dict[int, Prompt]  # by index; prompts are removed when their conversations have ended
    finished: Finished  # called with the prompt's index and the conversation, as soon as the conversation has ended
    seed: int  # a response depends only on its prompt, its index and `seed`, except for rounding of probabilities
    greedy: bool = False  # take the most likely token instead of sampling

    def finish(self, index: int, conversation: Conversation) -> None:
        """Report a conversation that has ended."""
        del self.prompts[index]
        self.finished(index, conversation)


@dataclass(frozen=True)
class _Place:
    """Where a conversation belongs."""

    order: int  # number of its job
    job: SamplingJob
    index: int  # the prompt's position in the job
    draws: dict[int, Iterator[float]] = field(default_factory=dict)  # by row


class RowSource(ABC):
    """Supplies the decoder with rows in which the policy has the next turn, and receives the sampled turns.

    A conversation's first row is numbered in the order in which jobs are added.
    """

    longest = 0
    """Maximum tokens of a row."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # by conversation
        self._num_jobs = 0
        self._num_conversations = 0

    @property
    def size(self) -> int:
        """Number of unfinished conversations, which normally bounds the number of rows in decoding."""
        return len(self._places)

    @abstractmethod
    def add(self, job: SamplingJob) -> None:
        """Add a job, whose rows are supplied after those of earlier jobs."""

    @abstractmethod
    def deliver(self, index: int, turn: PolicyTurn) -> None:
        """Receive the sampled turn of row `index`; must not block."""

    @abstractmethod
    def next_rows(self, *, wait: bool) -> list[NewRow]:
        """Return each new row that needs a turn of the policy.

        With `wait`, wait until there is one, or until `wake` is called.
        """

    @abstractmethod
    def wake(self) -> None:
        """End the wait of another thread in `next_rows`."""

    @abstractmethod
    def close(self) -> None:
        """Abandon unfinished conversations; `next_rows` then raises CancelledError."""

    def number(self, job: SamplingJob) -> dict[int, Prompt]:
        """Return the prompts of a new job by the numbers of their conversations."""
        first = self._num_conversations
        for conversation, index in enumerate(job.prompts, first):
            self._places[conversation] = _Place(self._num_jobs, job, index)
        self._num_jobs += 1
        self._num_conversations += len(job.prompts)
        return dict(enumerate(job.prompts.values(), first))

    def order(self, row: int) -> int:
        """Return the number of the row's job."""
        return self._places[row % ROW_STEP].order

    def seed_of(self, row: int) -> tuple[int, int]:
        """Return the seed of the row's job, and the row's number within the job."""
        place = self._places[row % ROW_STEP]
        return place.job.seed, place.index + row - row % ROW_STEP

    def draws(self, row: int) -> Iterator[float] | None:
        """Return the iterator over the draws of a row's tokens, which its later turns continue; None if greedy."""
        place = self._places[row % ROW_STEP]
        return None if place.job.greedy else place.draws.setdefault(row, uniform_draws(*self.seed_of(row)))

    def finish(self, number: int, conversation: Conversation) -> None:
        """Report a conversation that has ended."""
        place = self._places.pop(number)
        place.job.finish(place.index, conversation)


class PromptSource(RowSource):
    """Prompts with one response each."""

    def __init__(self, *, max_new_tokens: int) -> None:
        super().__init__()
        self._max_new_tokens = max_new_tokens
        self._waiting: list[NewRow] = []

    def add(self, job: SamplingJob) -> None:
        prompts = self.number(job)
        self._waiting += [(number, prompt.tokens.tolist()) for number, prompt in prompts.items()]
        self.longest = max([self.longest, *(len(p.tokens) + self._max_new_tokens for p in prompts.values())])

    def deliver(self, index: int, turn: PolicyTurn) -> None:
        place = self._places[index]
        self.finish(index, (row_of_response(place.job.prompts[place.index], turn),))

    def next_rows(self, *, wait: bool) -> list[NewRow]:
        waiting = self._waiting
        self._waiting = []
        return waiting

    def wake(self) -> None:
        """No-op: `next_rows` never waits."""

    def close(self) -> None:
        """No-op: `next_rows` never waits."""


def uniform_draws(seed: int, index: int) -> Iterator[float]:
    """Yield the draws, uniform in [0, 1), for the tokens sampled in row `index`.

    Philox computes each number from its key and position, so rows have independent numbers, the same on any rank.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, index], np.uint64)))
    while True:
        yield from generator.random(DRAWN_AT_ONCE).tolist()
