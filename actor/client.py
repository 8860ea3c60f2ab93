"""The data plane: every request to the server over tritonclient's async HTTP, with deadlines and retries.
Given: token rows, training payloads. Returns: scores and answers; `RequestFailed` with the cause when there are none.
The only module that imports tritonclient.http.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import numpy as np
from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.http.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from python_backend import contract
from python_backend.config import ClientSection

T = TypeVar("T")
MAX_BACKOFF_S = 8.0


class RequestFailed(RuntimeError):
    """A request got no answer worth having; the message names model, attempts and cause."""


@dataclass
class Counters:
    """What the client saw; a request that succeeded in the end did not fail."""

    requests: int = 0
    retries: int = 0
    failed_requests: int = 0


@dataclass(frozen=True)
class TrainAnswer:
    """critic_train's answer: these weights are served now."""

    loss_mean: float
    weights_version: int


class TritonClient:
    """One per event loop, for the whole run; use as an async context manager."""

    def __init__(self, url: str, settings: ClientSection, *, training_key_env: str | None = None) -> None:
        self.counters = Counters()
        self._tokens_dtype: np.dtype = np.dtype(np.int64)
        self._url = url
        self._settings = settings
        self._train_retries = min(settings.retries, settings.train_retries)
        self._in_flight = asyncio.Semaphore(settings.max_in_flight)
        self._key = os.environ.get(training_key_env) if training_key_env else None
        longest = max(settings.deadline_s, settings.train_deadline_s)
        self._http = InferenceServerClient(url, conn_limit=settings.max_in_flight, conn_timeout=longest)

    async def __aenter__(self) -> TritonClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def model_parameters(self, model: str) -> dict[str, str]:
        """A model's `parameters`, from its configuration: the first contact, so with little patience.

        Tokens are sent from then on in the type that it declares.

        Raises RequestFailed.
        """

        async def ask() -> dict[str, str]:
            config = await self._http.get_model_config(model)
            declared = {tensor["name"]: tensor["data_type"] for tensor in config.get("input", [])}
            if declared.get(contract.TOKENS) == "TYPE_INT32":
                self._tokens_dtype = np.dtype(np.int32)
            return {key: item["string_value"] for key, item in config.get("parameters", {}).items()}

        return await self._attempts(model, ask, self._settings.deadline_s, retries=min(1, self._settings.retries))

    async def score(
        self, rows: list[np.ndarray], outputs: tuple[str, ...], metadata: list[dict[str, Any]] | None = None, *,
        width: int = 0,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Outputs of critic_infer for n token rows, padded to their longest S.

        Args:
            rows: int64 `[length_i]` each.
            outputs: of `rewards` [n, 1], `values` [n, S], `weights_version` [n, 1]; where several rewards are
                served, of `reward_components` [n, C] and `reward_errors` [n, 1] too.
            metadata: what reward functions are told about each row; None: nothing is sent.
            width: pad to at least so many tokens, for servers that batch requests of one length only.

        Raises:
            RequestFailed: no answer within the retries, or the request itself is wrong.
        """
        inputs = {**_padded(rows, width), **_metadata(metadata)}
        return await self._infer(contract.CRITIC_INFER, inputs, outputs, self._settings.deadline_s)

    async def rewards(
        self,
        rows: list[np.ndarray],
        outputs: tuple[str, ...] = (contract.REWARDS,),
        metadata: list[dict[str, Any]] | None = None,
        *,
        width: int = 0,
    ) -> dict[str, np.ndarray]:
        """Outputs of the reward model alone for n token rows; otherwise as `score`.

        Raises RequestFailed.
        """
        inputs = {**_padded(rows, width), **_metadata(metadata)}
        return await self._infer(contract.REWARD_MODEL, inputs, outputs, self._settings.deadline_s)

    async def score_sentences(
        self, texts: list[str], outputs: tuple[str, ...], metadata: list[dict[str, Any]] | None = None
    ) -> dict[str, np.ndarray]:
        """Outputs of reward_model for n texts, tokenised by its own tokenizer; otherwise as `score`.

        Raises RequestFailed.
        """
        inputs = {contract.SENTENCES: contract.texts_array(texts), **_metadata(metadata)}
        return await self._infer(contract.REWARD_MODEL, inputs, outputs, self._settings.deadline_s)

    async def logprobs(self, rows: list[np.ndarray]) -> np.ndarray:
        """Log-probs float32 `[n, S]` of n token rows by the reference model: index t of token t+1, see `LOGPROBS`.

        Raises RequestFailed.
        """
        answer = await self._infer(contract.REFERENCE, _padded(rows), (contract.LOGPROBS,), self._settings.deadline_s)
        return answer[contract.LOGPROBS]

    async def train(self, payload: Mapping[str, np.ndarray], *, run_id: str, step: int) -> TrainAnswer:
        """Train the critic on `payload` as step `step`; repeats are recognised, so retrying is safe.

        Raises:
            RequestFailed: refused, or not served within the retries; the message says what the journal holds.
        """
        inputs = {**payload, **_run(run_id), contract.STEP: np.asarray([step], np.int64)}
        outputs = (contract.LOSS_MEAN, contract.WEIGHTS_VERSION)
        answer = await self._infer(
            contract.CRITIC_TRAIN, inputs, outputs, self._settings.train_deadline_s, self._train_retries
        )
        return TrainAnswer(float(answer[contract.LOSS_MEAN][0]), int(answer[contract.WEIGHTS_VERSION][0]))

    async def save(self, *, run_id: str, step: int, keep_steps: Sequence[int] | None = None) -> int:
        """Have the critic write its checkpoint of `step`; returns the weights version served.

        `keep_steps`: of the critic's checkpoints up to `step`, only these are needed still; None: it keeps the newest.
        Raises RequestFailed.
        """
        inputs = {contract.DUMMY_VAR: np.zeros(1, np.int64), **_run(run_id), contract.STEP: np.asarray([step])}
        if keep_steps is not None:
            inputs[contract.KEEP_STEPS] = np.asarray(keep_steps, np.int64)
        return await self._save(inputs)

    async def rewind(self, *, run_id: str, step: int) -> int:
        """Make `step` the critic's last step; returns the weights version served. Raises RequestFailed."""
        return await self._save({**_run(run_id), contract.REWIND_TO: np.asarray([step], np.int64)})

    async def _save(self, inputs: Mapping[str, np.ndarray]) -> int:
        outputs = (contract.STATUS, contract.WEIGHTS_VERSION)
        answer = await self._infer(
            contract.CRITIC_SAVE, inputs, outputs, self._settings.train_deadline_s, self._train_retries
        )
        return int(answer[contract.WEIGHTS_VERSION][0])

    async def _infer(
        self,
        model: str,
        arrays: Mapping[str, np.ndarray],
        outputs: tuple[str, ...],
        deadline_s: float,
        retries: int | None = None,
    ) -> dict[str, np.ndarray]:
        inputs = []
        for name, array in arrays.items():
            if name == contract.TOKENS:
                array = array.astype(self._tokens_dtype, copy=False)
            tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        wanted = [InferRequestedOutput(name, binary_data=True) for name in outputs]

        async def ask() -> dict[str, np.ndarray]:
            headers = {contract.TRAINING_KEY_HEADER: self._key} if self._key else {}
            answer = await self._http.infer(model, inputs, outputs=wanted, headers=headers)
            return {name: answer.as_numpy(name) for name in outputs}

        async with self._in_flight:
            return await self._attempts(model, ask, deadline_s, retries=retries)

    async def _attempts(
        self, model: str, ask: Callable[[], Awaitable[T]], deadline_s: float, *, retries: int | None = None
    ) -> T:
        self.counters.requests += 1
        attempts = 1 + (self._settings.retries if retries is None else retries)
        for attempt in range(1, attempts + 1):
            try:
                return await asyncio.wait_for(ask(), deadline_s)
            except (InferenceServerException, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                if attempt == attempts or not _is_transient(error):
                    self.counters.failed_requests += 1
                    raise RequestFailed(_describe(self._url, model, attempt, error, deadline_s)) from error
            self.counters.retries += 1
            pause = min(MAX_BACKOFF_S, self._settings.backoff_s * 2 ** (attempt - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")


def _metadata(rows: list[dict[str, Any]] | None) -> dict[str, np.ndarray]:
    return {} if rows is None else {contract.METADATA: contract.texts_array([json.dumps(row) for row in rows])}


def _padded(rows: list[np.ndarray], width: int = 0) -> dict[str, np.ndarray]:
    """`tokens` [n, S] and `sequence_lengths` [n, 1], S the longest row or `width`, whichever is more."""
    tokens = np.zeros((len(rows), max(width, *(row.size for row in rows))), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    return {contract.TOKENS: tokens, contract.SEQUENCE_LENGTHS: np.asarray([[row.size] for row in rows], np.int64)}


def _run(run_id: str) -> dict[str, np.ndarray]:
    return {contract.RUN_ID: np.asarray([run_id.encode()], dtype=np.object_)}


def _is_transient(error: Exception) -> bool:
    """503, time-outs, broken connections, and a dead stub that is being replaced; never a wrong request."""
    if not isinstance(error, InferenceServerException):
        return True
    status = str(error.status() or "")
    return status in ("503", "") or "not healthy" in str(error.message())


def _describe(url: str, model: str, attempts: int, error: Exception, deadline_s: float) -> str:
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    if isinstance(error, InferenceServerException):
        return f"{model} at {url} refused{tries}: {error.message()}"
    if isinstance(error, asyncio.TimeoutError):
        return f"{model} at {url} gave no answer within {deadline_s:g} s{tries}"
    cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"{model} at {url} cannot be reached{tries}: {cause}; is `python -m tools serve` running there?"
