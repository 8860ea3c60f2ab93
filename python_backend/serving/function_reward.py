"""Triton model of a reward function: worker processes score the rows; the reply follows when the last row is done.

A groupwise function receives all rows of a request that share a group id, or a prompt, in one call.

Replies with `reward_component` FP32 [B, 1], NaN for a row without a score, and `reward_error` BYTES [B, 1]: why the row
has no score, empty if it has one. Imports no torch.
"""

import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlhf_triton.checkpoints.special_tokens import reply_text
from rlhf_triton.checkpoints.tokenization import MAX_ROW_TOKENS, encode_bare_text
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.errors import FunctionError
from rlhf_triton.python_backend.serving.requests import messages_in, request_limits
from rlhf_triton.python_backend.serving.round_robin import RoundRobin
from rlhf_triton.python_backend.serving.triton import Call, NamedCounters, log, log_error, parameters_of, triton_model
from rlhf_triton.rewards.groups import grouped
from rlhf_triton.rewards.pool import FunctionCall, ScoreOutcome, WorkerPool
from rlhf_triton.rewards.replies import with_reply
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY, Sample
from rlhf_triton.user_code import source_digest
from rlhf_triton.wire import contract
from rlhf_triton.wire.texts import metadata_rows, pair_texts, text_bytes

# Token ids are not checked against the tokenizer: a policy's vocabulary may be padded beyond the tokenizer's.
ANY_TOKEN = contract.Limits(vocab_size=2**31)

FUNCTION_COUNTER = "rlhf_reward_function_total"  # metric with a label `counter`: the counted name


class FunctionReward:
    """Scores rows with one reward function."""

    def __init__(self, args: Mapping[str, str]) -> None:
        """Start the workers.

        Raises FunctionError if the function cannot be imported, or its file has changed since the configuration was
        rendered, before this process replaced another one: clients would take the scores of two functions for one's.
        """
        parameters = parameters_of(args)
        self._tokenizer = load_tokenizer(parameters.path("tokenizer")) if parameters.optional("tokenizer") else None
        self._limits = request_limits(ANY_TOKEN, parameters)
        self._texts = RoundRobin("texts")
        self._groupwise = parameters.optional(contract.GROUPWISE) == "true"
        spec = os.fsdecode(parameters.text("function").encode())
        rendered = parameters.optional(contract.SOURCE_DIGEST)
        if rendered is not None and rendered != source_digest(spec):
            raise FunctionError(
                f"{spec} has changed since the server was started; restore its file, or start the server again"
            )
        call = FunctionCall(
            spec=spec,
            timeout_s=float(parameters.text("timeout_s")),
            timeout_key=f"rewards.{parameters.model.removeprefix(contract.REWARD_FUNCTION_PREFIX)}.timeout_s",
            groupwise=self._groupwise,
            options=json.loads(parameters.optional("options") or "{}"),
            hidden_variables=json.loads(parameters.optional("hidden_variables") or "[]"),
        )
        workers = parameters.number("workers")
        counters = NamedCounters(parameters.model, FUNCTION_COUNTER, "What the reward function counts", "counter")
        most = parameters.number("max_waiting_rows")
        self._pool = WorkerPool(call, num_workers=workers, max_waiting=most, counted=counters.add)
        unit = "group" if self._groupwise else "sample"
        log(f"{parameters.model}: {call.spec} in {workers} worker processes, at most {call.timeout_s:g} s per {unit}")

    def execute(self, calls: Sequence[Call]) -> None:
        """Queue the requests for a background thread, which (de)tokenises their rows.

        Tokenising here would block the model's other requests, because Triton calls `execute` from one thread.
        """
        for call in calls:
            self._texts.submit(self._submit_call(call))

    def finalize(self) -> None:
        """Kill all workers, after every request has been answered."""
        self._texts.close()  # before the pool, because these jobs submit samples to it
        self._pool.close()

    def _submit_call(self, call: Call) -> Iterator[None]:
        try:
            if call.header(contract.PROBE_HEADER) is not None:
                _answer(call, [ScoreOutcome()] * _num_rows(call))
                return
            samples = []
            for sample in self._samples(call):
                samples.append(sample)
                yield  # (de)tokenising is slow: let the other requests of the thread take turns
            groups = [[i] for i in range(len(samples))]
            errors = dict[int, str]()
            if self._groupwise:
                groups, errors = grouped(sample.metadata for sample in samples)
            pending = self._pool.submit([[samples[i] for i in rows] for rows in groups])
            pending.add_done_callback(functools.partial(_reply, call, groups, errors))
        except Exception as error:  # thread edge: an error fails this request only
            _refuse(call, error)

    def _samples(self, call: Call) -> Iterator[Sample]:
        sentences = call.array(contract.SENTENCES)
        encoded = call.array(contract.METADATA)
        if sentences is None:
            token_array = call.array(contract.TOKENS)
            lengths = call.array(contract.SEQUENCE_LENGTHS)
            if self._tokenizer is None:
                raise contract.ContractError(
                    f"{contract.TOKENS}: this server has no tokenizer to decode them for reward functions; send "
                    f"{contract.SENTENCES}, or set actor.policy.model to a folder with one"
                )
            rows = list(contract.scoring_rows(token_array, lengths, limits=self._limits).rows)
            text_bytes(np.empty((0, 1), np.object_), encoded, self._limits)
            for row, metadata in zip(rows, _metadata_rows(encoded, len(rows)), strict=True):
                tokens = row.tokens.tolist()
                text = given_text(metadata)
                yield Sample(reply_text(self._tokenizer, tokens) if text is None else text, tokens, metadata)
            return
        pairs = call.array(contract.TEXT_PAIRS)
        text_bytes(sentences, encoded, self._limits, pairs)
        texts = contract.sentence_texts(sentences)
        seconds = pair_texts(pairs, len(texts))
        objects = _metadata_rows(encoded, len(texts))
        for first, second, metadata in zip(texts, seconds, objects, strict=True):
            text = first + second
            if isinstance(metadata.get(MESSAGES_KEY), list):
                text, metadata = with_reply(metadata[MESSAGES_KEY], text, metadata)
            ids: list[int] | None = None
            if self._tokenizer is not None:
                ids = encode_bare_text(self._tokenizer, text)[:MAX_ROW_TOKENS]
            yield Sample(text, ids, metadata)


