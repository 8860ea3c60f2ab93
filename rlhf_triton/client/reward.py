"""The clients of a served reward: for asyncio, for code without an event loop, and as functions of other trainers."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from rlhf_triton.client.blocking import AsyncClient, BlockingClient, blocking, future
from rlhf_triton.client.errors import RequestFailed, absence_explained
from rlhf_triton.client.reward_source import RESERVED, UNAVAILABLE, RewardSource, Row, RowResult, chat_row, text_row
from rlhf_triton.client.rows import listed, not_rows, per_row, plain, plain_object, text_or_messages, token_rows
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import Messages
from rlhf_triton.wire.contract import STEP_ENDS, STEP_REWARDS, ContractError, VersionRange, whole_number
from rlhf_triton.wire.messages import BadMessages, plain_messages

logger = logging.getLogger(__name__)
Input: TypeAlias = str | tuple[str | Messages, str] | tuple[Messages, Messages] | Messages | Sequence[int] | np.ndarray
ROW_FORMS = "a text, a pair (prompt, response), the messages of a chat, or token ids"
NO_REWARD = "no reward: its YAML needs a section `reward`, or `rewards`"
NOT_METADATA = ("completion_ids", "environments")  # arguments of TRL with one entry per row that are no columns


class Scores(np.ndarray):
    """The rewards of n rows: a float32 array `[n]`, NaN where a row has none; attributes have details of each row.

    With `reward.attribute_weights: separate` it is `[n, A]`. Slices and
    results of arithmetic are plain arrays.
    """

    errors: list[str]
    """The reason why a row has no reward, per row; empty if it has one."""
    versions: list[int | None]
    """Version of the reward model's weights that scored each row; None if the reward has no versions."""
    components: dict[str, np.ndarray]
    """The terms of a sum of rewards by name, float32 `[n]` each, NaN where a term failed."""
    steps: list[np.ndarray]
    """A process reward's scores of each row's steps, float32 `[k_i]`; empty for other rewards."""
    step_ends: list[np.ndarray]
    """A process reward's step ends: index of each step's last token; for a text, number of characters up to its end."""

    @classmethod
    def of(cls, results: Sequence[RowResult], served: ServedModel) -> "Scores":
        """Return the scores of rows."""
        width = max((len(result.rewards) for result in results), default=0) or served.num_rewards
        none = (math.nan,) * width
        rewards = np.asarray([result.rewards or none for result in results], np.float32).reshape(-1, width)
        self = (rewards[:, 0] if width == 1 else rewards).view(cls)
        self.errors = [result.error or "" for result in results]
        self.versions = [result.weights_version for result in results]
        terms = np.full((len(results), len(served.components)), np.nan, np.float32)
        for i, result in enumerate(results):
            if result.components:
                terms[i] = [math.nan if term is None else term for term in result.components]
        self.components = {name: terms[:, k] for k, name in enumerate(served.components)}
        empty = (np.empty(0, np.float32), np.empty(0, np.int64))
        steps = [result.steps or empty for result in results] if served.granularity else []
        self.steps = [rewards for rewards, _ in steps]
        self.step_ends = [ends for _, ends in steps]
        return self

    @classmethod
    def _with(cls, rewards: np.ndarray, attributes: Mapping[str, Any]) -> "Scores":
        self = rewards.view(cls)
        vars(self).update(attributes)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._with, (np.asarray(self), vars(self))

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "Scores":
        return self._with(*copy.deepcopy((np.asarray(self), vars(self)), memo))

    def __copy__(self) -> "Scores":
        return self.copy()

    def copy(self, order: Any = "C") -> "Scores":
        return self._with(np.array(self, order=order), vars(self))

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, Scores) else value for value in inputs]
        return getattr(ufunc, method)(*plain, **options)


