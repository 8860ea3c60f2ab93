"""Scores rows on Triton, in requests of some rows of one caller.

If a reward function is groupwise, a request to Triton is one group: rows with the same group id or prompt.
"""

import asyncio
import contextlib
import itertools
import math
import re
from collections.abc import AsyncIterator, Collection, Sequence
from http import HTTPStatus

import numpy as np

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.client.batching import halved
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.connection import timeout
from rlhf_triton.client.errors import RequestFailed, RequestRefused, ServerFailed, ServersDiffer
from rlhf_triton.client.served import ServedModel
from rlhf_triton.rewards.function import RESPONSE_KEY
from rlhf_triton.rewards.groups import grouped
from rlhf_triton.tools.gateway.rows import Row, RowResult, check_number
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
    TEXT_PAIRS,
    TOKENS,
    sentence_texts,
)

# A weighted semaphore, which asyncio does not have: callers share an amount, first come, first served.


class Room:
    """An amount, of bytes or rows, that is in use at a time."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

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


ROWS_PER_REQUEST = 32  # one that the server refuses does not affect the others
ROWS_IN_FLIGHT = 256  # of one caller, at each server: more would wait there, encoded, before the rows of other callers
DEADLINE_S = 60.0  # for the rewards of a row, retries included
MAX_BODY_BYTES = 16_000_000  # of a request, of the texts of its rows, and of all large bodies in memory
ASK_AGAIN_S = 0.5  # pause before the servers' declaration is requested again, while none is up
OUR_NAMES = {
    SENTENCES: "text",
    TEXT_PAIRS: "response",
    TOKENS: "tokens",
    SEQUENCE_LENGTHS: "tokens",
    METADATA: "metadata",
}
ROW_IN_MESSAGE = re.compile(rf"({'|'.join(OUR_NAMES)})\[0(?:, (\d+))?\]")
Answer = dict[str, np.ndarray]


class RewardSource:
    """Rewards of texts, chats and token rows. Keeps only the server's declaration between requests."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self._asking = asyncio.Lock()

    async def served(self) -> ServedModel:
        """Return what the servers declare; it is read again when one of them was connected to again.

        Raises HttpError if no server answers within DEADLINE_S, or all serve other rewards than the YAML.
        """
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        async with self._asking:
            while REWARD_MODEL not in self._client.declared:
                try:
                    await self._client.describe(REWARD_MODEL)
                except RequestFailed as error:
                    is_late = asyncio.get_running_loop().time() + ASK_AGAIN_S > deadline
                    if is_late or isinstance(error, (RequestRefused, ServersDiffer)):
                        raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
                    await asyncio.sleep(ASK_AGAIN_S)
        return self._client.declared[REWARD_MODEL]

    async def why_not_ready(self) -> str | None:
        """Return why no server can answer; None if one can."""
        try:
            return await self._client.why_not_ready(REWARD_MODEL)
        except RequestFailed as error:
            return str(error)

    async def score(self, rows: Sequence[Row], outputs: Collection[str] = ()) -> list[RowResult]:
        """Return one result per row; a row without a reward does not affect the others.

        `outputs`: further tensors, which the server must have (`served`).

        Raises HttpError if there is no row or too many, or if no server has answered yet.
        """
        check_number(len(rows))
        size = sum(row.num_characters for row in rows)  # of /score, far more than its body
        if size > MAX_BODY_BYTES:
            raise HttpError(413, f"{size} characters in all rows, must be at most {MAX_BODY_BYTES}: send fewer")
        served = await self.served()
        if (longest := max(row.num_characters for row in rows)) > served.max_request_bytes:
            raise HttpError(413, f"a text of {longest} characters, must have at most {served.max_request_bytes}")
        deadline = asyncio.get_running_loop().time() + DEADLINE_S
        room = Room(ROWS_IN_FLIGHT * self._client.num_servers)
        if served.groupwise:
            groups, errors = grouped(row.metadata for row in rows)
            parts = [*groups, *([i] for i in errors)]  # alone, so that the server explains it
        else:
            parts = _requests(rows, served.max_request_bytes)

        async def score_part(part: list[int]) -> list[RowResult]:
            if len({rows[i].tokens is None for i in part}) > 1:
                return [_failure(HTTPStatus.BAD_REQUEST, "tokens: other rows of the group are texts")] * len(part)
            async with room.reserved(len(part)):
                return await self._results([rows[i] for i in part], outputs, deadline, divisible=not served.groupwise)

        scored = await asyncio.gather(*map(score_part, parts))
        results = dict(zip(itertools.chain(*parts), itertools.chain(*scored), strict=True))
        return [results[i] for i in range(len(rows))]

    async def _results(
        self, rows: list[Row], outputs: Collection[str], deadline: float, *, divisible: bool
    ) -> list[RowResult]:
        """Return the results of rows that share a request, as long as the server does not refuse it.

        A group is not `divisible`: a part of it would get other rewards, so none of its rows has one.
        """

        async def ask(part: Sequence[Row]) -> list[RowResult]:
            try:
                async with timeout(deadline - asyncio.get_running_loop().time()):
                    return self._read(await self._ask(part, outputs), len(part))
            except RecursionError:  # of JSON
                raise RequestRefused(cause := "metadata: nested too deeply", cause) from None
            except asyncio.TimeoutError:
                cause = f": {self._client.outage}" if self._client.outage else ""
                late = _failure(HTTPStatus.GATEWAY_TIMEOUT, f"no reward within {DEADLINE_S:g} s{cause}")
                return [late] * len(part)

        parts = await halved(rows, ask, _failed, unit=1 if divisible else len(rows))
        results = (found if isinstance(found, list) else [found] * len(part) for part, found in parts)
        return [*itertools.chain(*results)]

    async def _ask(self, rows: Sequence[Row], further: Collection[str]) -> Answer:
        served = await self.served()
        outputs = (*served.reward_outputs, *further)
        sends_metadata = served.reads_texts or any({MESSAGES, RESPONSE_KEY} & row.metadata.keys() for row in rows)
        metadata = [row.metadata for row in rows] if sends_metadata else None
        if rows[0].tokens is not None:
            tokens = [np.asarray(row.tokens, np.int64) for row in rows]
            lengths = [row.prompt_length for row in rows] if served.granularity else None
            return await self._client.rewards(tokens, outputs, metadata, prompt_lengths=lengths)
        if not served.takes_pairs:
            return await self._client.score_sentences([row.text for row in rows], outputs, metadata)
        texts, pairs = zip(*(row.pair for row in rows), strict=True)
        return await self._client.score_sentences([*texts], outputs, metadata, pairs=[*pairs])

    def _read(self, answer: Answer, num_rows: int) -> list[RowResult]:
        rewards = answer[REWARDS].astype(np.float64).reshape(num_rows, -1)
        errors = sentence_texts(answer[REWARD_ERRORS]) if REWARD_ERRORS in answer else [""] * num_rows
        versions = answer.get(REWARD_VERSION)
        components = answer.get(REWARD_COMPONENTS, np.empty((num_rows, 0)))
        probabilities = answer.get(PROBABILITIES, np.empty((num_rows, 0))).tolist()
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
                    probabilities=tuple(probabilities[i]) if is_scored else (),
                    error=None if is_scored else errors[i] or f"the reward is {rewards[i].tolist()}",
                    status=HTTPStatus.OK if is_scored else HTTPStatus.BAD_GATEWAY,
                )
            )
        return results