def _metadata_rows(encoded: np.ndarray | None, num_rows: int) -> Iterator[dict[str, Any]]:
    """Yield each row's metadata, with the messages of its chat as in a row of a run. Raises ContractError."""
    for i, metadata in enumerate(metadata_rows(encoded, num_rows)):
        for key in (MESSAGES_KEY, REPLY_KEY):
            if isinstance(metadata.get(key), list):
                metadata[key] = messages_in(i, metadata, key)
        yield metadata


def given_text(metadata: Mapping[str, Any]) -> str | None:
    """Return the row's text if the client sent it in the metadata, in addition to tokens; None otherwise."""
    prompt, response = (metadata.get(key) for key in (PROMPT_KEY, RESPONSE_KEY))
    if not isinstance(response, str):
        return None
    if MESSAGES_KEY in metadata:
        return response
    return prompt + response if isinstance(prompt, str) else None


def _reply(
    call: Call, groups: Sequence[list[int]], errors: Mapping[int, str], pending: Future[list[list[ScoreOutcome]]]
) -> None:
    """Send the outcomes of a request; the rows in `errors` failed and belong to no group."""
    try:
        rows = [*itertools.chain(*groups), *errors]
        outcomes = [*itertools.chain(*pending.result()), *(ScoreOutcome(error=cause) for cause in errors.values())]
        by_row = dict(zip(rows, outcomes, strict=True))
        _answer(call, [by_row[row] for row in range(len(rows))])
    except Exception as error:  # thread edge: every request must get a response
        log_error(f"no scores: {type(error).__name__}: {error}")
        _refuse(call, error)


def _answer(call: Call, outcomes: Sequence[ScoreOutcome]) -> None:
    """Send a normal response, even if every row failed.

    Error responses from two steps of an ensemble at the same time can crash tritonserver 2.51.
    """
    scores = np.asarray([[outcome.score] for outcome in outcomes], np.float64)
    with np.errstate(over="ignore"):  # a score beyond FP32 becomes infinite, which the weighted sum reports as an error
        arrays = {contract.REWARD_COMPONENT: scores.astype(np.float32)}
    call.answer({**arrays, contract.REWARD_ERROR: contract.texts_array([outcome.error for outcome in outcomes])})


def _refuse(call: Call, error: Exception) -> None:
    """Send a reply that reports `error` for every row.

    Any input gives the number of rows, because Triton checks that all have the same batch dimension. A request without
    inputs gets an error response.
    """
    try:
        _answer(call, [ScoreOutcome(error=str(error) or type(error).__name__)] * _num_rows(call))
    except Exception as unsent:  # thread edge: every request must get a response
        call.fail(unsent)


def _num_rows(call: Call) -> int:
    """Return the number of rows of a request, or raise ContractError if it has no inputs."""
    inputs = (contract.SENTENCES, contract.TOKENS, contract.SEQUENCE_LENGTHS, contract.METADATA)
    arrays = (call.array(name) for name in inputs)
    num_rows = next((len(array) for array in arrays if array is not None), 0)
    if num_rows == 0:
        raise contract.ContractError(f"{contract.TOKENS}: missing; send {contract.TOKENS} or {contract.SENTENCES}")
    return num_rows


TritonPythonModel = triton_model(FunctionReward)
