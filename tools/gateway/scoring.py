"""Scores rows through the actor's client of Triton; rows of all callers share requests if only a model scores them.

If a reward function is groupwise, a request to Triton is one group instead: rows of one caller with the same group id
or prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np

from python_backend.client.client import TritonClient
from python_backend.client.connection import Config, parameters_of, timeout
from python_backend.client.retry import RequestFailed, RequestRefused, ServerFailed, ServersDiffer
from python_backend.config import GatewaySection
from python_backend.rewards.groups import BadGroup, group_key
from python_backend.wire.contract import (
    COMPUTE_US,
    GROUPWISE,
    LABELS,
    MESSAGES,
    METADATA,
    PROBABILITIES,
    PROCESS,
    QUEUE_US,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    SENTENCES,
    SEQUENCE_LENGTHS,
    TEXT_PAIRS,
    TEXTS_ONLY,
    TOKENS,
    Limits,
    sentence_texts,
)
from tools.gateway.room import Room
from tools.gateway.rows import GatewayError, Row, RowResult, check_number

# Rows of requests that arrive at about the same time share a request to Triton, which costs a third per row. It is
# answered when its slowest row is, so with reward functions, which may hang, each caller has requests of its own.
GATHER_S = 0.002
ROWS_IN_FLIGHT = 256  # of one caller, at each server: more would wait there, encoded, before the rows of other callers
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


@dataclass
class _Batch:
    """Rows that share a request to Triton, which `task` sends."""

    rows: list[Row]
    task: asyncio.Task[list[RowResult]]
    size: int = 0  # characters


@dataclass(frozen=True)
class ServedReward:
    """What the gateway has to know about the served reward model."""

    components: tuple[str, ...]
    """Names of the terms of a weighted sum of rewards; empty if only the reward model is served."""
    outputs: tuple[str, ...]
    """Requested for every row."""
    adds_special_tokens: bool
    takes_pairs: bool
    """Whether the reward model was trained on prompt and response as two texts."""
    labels: tuple[str, ...]
    """Names of the labels of a checkpoint that is served alone; empty for a sum of rewards."""
    timed: bool
    """Whether the server returns times."""
    groupwise: bool
    """Whether a reward function receives all responses to a prompt at once."""
    is_process: bool
    """Whether the reward model scores the steps or tokens of responses."""
    max_request_bytes: int
    """Of the texts of a request; more are refused."""
    reads_metadata: bool
    """Whether a reward function, a template or a process reward reads the metadata; a chat's is always sent."""