def _failure(status: HTTPStatus, message: str) -> RowResult:
    return RowResult(error=message, status=status)


def _failed(error: RequestFailed) -> RowResult:
    if isinstance(error, RequestRefused):
        return _failure(HTTPStatus.BAD_REQUEST, _row_message(error.why))
    is_answered = isinstance(error, ServerFailed)
    return _failure(HTTPStatus.BAD_GATEWAY if is_answered else HTTPStatus.SERVICE_UNAVAILABLE, str(error))


def _requests(rows: Sequence[Row], most_characters: int) -> list[list[int]]:
    """Return the indices of the rows of each request: of one kind, at most `ROWS_PER_REQUEST`."""
    parts: list[list[int]] = []
    for are_tokens in (False, True):
        size, part = 0, list[int]()
        for i, row in enumerate(rows):
            if (row.tokens is not None) == are_tokens:
                size += row.num_characters
                if len(part) in (0, ROWS_PER_REQUEST) or size > most_characters:
                    size, part = row.num_characters, []
                    parts.append(part)
                part.append(i)
    return parts


def _row_message(message: str) -> str:
    """Return the server's message about the only row of a request without tensors and the row's index."""
    message = message.replace(f"{METADATA}[0].{MESSAGES}", MESSAGES)
    return ROW_IN_MESSAGE.sub(lambda found: OUR_NAMES[found[1]] + (f"[{found[2]}]" if found[2] else ""), message)
