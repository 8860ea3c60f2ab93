"""Reference log-probs, from the actor's own copy of the frozen policy or from tritonserver."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from rlhf_triton.actor.data.compute import InThread
from rlhf_triton.actor.data.rollout import ReferenceLogprobs, Rollout, Scores, joined
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.scoring.stream import RowStream
from rlhf_triton.checkpoints.inspection import fingerprint_weights
from rlhf_triton.checkpoints.tokenization import fingerprint
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed
from rlhf_triton.config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import BANNED_TOKEN_IDS, CHECKPOINT_FINGERPRINT, REFERENCE, TEMPERATURE, id_ranges


class OwnReference:
    """The reference in the actor: a copy or, with LoRA, the policy with its adapters disabled."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def compare(self) -> None:
        """Do nothing: the reference comes from the policy itself."""

    def stream(self, in_thread: InThread) -> OwnStream:
        """Return the stream of one rollout; `in_thread` runs torch outside the event loop."""
        return OwnStream(self._policy, in_thread)


class OwnStream:
    """Computes the log-probs of all rows at once, after generation."""

    def __init__(self, policy: Policy, in_thread: InThread) -> None:
        self._policy, self._in_thread = policy, in_thread

    def take(self, index: int, row: Rollout) -> None:
        """Do nothing: rows are computed in `logprobs`."""

    async def logprobs(self, whole: Rollout) -> ReferenceLogprobs:
        """Return the log-probs of all rows."""
        logprobs = await self._in_thread(self._policy.logprobs, whole, reference=True)
        return ReferenceLogprobs(logprobs, torch.ones(len(whole.prompts), dtype=torch.bool), [])

    async def close(self) -> None:
        """Do nothing: there are no requests."""


class ServedReference:
    """The `reference` model in tritonserver, which receives each row as soon as it ends."""

    def __init__(self, client: TritonClient, policy: Policy, checkpoint: Path, *, rows_per_request: int) -> None:
        """`checkpoint`: the folder of the reference, which need not be accessible from here."""
        self._client = client
        self._policy = policy
        self._checkpoint = checkpoint
        self._rows_per_request = rows_per_request

    async def compare(self) -> None:
        """Check that the served reference computes the log-probs that the initial policy would.

        The weights are compared only if `reference.model` is accessible from here.

        Raises:
            RlhfError: the reference is not served, or differs in vocabulary, dtype, temperature, banned tokens or
                weights.
            RequestFailed: the server cannot be reached.
        """
        try:
            declared = await self._client.describe(REFERENCE)
        except RequestFailed as error:
            if error.code != UNKNOWN_MODEL:
                raise
            raise RlhfError(
                f"the server has no model {REFERENCE} ({error}); start it with this configuration, or set "
                "actor.kl.reference to actor"
            ) from error
        served = declared.parameters
        policy, precision = self._policy, self._policy.settings.precision
        if declared.tokenizer != fingerprint(policy.tokenizer):
            raise RlhfError(
                f"the reference's tokenizer differs from the policy's ({declared.folder} and "
                f"{policy.tokenizer.name_or_path}): log-probs belong to the policy's tokens, so the reference must be "
                "a checkpoint with the same vocabulary"
            )
        if served.get("dtype") != precision:
            raise RlhfError(
                f"the server's {REFERENCE} computes in {served.get('dtype')}, the actor in {precision}: the "
                "KL would not start at 0; set reference.dtype and actor.policy.precision to the same value"
            )
        expected = {TEMPERATURE: repr(policy.temperature), BANNED_TOKEN_IDS: id_ranges(policy.banned_ids)}
        for name, ours in expected.items():
            if served.get(name) != ours:
                raise RlhfError(
                    f"the server's {REFERENCE} was rendered with {name} {served.get(name)}, the actor has {ours}: its "
                    "log-probs would be those of a different distribution; start the server with the actor's "
                    "configuration"
                )
        if self._checkpoint.is_dir() and served.get(CHECKPOINT_FINGERPRINT) != fingerprint_weights(self._checkpoint):
            raise RlhfError(
                f"the server's {REFERENCE} is {declared.folder}, whose weights are not those of "
                f"reference.model ({self._checkpoint}); start the server with the actor's configuration"
            )

    def stream(self, in_thread: InThread) -> ServedStream:
        """Return the stream of one rollout; `in_thread` is unused."""
        return ServedStream(self.ask, rows_per_request=self._rows_per_request)

    async def ask(self, rollout: Rollout) -> ReferenceLogprobs:
        """Request and return the log-probs of all rows of `rollout`; if the request fails, `known` is False for all."""
        count, width = rollout.tokens.shape
        try:
            logprobs = torch.tensor(await self._client.logprobs(rollout.rows()))[:, :-1]
        except RequestFailed as error:  # counted and masked by the caller
            return ReferenceLogprobs(torch.zeros(count, width - 1), torch.zeros(count, dtype=torch.bool), [str(error)])
        mask = rollout.mask
        known = torch.where(mask > 0, logprobs, 0.0).isfinite().all(-1)  # a banned token in a prompt has log-prob -inf
        failures = [] if known.all() else [f"{REFERENCE} returned log-probs that are not finite for a response"]
        return ReferenceLogprobs(torch.where(known[:, None], logprobs, 0.0), known, failures)


