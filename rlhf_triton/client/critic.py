"""The clients of a served critic and its reward model, for asyncio and for code without an event loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_triton.client.blocking import AsyncClient, BlockingClient, blocking, future
from rlhf_triton.client.client import TrainAnswer, TritonClient
from rlhf_triton.client.errors import absence_explained
from rlhf_triton.client.rows import Rows, per_row, plain_object, token_rows, training_arrays
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import Arrays, VersionRange

NO_CRITIC = "no critic: its YAML needs a section `critic`"
NO_REWARD = "no reward: its YAML needs a section `reward`"


@dataclass(frozen=True)
class RowValues:
    """The values of some rows, all from the same weights."""

    values: list[np.ndarray]
    """float32 `[length_i]` of each row: index t is the expected return after the tokens up to t."""
    weights_version: int
    """Version of the critic's weights. Numbers only increase; a rewind publishes old weights under a new number."""


@dataclass(frozen=True)
class RowScores(RowValues):
    """The values and rewards of some rows."""

    rewards: np.ndarray
    """float32 `[n]`, or `[n, A]` if `reward.attribute_weights` is `separate`; NaN where a row has no reward."""
    errors: list[str]
    """The reason why a row has no reward, per row; empty if it has one."""


class AsyncCriticClient(AsyncClient):
    """A critic that Triton serves and a sidecar trains, for a trainer of your own. An async context manager.

    **Rows** are ragged, `[length_i]` each; never pad them. Position t of a row belongs to the value at token t, the
    state in which token t+1 is chosen. So a row of `length` tokens has `length` values, but only `length - 1` entries
    in returns, prev_values and mask: nothing is chosen after the last token.

    **Steps.** `rewind(n)` begins a run (n = 0) or resumes it after step n, and makes this client its owner: `train` and
    `save` of earlier owners are refused from then on. Then train the steps n+1, n+2, … without gaps. A step is trained
    exactly once, however often it is sent and whatever process is killed: repeat a call that failed, with the same step
    and the same content. Before you resume from your checkpoint of step n, `rewind(n)`, which forgets later steps.

    **Staleness.** `train` returns when its weights are served, so values that you request afterwards include the
    update (if `trainer.publish.every` is 1). To overlap, start `train` as a task and request values meanwhile: they
    then lag by the updates in flight, at most. All values of one call come from one version, which the reply names.

    Requests have deadlines, retries, and failover between several servers, as `settings` says. Use a client in one
    event loop; its calls may overlap. It holds connections, so make one in each process, after the fork.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        run_id: str,
        training_key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            url: the server's HTTP port as `host:port`, a list for several servers, or `dns:name:port`.
            run_id: the server's `run.run_id`, or the name of its `run.dir`.
            training_key: what `server.training_key_env` demands for `train`, `save` and `rewind`.
            settings: deadlines, retries and limits; `servers` is taken from `url`.

        Raises:
            ContractError: an invalid address or run id.
        """
        if not isinstance(run_id, str) or not contract.RUN_ID_PATTERN.fullmatch(run_id):
            raise contract.ContractError(f"run_id: {run_id!r}, must be the one in the server's YAML")
        super().__init__(url, training_key=training_key, settings=settings)
        self.run_id = run_id
        self._owns_run = False

    async def values(
        self, rows: Rows, *, min_version: int | None = None, exact_version: int | None = None
    ) -> RowValues:
        """Return the values of n rows of token ids of the critic's tokenizer.

        Args:
            min_version: oldest version of the weights that may answer, such as that of a `TrainAnswer`. The call asks
                the other servers, and waits for up to `deadline_s` of its settings.
            exact_version: the only version that may answer. Give one of the two, or neither.

        Raises:
            ContractError: a row is empty or contains anything but integers; a version is not an integer of at least 0.
            RequestFailed: all attempts failed, no server serves the version, or the server refuses a row: too long, or
                an id outside the vocabulary.
        """
        tokens = token_rows(rows)
        client = await self._connected()
        versions = VersionRange.of(min_version, exact_version)
        reply = await client.score(tokens, (contract.VALUES, contract.WEIGHTS_VERSION), versions=versions)
        return RowValues(*_values(reply, tokens))

    async def score(
        self,
        rows: Rows,
        metadata: list[dict[str, Any]] | None = None,
        *,
        prompt_lengths: Sequence[int] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
    ) -> RowScores:
        """Return values and rewards of n rows in one request; the reward model must have the critic's tokenizer.

        Args:
            metadata: one dictionary per row for reward functions.
            prompt_lengths: for a process reward, leading tokens of each row that belong to its prompt.
            min_version, exact_version: of the critic's weights, as in `values`.

        Raises like `values`; also RlhfError if the server has no reward model that takes these tokens.
        """
        tokens = token_rows(rows)
        client = await self._connected()
        versions = VersionRange.of(min_version, exact_version)
        rows_metadata = per_row(contract.METADATA, metadata, len(tokens), plain_object)
        lengths = per_row(contract.PROMPT_LENGTHS, prompt_lengths, len(tokens), contract.whole_number)
        served = await self._outputs_with_rewards(client)
        explained = (contract.REWARD_ERRORS,) if contract.REWARD_ERRORS in served else ()
        outputs = (contract.REWARDS, contract.VALUES, contract.WEIGHTS_VERSION, *explained)
        reply = await client.score(tokens, outputs, rows_metadata, prompt_lengths=lengths, versions=versions)
        rewards = reply[contract.REWARDS]
        errors = [""] * len(tokens)
        if explained:
            errors = contract.sentence_texts(reply[contract.REWARD_ERRORS])
        return RowScores(*_values(reply, tokens), rewards[:, 0] if rewards.shape[1] == 1 else rewards, errors)

    async def train(self, step: int, tokens: Rows, returns: Rows, prev_values: Rows, mask: Rows) -> TrainAnswer:
        """Train the critic on n rows as step `step`, and return once the new weights are served.

        The loss is the squared error between value and return, clipped to `trainer.clip_value` around the old value and
        averaged over the mask.

        Args:
            step: the number of the update, from 1 on, without gaps.
            tokens: token ids `[length_i]`, prompt and response.
            returns: `[length_i - 1]`, the targets of the values.
            prev_values: `[length_i - 1]`, the values that the advantages were computed with.
            mask: `[length_i - 1]`, 1 where the value counts: from the last token of the prompt on.

        Raises:
            ContractError: lengths that do not match, a number that is not finite, or a mask that is all 0.
            RlhfError: no `rewind` before.
            ServerFailed: the update failed, for the reason in the message. The step counts as done: send the next one.
            RequestRefused: the step does not fit, the key is wrong, or another client has taken over the run.
            RequestFailed: no reply; repeat the call to get it.
        """
        arrays = training_arrays(tokens, returns, prev_values, mask)
        client = await self._connected(writes=True)
        return await client.train(arrays, run_id=self.run_id, step=step)

    async def save(self, step: int, *, keep_steps: Sequence[int] | None = None) -> int:
        """Write the critic's checkpoint of `step` and return the served version.

        Call it when you write your policy's checkpoint. `keep_steps`: steps of all your checkpoints that still exist;
        the critic keeps exactly these. None: the newest three saves. Raises as `train`.
        """
        client = await self._connected(writes=True)
        return await client.save(run_id=self.run_id, step=step, keep_steps=keep_steps)

    async def rewind(self, step: int) -> int:
        """Take over the run and rewind the critic to `step`; return the version that is served.

        Call it first: `rewind(0)` for a new run, `rewind(n)` to resume from your checkpoint of step n. It reaches the
        steps of the critic's checkpoints, which `save` writes, and every step after the newest of these.

        Raises RequestFailed; ServerFailed if the step cannot be reached any more, RequestRefused if it never was.
        """
        client = await self._connected()
        version = await client.rewind(run_id=self.run_id, step=step)
        self._owns_run = True
        return version

    async def _connected(self, *, writes: bool = False) -> TritonClient:
        """Return the client of the servers, after the first of them has described its critic."""
        self._check_loop()
        if writes and not self._owns_run:
            raise RlhfError(
                "call rewind first: rewind(0) begins a run, rewind(n) resumes it after step n, and makes this client "
                "its owner"
            )
        if contract.CRITIC not in self._client.declared:
            with absence_explained(NO_CRITIC):
                await self._client.describe(contract.CRITIC)
        return self._client

    async def _outputs_with_rewards(self, client: TritonClient) -> frozenset[str]:
        """Return the outputs of critic_infer. Raises RlhfError if there are no rewards of the same tokens."""
        if contract.CRITIC_INFER not in client.declared:
            with absence_explained(NO_REWARD):
                reward = await client.describe(contract.REWARD_MODEL)
            if reward.tokenizer != client.declared[contract.CRITIC].tokenizer:
                raise RlhfError(
                    "the reward model has another tokenizer than the critic, so it cannot score these tokens; ask for "
                    "`values` here, and for rewards of texts with a RewardClient"
                )
            await client.describe(contract.CRITIC_INFER)
        return client.declared[contract.CRITIC_INFER].outputs


