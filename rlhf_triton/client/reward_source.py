"""Rows of texts, chats and token ids, and their rewards from Triton, in requests of some rows of one caller.

If a reward function is groupwise, a request to Triton is one group: rows with the same group id or prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np

from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.deadline import timeout
from rlhf_triton.client.errors import RequestFailed, RequestRefused, ServerFailed, ServersDiffer
from rlhf_triton.client.halving import halved
from rlhf_triton.client.served import ServedModel
from rlhf_triton.rewards.groups import grouped
from rlhf_triton.rewards.replies import with_reply
from rlhf_triton.rewards.sample import PROMPT_KEY, REPLY_KEY, RESPONSE_KEY
from rlhf_triton.wire.contract import (
    MESSAGES,
    METADATA,
    PROBABILITIES,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    STEP_ENDS,
    STEP_REWARDS,
    TEXT_PAIRS,
    TOKENS,
    Arrays,
    VersionRange,
    sentence_texts,
)

ROWS_PER_REQUEST = 32  # one that the server refuses does not affect the others
ROWS_IN_FLIGHT = 256  # per caller and server: more would wait there, encoded, before the rows of other callers
ASK_AGAIN_S = 0.5  # pause before the servers' declaration is requested again, while none is up
OUR_NAMES = {
    SENTENCES: "text",
    TEXT_PAIRS: "response",
    TOKENS: "tokens",
    SEQUENCE_LENGTHS: "tokens",
    METADATA: "metadata",
}
ROW_IN_MESSAGE = re.compile(rf"({'|'.join(OUR_NAMES)})\[0(?:, (\d+))?\]")
RESERVED = frozenset({PROMPT_KEY, RESPONSE_KEY, REPLY_KEY, MESSAGES})
"""Keys of a row's metadata that its own content sets."""
UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
Ask = Callable[[Sequence["Row"]], Awaitable[Arrays]]


@dataclass(frozen=True)
class Row:
    """One row to score: token ids, or a text that the reward model tokenises itself.

    Of a chat, the text is the reply and `metadata` has the messages before it.
    """

    parts: tuple[str, ...] = ()
    """The text: prompt and response are joined only when they are sent, as many rows may share one of them."""
    tokens: list[int] | np.ndarray | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 0
    """Leading `tokens` that belong to the prompt, in which a process reward looks for no steps."""

    @property
    def num_characters(self) -> int:
        """Length of the text."""
        return sum(map(len, self.parts))

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts)

    @property
    def pair(self) -> tuple[str, str]:
        """Prompt and response, for a reward model of text pairs; a text without a response is the first of them."""
        response = self.metadata.get(RESPONSE_KEY, "")
        prompt = self.metadata.get(PROMPT_KEY, "" if response else self.text)
        return prompt, response


def text_row(prompt: str, response: str, metadata: dict[str, Any]) -> Row:
    """Return the row of a prompt and its response, which reward functions receive as two texts."""
    return Row((prompt, response), metadata={**metadata, PROMPT_KEY: prompt, RESPONSE_KEY: response})


def chat_row(messages: list[dict[str, Any]], metadata: dict[str, Any], reply_size: int = 0) -> Row:
    """Return the row of a conversation; a final message of the assistant is the reply, as in a row of a run.

    `reply_size`: how many messages belong to the reply, if several may, as in a conversation with an environment.
    """
    text, columns = with_reply(messages, "", metadata)
    if reply_size > 1 and RESPONSE_KEY in columns:
        columns[REPLY_KEY] = messages[-reply_size:]
    return Row((text,), metadata=columns)


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """The rewards of one row, or why it has none."""

    rewards: tuple[float, ...] = ()
    """One value, or one per attribute if the reward model does not merge them; empty if there is an error."""
    components: tuple[float | None, ...] = ()
    """Terms of a weighted sum of rewards, in the order of their names; None where one failed."""
    weights_version: int | None = None
    """Version of the reward model's weights, if the server names one."""
    probabilities: tuple[float, ...] = ()
    """Probabilities of the labels, if requested."""
    steps: tuple[np.ndarray, np.ndarray] | None = None
    """Each step's reward and its end, as in the output `step_ends`; for process rewards only."""
    error: str | None = None
    status: HTTPStatus = HTTPStatus.OK
    """The kind of the error, as an HTTP status."""