class ServedStream(RowStream[ReferenceLogprobs]):
    """Requests log-probs of rows while others are still being generated; unlike scoring, never waits for the critic."""

    async def logprobs(self, whole: Rollout) -> ReferenceLogprobs:
        """Return the log-probs of all rows, in the order of `whole`."""
        parts, order = await self.answers()
        return await asyncio.to_thread(_joined, parts, order, whole.tokens.shape[1] - 1)


def _joined(parts: list[ReferenceLogprobs], order: torch.Tensor, width: int) -> ReferenceLogprobs:
    return ReferenceLogprobs(
        joined([part.logprobs for part in parts], width)[order],
        torch.cat([part.known for part in parts])[order],
        sorted({failure for part in parts for failure in part.failures}),
    )


Reference: TypeAlias = OwnReference | ServedReference


def make_reference(config: RunConfig, client: TritonClient, policy: Policy) -> Reference:
    """Create the reference that `actor.kl.reference` selects."""
    if not config.actor.kl.serves_reference:
        return OwnReference(policy)
    return ServedReference(
        client, policy, config.reference.model, rows_per_request=config.actor.client.rows_per_request
    )


def only_known(scores: Scores, reference: ReferenceLogprobs) -> Scores:
    """Return `scores` with rows without reference log-probs marked as not scored."""
    if reference.known.all():
        return scores
    scored = scores.scored & reference.known
    return dataclasses.replace(
        scores,
        rewards=torch.where(scored, scores.rewards, 0.0),
        values=torch.where(scored[:, None], scores.values, 0.0),
        scored=scored,
        failures=sorted({*scores.failures, *reference.failures}),
    )


# Scores rows again so that one version of a live reward model scores a whole step, and every group at the least.


logger = logging.getLogger(__name__)
ROUNDS = 3  # each follows a swap that lands while rows are scored, so more than one is rare


async def with_one_version(
    score: Callable[[Rollout, int], Awaitable[Scores]], rollout: Rollout, scores: Scores, *, group_size: int
) -> Scores:
    """Return `scores` in which the same version of the reward model has scored every row.

    The groups of rows that another version has scored are scored again. If the versions still differ after `ROUNDS`,
    because the server swaps all the time or the servers disagree, rows are masked so that at least no group mixes two.

    Args:
        score: scores the rows of a rollout, with the given `group_size`.
        group_size: number of consecutive rows that form an advantage group.
    """
    if scores.reward_versions is None:
        return scores
    target = int(scores.reward_versions.max())
    for _ in range(ROUNDS):
        others = scores.scored & (_versions(scores) != target)
        if not others.any():
            return scores
        rows = _whole_groups(others, group_size).nonzero().flatten()
        logger.info("%d rows are scored again: version %d of the reward model is served now", len(rows), target)
        again = await score(await asyncio.to_thread(rollout.select, rows), group_size)
        scores = await asyncio.to_thread(_replaced, scores, rows, again)
        if again.scored.any():
            target = int(_versions(again)[again.scored].max())
    return _without_mixed_groups(scores, group_size)


def _versions(scores: Scores) -> Tensor:
    assert scores.reward_versions is not None
    return scores.reward_versions


def _whole_groups(rows: Tensor, group_size: int) -> Tensor:
    return rows.view(-1, group_size).any(1).repeat_interleave(group_size)


def _replaced(scores: Scores, rows: Tensor, again: Scores) -> Scores:
    """Return `scores` with the rewards of `again` in these rows, and with their own values."""
    scored = scores.scored.index_copy(0, rows, scores.scored[rows] & again.scored)
    components = {name: old.index_copy(0, rows, again.components[name]) for name, old in scores.components.items()}
    return _masked(
        dataclasses.replace(
            scores,
            rewards=scores.rewards.index_copy(0, rows, again.rewards),
            reward_versions=_versions(scores).index_copy(0, rows, _versions(again)),
            components=components,
            failures=sorted({*scores.failures, *again.failures}),
            process=scores.process and again.process and scores.process.replaced(rows, again.process),
        ),
        scored,
    )


def _without_mixed_groups(scores: Scores, group_size: int) -> Scores:
    """Return `scores` with the rows masked that another version than the newest of their group has scored."""
    versions = torch.where(scores.scored, _versions(scores), -1)
    newest = versions.view(-1, group_size).amax(1).repeat_interleave(group_size)
    older = scores.scored & (versions != newest)
    if not older.any():
        return scores
    failure = f"the reward model's version changed more than {ROUNDS} times while the rows of a group were scored"
    return _masked(dataclasses.replace(scores, failures=sorted({*scores.failures, failure})), scores.scored & ~older)


def _masked(scores: Scores, scored: Tensor) -> Scores:
    return dataclasses.replace(scores, scored=scored, rewards=torch.where(scored, scores.rewards, 0.0))