def _values(reply: Arrays, rows: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Return each row's values without padding, and their version. Raises RlhfError if one is not finite."""
    values = [reply[contract.VALUES][i, : row.size] for i, row in enumerate(rows)]
    for i, row in enumerate(values):
        if not np.isfinite(row).all():
            raise RlhfError(f"values[{i}]: the critic returned numbers that are not finite")
    return values, int(reply[contract.WEIGHTS_VERSION].flat[0])


class CriticClient(BlockingClient[AsyncCriticClient]):
    """Blocking version of `AsyncCriticClient`, which documents the calls. A context manager.

    Any thread may call it, several at the same time; `…_future` returns at once, with a `concurrent.futures.Future` of
    the reply. Make one client in each process, after the fork.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        run_id: str,
        training_key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """Connect to nothing yet; arguments and errors as in `AsyncCriticClient`."""
        super().__init__(AsyncCriticClient(url, run_id=run_id, training_key=training_key, settings=settings))

    def __reduce__(self) -> tuple[Any, ...]:
        raise RlhfError("a CriticClient is the owner of its run in this process, and cannot be sent; make one there")

    values = blocking(AsyncCriticClient.values)
    score = blocking(AsyncCriticClient.score)
    train = blocking(AsyncCriticClient.train)
    save = blocking(AsyncCriticClient.save)
    rewind = blocking(AsyncCriticClient.rewind)
    values_future = future(AsyncCriticClient.values)
    score_future = future(AsyncCriticClient.score)
    train_future = future(AsyncCriticClient.train)