class Room:
    """A weighted semaphore: callers share an amount, of bytes or rows, first come, first served."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reserved(self, amount: int) -> AsyncIterator[None]:
        """Reserve `amount` of the room, at most all of it, as soon as it is free."""
        amount = min(amount, self._size)
        async with self._turn:
            while self._free < amount:
                self._freed.clear()
                await self._freed.wait()
            self._free -= amount
        try:
            yield
        finally:
            self._free += amount
            self._freed.set()


class RewardSource:
    """Rewards of texts, chats and token rows. Keeps only the server's declaration between requests."""

    def __init__(self, client: TritonClient, *, patience_s: float, deadline_s: float | None = None) -> None:
        """
        Args:
            patience_s: how long to wait for the first server to reply.
            deadline_s: limit for the rewards of a row, retries included; None: the limit of the client's own retries.
        """
        self._client = client
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._asking = asyncio.Lock()

    async def served(self) -> ServedModel:
        """Return what the servers declare; it is read again after a reconnection.

        Raises RequestFailed if no server answers in time or none serves the expected reward.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        async with self._asking:
            while REWARD_MODEL not in self._client.declared:
                try:
                    await self._client.describe(REWARD_MODEL)
                except RequestFailed as error:
                    is_late = asyncio.get_running_loop().time() + ASK_AGAIN_S > deadline
                    if is_late or isinstance(error, (RequestRefused, ServersDiffer)):
                        raise
                    await asyncio.sleep(ASK_AGAIN_S)
        return self._client.declared[REWARD_MODEL]

    async def why_not_ready(self) -> str | None:
        """Return why no server can answer; None if one can."""
        try:
            return await self._client.pool.why_not_ready(REWARD_MODEL)
        except RequestFailed as error:
            return str(error)

    async def score(
        self, rows: Sequence[Row], outputs: Collection[str] = (), versions: VersionRange | None = None
    ) -> list[RowResult]:
        """Return one result per row; a row without a reward does not affect the others.

        Args:
            rows: at least one.
            outputs: further tensors, which the server must have (`served`).
            versions: versions of the reward model's weights that may answer.

        Raises RequestFailed as `served` does.
        """
        served = await self.served()
        deadline = None
        if self._deadline_s is not None:
            deadline = asyncio.get_running_loop().time() + self._deadline_s
        room = Room(ROWS_IN_FLIGHT * len(self._client.pool.servers))
        if served.groupwise:
            groups, errors = grouped(row.metadata for row in rows)
            parts = [*groups, *([i] for i in errors)]  # alone, so that the server explains it
        else:
            parts = _requests(rows, served.max_request_bytes)

        async def score_part(part: list[int]) -> list[RowResult]:
            if len({rows[i].tokens is None for i in part}) > 1:
                return [_failure(HTTPStatus.BAD_REQUEST, "tokens: other rows of the group are texts")] * len(part)
            async with room.reserved(len(part)):
                ask = functools.partial(self._ask, further=outputs, versions=versions)
                return await self._results([rows[i] for i in part], ask, deadline, divisible=not served.groupwise)

        scored = await asyncio.gather(*map(score_part, parts))
        results = dict(zip(itertools.chain(*parts), itertools.chain(*scored), strict=True))
        return [results[i] for i in range(len(rows))]

    async def _results(self, rows: list[Row], ask: Ask, deadline: float | None, *, divisible: bool) -> list[RowResult]:
        """Score rows in one request; if it is refused, in smaller ones, to find the refused rows.

        A group is not `divisible`: its rewards depend on all of its rows, so none of them has one.
        """

        async def results(part: Sequence[Row]) -> list[RowResult]:
            try:
                async with timeout(deadline and deadline - asyncio.get_running_loop().time()):
                    return _read(await ask(part), len(part))
            except RecursionError:  # json raises it for deep nesting
                raise RequestRefused(cause := "metadata: nested too deeply", cause) from None
            except asyncio.TimeoutError:
                outage = self._client.pool.outage
                cause = f": {outage}" if outage else ""
                late = _failure(HTTPStatus.GATEWAY_TIMEOUT, f"no reward within {self._deadline_s:g} s{cause}")
                return [late] * len(part)

        parts = await halved(rows, results, _failed, unit=1 if divisible else len(rows))
        return [
            *itertools.chain(
                *(outcome if isinstance(outcome, list) else [outcome] * len(part) for part, outcome in parts)
            )
        ]

    async def _ask(self, rows: Sequence[Row], further: Collection[str], versions: VersionRange | None) -> Arrays:
        served = await self.served()
        outputs = (*served.reward_outputs, *further)
        sends_metadata = served.reads_texts or any({MESSAGES, RESPONSE_KEY} & row.metadata.keys() for row in rows)
        metadata = [row.metadata for row in rows] if sends_metadata else None
        if rows[0].tokens is not None:
            tokens = [np.asarray(row.tokens, np.int64) for row in rows]
            lengths = [row.prompt_length for row in rows] if served.granularity else None
            return await self._client.rewards(tokens, outputs, metadata, prompt_lengths=lengths, versions=versions)
        if not served.takes_pairs:
            return await self._client.score_sentences([row.text for row in rows], outputs, metadata, versions=versions)
        texts, pairs = zip(*(row.pair for row in rows), strict=True)
        return await self._client.score_sentences([*texts], outputs, metadata, pairs=[*pairs], versions=versions)


def _read(reply: Arrays, num_rows: int) -> list[RowResult]:
    rewards = reply[REWARDS].astype(np.float64).reshape(num_rows, -1)
    errors = sentence_texts(reply[REWARD_ERRORS]) if REWARD_ERRORS in reply else [""] * num_rows
    versions = reply.get(REWARD_VERSION)
    components = reply.get(REWARD_COMPONENTS, np.empty((num_rows, 0)))
    probabilities = reply.get(PROBABILITIES, np.empty((num_rows, 0))).tolist()
    step_rewards = reply.get(STEP_REWARDS)
    step_ends = reply.get(STEP_ENDS)
    results = []
    for i in range(num_rows):
        terms = tuple(float(term) if math.isfinite(term) else None for term in components[i])
        version = None if versions is None else int(versions[i, 0])
        is_scored = np.isfinite(rewards[i]).all()
        results.append(
            RowResult(
                rewards=tuple(rewards[i].tolist()) if is_scored else (),
                components=terms,
                weights_version=version,
                steps=_steps(step_rewards[i], step_ends[i])
                if step_rewards is not None and step_ends is not None
                else None,
                probabilities=tuple(probabilities[i]) if is_scored else (),
                error=None if is_scored else errors[i] or f"the reward is {rewards[i].tolist()}",
                status=HTTPStatus.OK if is_scored else HTTPStatus.BAD_GATEWAY,
            )
        )
    return results


def _steps(rewards: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rewards and ends of a row's steps, without trailing padding."""
    return rewards[ends >= 0], ends[ends >= 0]