class AsyncRewardClient(AsyncClient):
    """The reward that Triton serves: a checkpoint, functions, or their sum. An async context manager.

    A row that the server refuses, such as a text that is too long, has the reward NaN and its error; it does not affect
    the others. Requests have deadlines, retries, and failover between several servers, as `settings` says. Use a client
    in one event loop; its calls may overlap.
    """

    def __init__(self, url: str | Sequence[str], *, settings: ClientSettings | None = None) -> None:
        """Connect to nothing yet.

        Args:
            url: the server's HTTP port as `host:port`, a list for several servers, or `dns:name:port`.
            settings: deadlines, retries and limits; `servers` is taken from `url`.

        Raises ContractError for an invalid address.
        """
        super().__init__(url, settings=settings)
        self._source = RewardSource(self._client, patience_s=0.0)  # a wrong address fails at once

    async def score(
        self,
        inputs: Sequence[Input],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt_lengths: Sequence[int] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
    ) -> Scores:
        """Return the rewards of n rows, which may be of different kinds and lengths.

        Args:
            inputs: n rows, each a text; a pair of a prompt, a text or messages, and its response, which may be
                messages after messages; the messages of a chat; or token ids of the reward model's tokenizer, special
                tokens included. The reward model renders texts and chats itself.
            metadata: of each row, columns for reward functions (`sample.metadata`).
            prompt_lengths: of each row of token ids, how many belong to its prompt, for process rewards.
            min_version: oldest version of a live reward model's weights that may answer.
            exact_version: the only version that may answer. Give one of the two, or neither.

        Raises:
            ContractError: an argument is invalid; the message names the row, and nothing was sent.
            RlhfError: no reward is served, or the client is used wrongly.
            RequestFailed: no server has answered in time.
        """
        self._check_loop()
        rows = rows_of(inputs, metadata, prompt_lengths)
        versions = VersionRange.of(min_version, exact_version)
        with absence_explained(NO_REWARD):
            served = await self._source.served()
        outputs = (STEP_REWARDS, STEP_ENDS) if served.granularity else ()
        results = await self._source.score(rows, outputs, versions) if rows else []
        if results and all(result.status in UNAVAILABLE for result in results):
            raise RequestFailed(str(results[0].error))
        return Scores.of(results, served)


class RewardClient(BlockingClient[AsyncRewardClient]):
    """Blocking version of `AsyncRewardClient`, which documents the calls. A context manager.

    Any thread may call it, several at the same time; `score_future` returns at once, with a
    `concurrent.futures.Future` of the scores. It can be pickled; make one in each process, after the fork.
    """

    def __init__(self, url: str | Sequence[str], *, settings: ClientSettings | None = None) -> None:
        """Connect to nothing yet; arguments and errors as in `AsyncRewardClient`."""
        self._make = functools.partial(AsyncRewardClient, url, settings=settings)
        super().__init__(self._make())

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), *self._make.args, **self._make.keywords), ()

    score = blocking(AsyncRewardClient.score)
    score_future = future(AsyncRewardClient.score)

    def as_trl(self) -> Callable[..., list[float | None]]:
        """Return the reward as a function of TRL: `GRPOTrainer(reward_funcs=client.as_trl())`.

        Columns of the data set reach reward functions as `sample.metadata`. A completion without a reward is None,
        which TRL leaves out of its update. The terms of a sum are logged as metrics.
        """

        return _bound(triton_reward, self)

    def as_verl(self, prompt_key: str = "question") -> Callable[..., float]:
        """Return the reward as verl's custom reward function, `compute_score`.

        `data_source`, `ground_truth` and `extra_info` reach reward functions as `sample.metadata`. verl has no value
        for a missing reward, so the function raises RlhfError.

        Args:
            prompt_key: key of `extra_info` with the prompt, a text or messages, which verl does not pass otherwise.
        """

        return _bound(compute_score, self, prompt_key=prompt_key)

    def as_openrlhf(self) -> Callable[..., dict[str, Any]]:
        """Return the reward as OpenRLHF's `reward_func`, for a file that `--reward.remote_url` names.

        `labels` reach reward functions as `sample.metadata["label"]`. Raises RlhfError if a row has no reward.
        """

        return _bound(reward_func, self)


