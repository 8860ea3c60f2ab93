"""The client for all requests to the servers. A request may take several attempts, each with a deadline.

`pool` selects the server, `connection` makes an attempt, `retry` decides on retries.
"""

import asyncio
import functools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_triton.client.pool import ServerPool
from rlhf_triton.client.retry import RETRIES, RETRY_RESERVE, TRAIN_DEADLINE_S, Attempts, RequestCounters, RetryBudget
from rlhf_triton.client.served import Expected, ServedModel, ServedModels
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.monitoring.tracing import span, traceparent
from rlhf_triton.store.ownership import Sender
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import Arrays

# By default aiohttp accepts gzip, and Triton then compresses every response, although floats hardly shrink.
UNCOMPRESSED = {"Accept-Encoding": "identity"}
MAX_IN_FLIGHT = 256
REPEAT_AFTER_S = 30.0  # first repetition of a training request without a reply


@dataclass(frozen=True)
class TrainAnswer:
    """Reply of critic_train; `weights_version` is served now."""

    loss_mean: float  # mean over the trained tokens of all optimizer steps
    weights_version: int  # the critic that the step has made


class TritonClient(AbstractAsyncContextManager["TritonClient"]):
    """Triton client for one event loop and the whole run; use as an async context manager.

    On exit, calls in flight are cancelled and all connections are closed.
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings,
        *,
        training_key: str | None = None,
        retries: int = RETRIES,
        max_in_flight: int = MAX_IN_FLIGHT,
        expected: Mapping[str, Expected] | None = None,
    ) -> None:
        """
        Args:
            url: the server's address, unless `settings.servers` is set.
            training_key: sent with every request, if set.
            retries: maximum retries of one request after a 503, a timeout or a lost connection.
            max_in_flight: maximum requests in flight over all servers.
            expected: parameters that models must have; requests fail with ServersDiffer while no server has them.
                Default: the parameters in the first reply to `describe`; requests then wait for a server that has the
                same.

        Raises ContractError if the training key cannot be sent.
        """
        if not isinstance(training_key, str | None) or not (training_key or "").isprintable():  # not shown: a secret
            raise contract.ContractError("training_key: must be a text of one line, without its line end")
        self.counters = RequestCounters()
        models = ServedModels(expected or {})
        self.declared = models.declared
        """The latest declaration of each model for which `describe` was called."""
        self._settings = settings
        self._retries = retries
        self._in_flight = asyncio.Semaphore(max_in_flight)
        key = {contract.TRAINING_KEY_HEADER: training_key} if training_key else {}
        self._headers = {**UNCOMPRESSED, **key}
        # Separate budgets, so that failing scoring requests cannot use up the retries of the few training requests.
        self._scoring_budget, self._training_budget = (RetryBudget(RETRY_RESERVE) for _ in range(2))
        self._sender = Sender(uuid.uuid4().hex)
        self._has_trained = False  # after the first training request, later ones wait out a missing sidecar
        self._callers: dict[asyncio.Future[None], asyncio.Task[Any]] = {}  # by the end of the call, not of the task
        self._is_closed = False
        # Here, because `import rlhf_triton` must not take the 0.2 s that tritonclient and aiohttp take.
        from rlhf_triton.client.connection import HTTPConnection, ServerMessage

        self._message = ServerMessage
        connect = functools.partial(HTTPConnection, max_in_flight=max_in_flight, models=models)
        self.pool = ServerPool(settings.servers or [url], connect, settings, self.counters, waits_for_same=not expected)

    async def __aexit__(self, *_: object) -> None:
        self._is_closed = True
        calls = dict(self._callers)
        for caller in calls.values():
            caller.cancel()
        if calls:
            await asyncio.wait(calls)
        await self.pool.close()

    async def describe(self, model: str) -> ServedModel:
        """Return what a model declares.

        This is the first request to a server, so it is retried at most once and does not wait out an outage. From now
        on, a server that joins or recovers must declare the same (`ServedModel.meaning`).

        Raises RequestFailed.
        """
        attempts = Attempts(model, self._settings, self._scoring_budget, retries=min(1, self._retries))
        with self._calling():
            await self.pool.request(
                attempts,
                lambda connection: connection.attempt(lambda: connection.describe(model), self._settings.deadline_s),
                patient=False,
            )
        return self.declared[model]

    async def score(
        self,
        rows: list[np.ndarray],
        outputs: tuple[str, ...] = (contract.REWARDS,),
        metadata: list[dict[str, Any]] | None = None,
        *,
        model: str = contract.CRITIC_INFER,
        width: int = 0,
        prompt_lengths: list[int] | None = None,
        versions: contract.VersionRange | None = None,
    ) -> Arrays:
        """Return outputs of a model for n token rows, padded to S, the longest row or `width`.

        Args:
            rows: int64 `[length_i]` each.
            outputs: names among `rewards` [n, 1], `values` [n, S], `weights_version` [n, 1] and, if several rewards are
                served, `reward_components` [n, C] and `reward_errors` [n, 1]; of a process reward, `step_rewards` and
                `step_ends` [n, K].
            metadata: one dictionary per row for reward functions; None: send no metadata.
            width: pad to at least this many tokens, for servers that batch only requests of equal length.
            prompt_lengths: number of prompt tokens at the start of each row; a process reward needs them.
            versions: versions of the critic's weights that may answer; the request waits up to `deadline_s` for them.

        Raises:
            RequestFailed: all attempts failed, no server serves these versions, or the request itself is invalid.
        """
        return await self._infer(model, _rows(rows, metadata, width, prompt_lengths), outputs, versions=versions)

    rewards = functools.partialmethod(score, model=contract.REWARD_MODEL)
    """Score rows as `score` does, with reward_model alone, to which `versions` then applies; runs no critic."""

    async def score_sentences(
        self,
        texts: list[str],
        outputs: tuple[str, ...],
        metadata: list[dict[str, Any]] | None = None,
        *,
        pairs: list[str] | None = None,
        versions: contract.VersionRange | None = None,
    ) -> Arrays:
        """Like `rewards`, but for n texts, which the server tokenises with the reward model's tokenizer.

        `pairs`: the second text of each row, for a reward model of text pairs. Raises RequestFailed.
        """
        inputs = {contract.SENTENCES: contract.texts_array(texts), **_metadata(metadata)}
        if pairs is not None:
            inputs[contract.TEXT_PAIRS] = contract.texts_array(pairs)
        return await self._infer(contract.REWARD_MODEL, inputs, outputs, versions=versions)

    async def logprobs(self, rows: list[np.ndarray]) -> np.ndarray:
        """Return log-probs float32 `[n, S]` of n token rows under the reference; index t belongs to token t+1.

        See `contract.LOGPROBS`. Raises RequestFailed.
        """
        return (await self._infer(contract.REFERENCE, _rows(rows), (contract.LOGPROBS,)))[contract.LOGPROBS]

    async def train(self, payload: Mapping[str, np.ndarray], *, run_id: str, step: int) -> TrainAnswer:
        """Train the critic on `payload` as step `step`. Idempotent: the server recognises a repeated step.

        Raises:
            ServerFailed: the update failed; the message says why. The step counts as done, so the next one may be sent.
            RequestFailed: the server refused the request, or all attempts failed; the message says what the journal
                holds.
        """
        inputs = {**payload, **_run(run_id), **_steps(contract.STEP, step)}
        outputs = (contract.LOSS_MEAN, contract.WEIGHTS_VERSION)
        reply = await self._infer(contract.CRITIC_TRAIN, inputs, outputs, writes=True)
        return TrainAnswer(float(reply[contract.LOSS_MEAN][0]), int(reply[contract.WEIGHTS_VERSION][0]))

    async def save(self, *, run_id: str, step: int, keep_steps: Sequence[int] | None = None) -> int:
        """Make the critic write a checkpoint of `step`; return the served weights version.

        `keep_steps`: steps, up to `step`, whose checkpoints to keep; None: keep the newest checkpoints. Raises
        RequestFailed.
        """
        inputs = {contract.DUMMY_VAR: np.zeros(1, np.int64), **_run(run_id), **_steps(contract.STEP, step)}
        if keep_steps is not None:
            inputs |= _steps(contract.KEEP_STEPS, *keep_steps)
        return await self._save(inputs)

    async def rewind(self, *, run_id: str, step: int) -> int:
        """Rewind the critic to `step`; return the served weights version. Raises RequestFailed.

        This client then owns the run: requests of previous owners that arrive later are refused.
        """
        inputs = {**_run(run_id), **_steps(contract.REWIND_TO, step)}
        self._sender = Sender(self._sender.session, self._sender.rewinds + 1)
        return await self._save(inputs)

    async def _save(self, inputs: Arrays) -> int:
        outputs = (contract.STATUS, contract.WEIGHTS_VERSION)
        reply = await self._infer(contract.CRITIC_SAVE, inputs, outputs, writes=True)
        return int(reply[contract.WEIGHTS_VERSION][0])

    async def _infer(
        self,
        model: str,
        arrays: Arrays,
        outputs: tuple[str, ...],
        *,
        writes: bool = False,
        versions: contract.VersionRange | None = None,
    ) -> Arrays:
        s = self._settings
        attempts = Attempts(
            model,
            s,
            self._training_budget if writes else self._scoring_budget,
            retries=self._retries,
            outlast_s=s.max_outage_s if writes and self._has_trained else 0.0,
            repeats_failures=not writes,
            demanded=versions,
        )
        deadline_s = TRAIN_DEADLINE_S if writes else s.deadline_s
        # Join the queue before waiting for the semaphore, so that the queue has the order of the calls.
        with span(model), self._calling(), self.pool.training_queue.join() if writes else nullcontext() as queued:
            trace = traceparent()
            traced = {contract.TRACEPARENT_HEADER: trace} if trace else {}
            headers = {**self._headers, contract.SENDER_HEADER: str(self._sender), **traced}
            message = self._message(model, arrays, outputs, headers, versions.parameters if versions else None)
            async with self._in_flight:
                reply = await self.pool.request(
                    attempts,
                    lambda connection: connection.attempt(
                        lambda: connection.infer(message), deadline_s, repeat_after_s=REPEAT_AFTER_S if writes else None
                    ),
                    queued=queued,
                )
        self._has_trained |= writes
        return reply

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Register the calling task, so that closing the client cancels it; raise CancelledError if it is closed."""
        caller = asyncio.current_task()
        if self._is_closed or caller is None:
            raise asyncio.CancelledError
        ended = asyncio.get_running_loop().create_future()
        self._callers[ended] = caller
        try:
            yield
        finally:
            del self._callers[ended]
            ended.set_result(None)