class RewardSource:
    """Rewards of texts, chats and token rows. Keeps nothing between requests but what the server declares."""

    def __init__(self, client: TritonClient, settings: GatewaySection) -> None:
        self._client = client
        self._deadline_s, self._rows_per_request = settings.deadline_s, settings.rows_per_request
        self._max_rows, self._max_bytes = settings.max_rows, settings.max_body_bytes
        self._open: dict[tuple[bool, frozenset[str]], _Batch] = {}  # by kind of row and the further outputs
        self._served: ServedReward | None = None
        self._config: Config = {}  # that `_served` describes
        self._asking = asyncio.Lock()

    async def served(self) -> ServedReward:
        """Return what the servers declare; it is read again when one of them was connected to again.

        Raises GatewayError if no server answers within `gateway.deadline_s`, or all serve other rewards than the YAML.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        async with self._asking:
            config = await self._declared(deadline)
            if self._served is None or config is not self._config:
                parameters = parameters_of(config)
                names = tuple(json.loads(parameters.get(REWARD_COMPONENTS) or "[]"))
                optional = {REWARD_COMPONENTS, REWARD_ERRORS} if names else set()
                outputs = self._client.outputs(REWARD_MODEL)
                optional |= {REWARD_VERSION} & outputs
                self._config = config
                self._served = ServedReward(
                    names,
                    (REWARDS, *sorted(optional)),
                    adds_special_tokens=parameters.get("add_special_tokens") != "false",
                    takes_pairs=parameters.get("text") == "pair",
                    labels=tuple(json.loads(parameters.get(LABELS) or "[]")),
                    timed=QUEUE_US in outputs,
                    groupwise=parameters.get(GROUPWISE) == "true",
                    is_process=bool(parameters.get(PROCESS)),
                    max_request_bytes=int(parameters.get("max_request_bytes") or Limits.max_request_bytes),
                    reads_metadata=bool(names) or any(parameters.get(name) for name in (TEXTS_ONLY, PROCESS)),
                )
        return self._served

    async def _declared(self, deadline: float) -> Config:
        while True:
            if REWARD_MODEL in self._client.declared:
                return self._client.declared[REWARD_MODEL]
            try:
                await self._client.model_parameters(REWARD_MODEL)
            except RequestFailed as error:
                is_late = asyncio.get_running_loop().time() + ASK_AGAIN_S > deadline
                if is_late or isinstance(error, (RequestRefused, ServersDiffer)):
                    raise GatewayError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
                await asyncio.sleep(ASK_AGAIN_S)

    async def why_not_ready(self) -> str | None:
        """Return why no server can answer; None if one can."""
        try:
            return await self._client.why_not_ready(REWARD_MODEL)
        except RequestFailed as error:
            return str(error)

    async def score(self, rows: Sequence[Row], *, probabilities: bool = False, timing: bool = False) -> list[RowResult]:
        """Return one result per row; a row without a reward does not affect the others.

        `probabilities` and `timing` need a server that has them (`served`).

        Raises GatewayError if there is no row or too many, or if no server has answered yet.
        """
        check_number(len(rows), self._max_rows)
        size = sum(row.num_characters for row in rows)  # of /score, far more than its body
        if size > self._max_bytes:
            raise GatewayError(
                413, f"{size} characters in all rows, must be at most gateway.max_body_bytes: send fewer"
            )
        extra = frozenset([*([PROBABILITIES] if probabilities else ()), *((QUEUE_US, COMPUTE_US) if timing else ())])
        served = await self.served()
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        room = Room(ROWS_IN_FLIGHT * self._client.num_servers)
        failures = [_unscorable(row) for row in rows]
        limits = self._rows_per_request, served.max_request_bytes
        parts = _groups(rows) if served.groupwise else _requests(rows, failures, *limits)

        async def score_part(part: list[int]) -> list[RowResult]:
            failed = next((failures[i] for i in part if failures[i]), None)
            if len({rows[i].tokens is None for i in part}) > 1:
                failed = _failure(HTTPStatus.BAD_REQUEST, "tokens: other rows of the group are texts")
            if failed:
                return [failed] * len(part)
            if not (served.groupwise or served.components) and len(part) < self._rows_per_request:
                return await asyncio.gather(*(self._shared(rows[i], extra, served.max_request_bytes) for i in part))
            async with room.reserved(len(part)):
                return await self._results([rows[i] for i in part], extra, deadline, divisible=not served.groupwise)

        scored = await asyncio.gather(*map(score_part, parts))
        results = dict(zip(itertools.chain(*parts), itertools.chain(*scored), strict=True))
        return [results[i] for i in range(len(rows))]

    async def _shared(self, row: Row, extra: frozenset[str], most: int) -> RowResult:
        """Score a row in a request that rows of other callers may join, up to `most` characters."""
        kind = (row.tokens is not None, extra)
        batch = self._open.get(kind)
        if batch is None or batch.size + row.num_characters > most:
            rows: list[Row] = []
            batch = self._open[kind] = _Batch(rows, asyncio.create_task(self._send(rows, extra)))
        batch.rows.append(row)
        batch.size += row.num_characters
        index = len(batch.rows) - 1
        if len(batch.rows) == self._rows_per_request:
            del self._open[kind]
        return (await asyncio.shield(batch.task))[index]  # shared: one caller that leaves must not cancel it

    async def _send(self, rows: list[Row], extra: frozenset[str]) -> list[RowResult]:
        await asyncio.sleep(GATHER_S)
        self._open = {kind: batch for kind, batch in self._open.items() if batch.rows is not rows}
        return await self._results(rows, extra, asyncio.get_running_loop().time() + self._deadline_s)

    async def _results(
        self, rows: list[Row], extra: frozenset[str], deadline: float, *, divisible: bool = True
    ) -> list[RowResult]:
        """Send one request. If the server refuses it, send its halves, until only the refused rows have no reward.

        A group is not `divisible`: a part of it would get other rewards, so none of its rows has one.
        """
        try:
            async with timeout(deadline - asyncio.get_running_loop().time()):
                return self._read(await self._ask(rows, extra), len(rows))
        except RecursionError:  # of JSON
            failure = _failure(HTTPStatus.BAD_REQUEST, "metadata: nested too deeply")
        except RequestRefused as error:
            failure = _failure(HTTPStatus.BAD_REQUEST, _in_our_words(error.why))
        except asyncio.TimeoutError:
            cause = f": {self._client.outage}" if self._client.outage else ""
            failure = _failure(
                HTTPStatus.GATEWAY_TIMEOUT, f"no reward within {self._deadline_s:g} s (gateway.deadline_s){cause}"
            )
        except ServerFailed as error:
            failure = _failure(HTTPStatus.BAD_GATEWAY, str(error))
        except RequestFailed as error:
            failure = _failure(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if failure.status != HTTPStatus.BAD_REQUEST or len(rows) == 1 or not divisible:
            return [failure] * len(rows)
        half = len(rows) // 2  # not within `except`, where the error would keep the encoded request in memory
        parts = await asyncio.gather(*(self._results(part, extra, deadline) for part in (rows[:half], rows[half:])))
        return [*parts[0], *parts[1]]

    async def _ask(self, rows: list[Row], extra: frozenset[str]) -> Answer:
        served = await self.served()
        outputs = (*served.outputs, *sorted(extra))
        sends_metadata = served.reads_metadata or any(MESSAGES in row.metadata for row in rows)
        metadata = [row.metadata for row in rows] if sends_metadata else None
        if rows[0].tokens is not None:
            tokens = [np.asarray(row.tokens, np.int64) for row in rows]
            lengths = [row.prompt_length for row in rows] if served.is_process else None
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
            times = (int(answer[QUEUE_US][i, 0]), int(answer[COMPUTE_US][i, 0])) if QUEUE_US in answer else None
            if np.isfinite(rewards[i]).all():
                results.append(RowResult(tuple(rewards[i].tolist()), terms, version, tuple(probabilities[i]), times))
            else:
                why = errors[i] or f"the reward is {rewards[i].tolist()}"
                results.append(RowResult((), terms, version, times_us=times, error=why, status=HTTPStatus.BAD_GATEWAY))
        return results


def _failure(status: HTTPStatus, message: str) -> RowResult:
    return RowResult(error=message, status=status)


def _requests(
    rows: Sequence[Row], failures: Sequence[RowResult | None], most: int, most_characters: int
) -> list[list[int]]:
    """Return the indices of the rows of each request: of one kind, at most `most`. Failures are alone."""
    parts = [[i] for i, failure in enumerate(failures) if failure]
    for are_tokens in (False, True):
        size, part = 0, list[int]()
        for i, row in enumerate(rows):
            if (row.tokens is not None) != are_tokens or failures[i]:
                continue
            size += row.num_characters
            if len(part) in (0, most) or size > most_characters:
                size, part = row.num_characters, []
                parts.append(part)
            part.append(i)
    return parts


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of the rows of each group."""
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        try:
            groups.setdefault(group_key(row.metadata), []).append(i)
        except BadGroup:  # sent alone, so that the server explains it
            groups[i] = [i]
    return [*groups.values()]