def _bound(function: Callable[..., Any], client: RewardClient, **options: Any) -> Callable[..., Any]:
    """Return a function of a trainer with its client, which can be pickled: trainers send it to other processes."""
    bound = functools.partial(function, client, **options)
    vars(bound)["__name__"] = function.__name__
    return bound


def triton_reward(
    client: RewardClient,
    /,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    **columns: Any,
) -> list[float | None]:
    """Return the rewards of TRL's completions; see `RewardClient.as_trl`."""
    rows = list[Input]()
    for i, (prompt, completion) in enumerate(_paired(prompts=prompts, completions=completions)):
        if isinstance(prompt, str) and not isinstance(completion, str):
            raise ContractError(f"prompts[{i}]: {prompt!r:.80}, must be messages, as completions[{i}] is")
        rows.append((prompt, completion))
    row_columns = {name: values for name, values in columns.items() if is_column(name, values, len(rows))}
    if reserved := RESERVED & row_columns.keys():
        raise ContractError(f"the column {min(reserved)!r} has a reserved name; rename it in the data set")
    metadata = [{name: values[i] for name, values in row_columns.items()} for i in range(len(rows))]
    scores = client.score(rows, metadata)
    missing = [error for error in scores.errors if error]
    if missing:
        logger.warning("%d of %d completions have no reward: %s", len(missing), len(rows), missing[0])
    if (log_metric := columns.get("log_metric")) is not None:
        for name, values in scores.components.items():
            if not np.isnan(values).all():
                log_metric(f"reward_components/{name}", float(np.nanmean(values)))
    return [None if math.isnan(score) else score for score in one_each(scores).tolist()]


def compute_score(
    client: RewardClient,
    /,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    prompt_key: str,  # also one of verl's `reward_kwargs`
    **_: Any,
) -> float:
    """Return the reward of verl's response; see `RewardClient.as_verl`."""
    info = plain_object("extra_info", extra_info or {})
    if prompt_key not in info:
        raise ContractError(f"extra_info: it has no {prompt_key!r}; name the key of the prompt: as_verl(prompt_key=…)")
    columns = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": info}
    prompt = text_or_messages(f"extra_info.{prompt_key}", info[prompt_key])
    row: Any = (prompt, text_or_messages("solution_str", solution_str))
    return float(complete(client.score([row], [columns]))[0])


def reward_func(
    client: RewardClient, /, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
) -> dict[str, Any]:
    """Return the rewards of OpenRLHF's queries; see `RewardClient.as_openrlhf`."""
    rows = list[Input]()
    for prompt, query in _paired(prompts=prompts, queries=queries):
        is_split = isinstance(query, str) and isinstance(prompt, str) and query.startswith(prompt)
        rows.append((prompt, query[len(prompt) :]) if is_split else query)  # its tokenizer may have changed the prompt
    scores = complete(client.score(rows, per_row("labels", labels, len(rows), lambda _, label: {"label": label})))
    rewards = scores.tolist()
    terms = {name: term.tolist() for name, term in scores.components.items() if not np.isnan(term).any()}
    return {"rewards": rewards, "scores": rewards, "extra_logs": terms}


def _paired(**given: Any) -> list[tuple[Any, Any]]:
    """Return the entries of two lists by row, texts or messages. Raises ContractError with the name of a list."""
    (name, entries), (other, others) = given.items()
    first = [text_or_messages(f"{name}[{i}]", entry) for i, entry in enumerate(listed(name, entries))]
    second = per_row(other, listed(other, others), len(first), text_or_messages)
    return [*zip(first, second or [], strict=True)]


