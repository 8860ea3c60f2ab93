"""Log-probs under the frozen policy, from the actor's own copy or from tritonserver, behind one interface."""

from __future__ import annotations

import dataclasses
import json
from typing import TypeAlias

import torch

from actor.algorithms.advantages import response_mask
from actor.data.compute import InThread
from actor.data.rollout import ReferenceLogprobs, Rollout, Scores
from actor.policy.policy import Policy
from actor.scoring.client import RequestFailed, TritonClient
from actor.scoring.scorer import ModelMismatch
from actor.scoring.stream import RowStream
from python_backend.checkpoints.inspection import fingerprint_weights
from python_backend.checkpoints.tokenization import fingerprint
from python_backend.config import RunConfig
from python_backend.wire.contract import BANNED_TOKEN_IDS, CHECKPOINT_FINGERPRINT, REFERENCE, TEMPERATURE


class OwnReference:
    """The actor's copy, or under LoRA the policy without its adapters."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def compare(self) -> None:
        """Nothing to compare."""

    def stream(self, in_thread: InThread) -> OwnStream:
        """For one rollout; `in_thread` runs torch work off the event loop."""
        return OwnStream(self._policy, in_thread)


class OwnStream:
    """Computes all rows at once when generation is over."""

    def __init__(self, policy: Policy, in_thread: InThread) -> None:
        self._policy, self._in_thread = policy, in_thread

    def take(self, index: int, row: Rollout) -> None:
        """Nobody needs to be asked."""

    async def logprobs(self, whole: Rollout) -> ReferenceLogprobs:
        """Of every row."""
        logprobs = await self._in_thread(self._policy.logprobs, whole, reference=True)
        return ReferenceLogprobs(logprobs, torch.ones(len(whole.prompts), dtype=torch.bool), [])

    async def close(self) -> None:
        """Nothing is under way."""


class ServedReference:
    """The `reference` model in tritonserver, asked for each row as soon as that has ended."""

    def __init__(self, client: TritonClient, policy: Policy, config: RunConfig) -> None:
        self._client = client
        self._policy = policy
        self._settings = config.actor
        self._checkpoint = config.reference.checkpoint

    async def compare(self) -> None:
        """Find out whether the server's log-probs are those that the policy would give of its frozen start.

        The weights are compared where `reference.checkpoint` can be seen from here.

        Raises:
            ModelMismatch: it has another vocabulary, temperature, set of banned tokens or checkpoint, or is not there.
            RequestFailed: the server cannot be asked.
        """
        try:
            served = await self._client.model_parameters(REFERENCE)
        except RequestFailed as error:
            if "unknown model" not in str(error):
                raise
            raise ModelMismatch(
                f"the server has no model {REFERENCE} ({error}); start it with this configuration, or set "
                "actor.reference to actor"
            ) from error
        settings, policy = self._settings, self._policy
        if served.get("tokenizer_fingerprint") != fingerprint(policy.tokenizer):
            raise ModelMismatch(
                f"the reference's tokenizer differs from the policy's ({served.get('checkpoint')} and "
                f"{policy.tokenizer.name_or_path}): log-probs belong to the policy's tokens, so the reference must be "
                "a checkpoint with the same vocabulary"
            )
        if served.get("dtype") != settings.precision:
            raise ModelMismatch(
                f"the server's {REFERENCE} computes in {served.get('dtype')}, the actor in {settings.precision}: the "
                "KL would not begin at 0; set reference.dtype and actor.precision alike"
            )
        expected = {TEMPERATURE: repr(settings.temperature), BANNED_TOKEN_IDS: json.dumps(policy.banned_ids)}
        for name, ours in expected.items():
            if served.get(name) != ours:
                raise ModelMismatch(
                    f"the server's {REFERENCE} was rendered with {name} {served.get(name)}, the actor has {ours}: its "
                    "log-probs would be those of another distribution; start the server with the actor's configuration"
                )
        if self._checkpoint.is_dir() and served.get(CHECKPOINT_FINGERPRINT) != fingerprint_weights(self._checkpoint):
            raise ModelMismatch(
                f"the server's {REFERENCE} is {served.get('checkpoint')}, whose weights are not those of "
                f"reference.checkpoint ({self._checkpoint}); start the server with the actor's configuration"
            )

    def stream(self, in_thread: InThread) -> ServedStream:
        """For one rollout; nothing is computed here."""
        return ServedStream(self.ask, rows_per_request=self._settings.client.rows_per_request)

    async def ask(self, rollout: Rollout) -> ReferenceLogprobs:
        """Of the rows of `rollout`, by one request; rows are not known where it fails."""
        count, width = rollout.tokens.shape
        try:
            logprobs = torch.tensor(await self._client.logprobs(rollout.rows()))[:, :-1]
        except RequestFailed as error:  # counted and masked by the caller
            return ReferenceLogprobs(torch.zeros(count, width - 1), torch.zeros(count, dtype=torch.bool), [str(error)])
        mask = response_mask(rollout.prompt_lengths, rollout.lengths, width)
        known = torch.where(mask > 0, logprobs, 0.0).isfinite().all(-1)  # in a prompt -inf is a banned token
        failures = [] if known.all() else [f"{REFERENCE} gave a response log-probs that are not finite"]
        return ReferenceLogprobs(torch.where(known[:, None], logprobs, 0.0), known, failures)


class ServedStream(RowStream[ReferenceLogprobs]):
    """Has each row's log-probs under way while others are written on; they do not wait for the critic."""

    async def logprobs(self, whole: Rollout) -> ReferenceLogprobs:
        """Of all rows taken in, which are those of `whole`."""
        parts, order = await self.answers()
        width = whole.tokens.shape[1] - 1
        padded = [torch.nn.functional.pad(part.logprobs, (0, width - part.logprobs.shape[1])) for part in parts]
        return ReferenceLogprobs(
            torch.cat(padded)[order],
            torch.cat([part.known for part in parts])[order],
            sorted({failure for part in parts for failure in part.failures}),
        )


Reference: TypeAlias = OwnReference | ServedReference


def make_reference(config: RunConfig, client: TritonClient, policy: Policy) -> Reference:
    """The one that `actor.reference` names."""
    return ServedReference(client, policy, config) if config.actor.serves_reference else OwnReference(policy)


def only_known(scores: Scores, reference: ReferenceLogprobs) -> Scores:
    """`scores` in which a row without reference log-probs is a row without a score."""
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