def _unscorable(row: Row) -> RowResult | None:
    """Return the failure of a row that must not be sent.

    On the wire, a lone surrogate would become another text. A text that no server takes would cost ten times its size.
    """
    if row.tokens == []:
        return _failure(HTTPStatus.BAD_REQUEST, "tokens: empty, an empty sequence cannot be scored")
    most = Limits.max_sentence_bytes
    if 4 * row.num_characters > most:  # UTF-8 takes at most four bytes for each
        size = sum(len(part.encode(errors="surrogatepass")) for part in row.parts)
        if size > most:
            cause = f"text: {size} bytes, must be at most {most} (max_sentence_bytes)"
            return _failure(HTTPStatus.BAD_REQUEST, cause)
    messages = row.metadata.get(MESSAGES) or []
    for text in (*row.parts, *(str(message.get("content") or "") for message in messages)):
        if found := re.search("[\ud800-\udfff]", text):
            cause = f"text: character {found.start()} is {found[0]!a}, half of a character, which UTF-8 cannot encode"
            return _failure(HTTPStatus.BAD_REQUEST, cause)
    return None


def _in_our_words(message: str) -> str:
    """Return the server's message about the only row of a request without tensors and the row's index."""
    message = message.replace(f"{METADATA}[0].{MESSAGES}", MESSAGES)
    return ROW_IN_MESSAGE.sub(lambda found: OUR_NAMES[found[1]] + (f"[{found[2]}]" if found[2] else ""), message)