def _failure(status: HTTPStatus, message: str) -> RowResult:
    return RowResult(error=message, status=status)


def _failed(error: RequestFailed) -> RowResult:
    if isinstance(error, RequestRefused):
        return _failure(HTTPStatus.BAD_REQUEST, _with_names_of_rows(error.why))
    is_executed = isinstance(error, ServerFailed)
    return _failure(HTTPStatus.BAD_GATEWAY if is_executed else HTTPStatus.SERVICE_UNAVAILABLE, str(error))


def _requests(rows: Sequence[Row], max_characters: int) -> list[list[int]]:
    """Return the indices of the rows of each request: of one kind, at most `ROWS_PER_REQUEST`."""
    parts: list[list[int]] = []
    for are_tokens in (False, True):
        size = 0
        part = list[int]()
        for i, row in enumerate(rows):
            if (row.tokens is not None) == are_tokens:
                size += row.num_characters
                if len(part) in (0, ROWS_PER_REQUEST) or size > max_characters:
                    size = row.num_characters
                    part = []
                    parts.append(part)
                part.append(i)
    return parts


def _with_names_of_rows(message: str) -> str:
    """Return the server's message about the only row of a request without tensors and the row's index."""
    message = message.replace(f"{METADATA}[0].{MESSAGES}", MESSAGES)
    return ROW_IN_MESSAGE.sub(lambda match: OUR_NAMES[match[1]] + (f"[{match[2]}]" if match[2] else ""), message)
