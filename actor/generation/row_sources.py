"""Sources of the rows that an engine decodes: jobs of prompts, with one response or a conversation for each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.rollout_rows import Conversation, row_of_response

ROW_STEP = 1 << 32  # difference between the numbers that seed two consecutive rows of a conversation
DRAWN_AT_ONCE = 64
Finished = Callable[[int, Conversation], None]
IsPaused = Callable[[], bool]


class RowId(NamedTuple):
    """Names a row of a source; later rows of conversations sort behind the first rows."""

    number: int  # position in the conversation
    conversation: int  # conversations are numbered in the order in which jobs are added


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """A row in which the policy has the next turn."""

    id: RowId
    tokens: Sequence[int]  # tokens so far
    order: int  # number of its job
    index: int  # the prompt's position in the job
    seed: tuple[int, int]  # the job's seed, and a number that differs for each row of the job
    draws: Iterator[float] | None  # uniform numbers for the tokens of all of its turns; None if greedy


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


class RowSource(Protocol):
    """Supplies the decoder with rows in which the policy has the next turn, and receives the sampled turns."""

    longest: int
    """Maximum tokens of a row."""

    @property
    def size(self) -> int:
        """Number of unfinished conversations, which normally bounds the number of rows in decoding."""

    def next_rows(self, *, wait: bool) -> list[NewRow]:
        """Return each new row that needs a turn of the policy; with `wait`, wait until there is one."""

    def deliver(self, row: RowId, turn: PolicyTurn) -> None:
        """Receive the sampled turn of a row; must not block."""


@dataclass(frozen=True)
class _Place:
    """The job of a conversation, and the prompt that it starts from."""

    order: int  # number of its job
    job: SamplingJob
    index: int  # the prompt's position in the job
    draws: dict[int, Iterator[float]] = field(default_factory=dict)  # by number of the row


class Jobs:
    """The unfinished conversations of a source, with their jobs."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # by conversation
        self._num_jobs = 0
        self._num_conversations = 0

    def __len__(self) -> int:
        return len(self._places)

    def add(self, job: SamplingJob) -> dict[int, Prompt]:
        """Add a job, and return its prompts by the number of their conversation."""
        first = self._num_conversations
        for conversation, index in enumerate(job.prompts, first):
            self._places[conversation] = _Place(self._num_jobs, job, index)
        self._num_jobs += 1
        self._num_conversations += len(job.prompts)
        return dict(enumerate(job.prompts.values(), first))

    def prompt(self, conversation: int) -> Prompt:
        """Return the prompt of a conversation."""
        place = self._places[conversation]
        return place.job.prompts[place.index]

    def new_row(self, row: RowId, tokens: Sequence[int]) -> NewRow:
        """Return a row with its seed; its draws continue where its earlier turns ended."""
        place = self._places[row.conversation]
        seed = (place.job.seed, place.index + row.number * ROW_STEP)
        draws = None if place.job.greedy else place.draws.setdefault(row.number, uniform_draws(*seed))
        return NewRow(id=row, tokens=tokens, order=place.order, index=place.index, seed=seed, draws=draws)

    def finish(self, number: int, conversation: Conversation) -> None:
        """Report a conversation that has ended."""
        place = self._places.pop(number)
        place.job.finish(place.index, conversation)


class PromptSource:
    """Prompts with one response each."""

    def __init__(self, *, max_new_tokens: int) -> None:
        self.longest = 0
        self._max_new_tokens = max_new_tokens
        self._jobs = Jobs()
        self._waiting: list[NewRow] = []

    @property
    def size(self) -> int:
        return len(self._jobs)

    def add(self, job: SamplingJob) -> None:
        """Also supply the rows of this job, after those of earlier ones."""
        prompts = self._jobs.add(job)
        self._waiting += [self._jobs.new_row(RowId(0, i), prompt.tokens.tolist()) for i, prompt in prompts.items()]
        self.longest = max([self.longest, *(len(p.tokens) + self._max_new_tokens for p in prompts.values())])

    def deliver(self, row: RowId, turn: PolicyTurn) -> None:
        self._jobs.finish(row.conversation, (row_of_response(self._jobs.prompt(row.conversation), turn),))

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