def rows_of(
    inputs: Sequence[Input], metadata: Sequence[Mapping[str, Any]] | None, prompt_lengths: Sequence[int] | None
) -> list[Row]:
    """Return the rows to score. Raises ContractError with the row that is invalid."""
    entries = listed("inputs", inputs)
    first = entries[0] if entries else ""
    is_number = isinstance(first, int | float) or (getattr(first, "shape", None) == () and not isinstance(first, str))
    is_pair = isinstance(inputs, tuple) and len(entries) == 2 and isinstance(entries[1], str)  # or two texts
    if is_number or is_pair or isinstance(first, Mapping):
        raise not_rows("inputs", inputs)
    columns = per_row("metadata", metadata, len(entries), plain_object) or [{}] * len(entries)
    lengths = per_row("prompt_lengths", prompt_lengths, len(entries), whole_number) or [0] * len(entries)
    rows = []
    for i, (entry, row_metadata, length) in enumerate(zip(entries, columns, lengths, strict=True)):
        if reserved := RESERVED & row_metadata.keys():
            raise ContractError(f"metadata[{i}].{min(reserved)}: a reserved name; put it into the row, or rename it")
        row = _row(i, entry, row_metadata)
        if length:
            if row.tokens is None or not 0 < length < len(row.tokens):
                most = "0, as the row is a text" if row.tokens is None else f"0 to {len(row.tokens) - 1}"
                raise ContractError(f"prompt_lengths[{i}]: {length}, must be {most}")
            row = replace(row, prompt_length=length)
        rows.append(row)
    return rows


def _row(index: int, value: Any, metadata: dict[str, Any]) -> Row:
    where = f"inputs[{index}]"
    if isinstance(value, str):
        return Row((plain(where, value),), metadata=metadata)
    if (
        isinstance(value, bytes | bytearray | Mapping)
        or not hasattr(value, "__getitem__")
        or getattr(value, "ndim", 1) == 0
    ):
        raise ContractError(f"{where}: {value!r:.80}, must be {ROW_FORMS}")
    prompt, response = value if len(value) == 2 else (None, None)
    if isinstance(response, str):
        prompt = text_or_messages(f"{where}[0]", prompt)
        if isinstance(prompt, str):
            return text_row(prompt, plain(where, response), metadata)
        value = [*prompt, {"role": "assistant", "content": response}]
    reply_size = 0
    if (
        isinstance(value, tuple)
        and isinstance(prompt, list)
        and isinstance(response, list)
        and all(isinstance(message, Mapping) for message in prompt + response)
    ):
        if not response:
            raise ContractError(f"{where}[1]: [], must have a message; a reply may be the empty text")
        reply_size = len(response)
        value = prompt + response
    if isinstance(next(iter(value), None), Mapping):  # not value[0], which a pandas Series reads as a label
        try:
            return chat_row(plain_messages(plain(where, [*value])), metadata, reply_size)
        except BadMessages as error:
            raise ContractError(f"{where}{error}") from error
    try:
        (tokens,) = token_rows([value])
    except ContractError as error:
        reason = str(error).removeprefix("tokens[0]: ")
        raise ContractError(f"{where}: {reason}; a row is {ROW_FORMS}") from error
    return Row(tokens=tokens, metadata=metadata)


def one_each(scores: Scores) -> Scores:
    """Return the scores. Raises RlhfError if a row has several, for which a trainer has no place."""
    if scores.ndim > 1:
        raise RlhfError("the reward model has several rewards per row: set reward.attribute_weights")
    return scores


def complete(scores: Scores) -> Scores:
    """Return the scores. Raises RlhfError with the error of the first row that has none, or if a row has several."""
    error = next((f"row {i}: {error}" for i, error in enumerate(scores.errors) if error), None)
    if error is not None:
        raise RlhfError(error)
    return one_each(scores)


def is_column(name: str, values: Any, num_rows: int) -> bool:
    """Return whether a keyword argument of TRL is a column of the data set that JSON can express."""
    if name in NOT_METADATA or not isinstance(values, list) or len(values) != num_rows:
        return False
    try:
        plain(name, values)
    except ContractError as error:  # images, for example
        warn_once(f"reward functions do not receive the column {error}")
        return False
    return True