def _metadata(rows: list[dict[str, Any]] | None) -> Arrays:
    return {} if rows is None else {contract.METADATA: contract.texts_array([json.dumps(row) for row in rows])}


def _rows(
    rows: list[np.ndarray],
    metadata: list[dict[str, Any]] | None = None,
    width: int = 0,
    prompt_lengths: list[int] | None = None,
) -> Arrays:
    """Return `tokens` [n, S], `sequence_lengths` [n, 1] and, if given, `prompt_lengths` [n, 1] and `metadata` [n, 1].

    S is the longest row, and at least `width`.
    """
    tokens = padded_rows(rows, max(width, *(row.size for row in rows)), np.int64)
    sizes = {contract.SEQUENCE_LENGTHS: [row.size for row in rows], contract.PROMPT_LENGTHS: prompt_lengths}
    counts = {name: np.asarray(size, np.int64)[:, None] for name, size in sizes.items() if size is not None}
    return {contract.TOKENS: tokens, **counts, **_metadata(metadata)}


def _steps(name: str, *steps: int) -> Arrays:
    return {name: np.asarray([contract.whole_number(name, step) for step in steps], np.int64)}


def _run(run_id: str) -> Arrays:
    return {contract.RUN_ID: np.asarray([run_id.encode()], dtype=np.object_)}
