"""Log-probs of rollouts under the policy as it was before training: from the actor's own copy, or from tritonserver.
Given: rollouts, batch by batch, and all of them as one. Returns: `ReferenceLogprobs`.
Both kinds have the same three methods, so the loop reads the same for both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from actor.client import RequestFailed, TritonClient
from actor.policy import Policy
from actor.rollout import ReferenceLogprobs, Rollout, Scores
from actor.scoring import ModelMismatch
from python_backend.checkpoints import fingerprint_weights
from python_backend.config import RunConfig
from python_backend.contract import BANNED_TOKEN_IDS, CHECKPOINT_FINGERPRINT, REFERENCE, TEMPERATURE
from python_backend.tokenization import fingerprint

Answer: TypeAlias = "np.ndarray | str"  # of one row: log-probs [length - 1], or why there are none
Asked: TypeAlias = "asyncio.Task[list[Answer]] | None"


class OwnReference:
    """The actor's copy, or under LoRA the policy without its adapters."""

    def __init__(self, policy: Policy, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._policy = policy
        self._in_thread = in_thread

    async def compare(self) -> None:
        """Nothing to compare."""

    def ask(self, rollout: Rollout) -> Asked:
        """Nothing to ask anybody for: `logprobs` has it all computed at once, when generation is over."""

    async def logprobs(self, whole: Rollout, asked: Sequence[Asked]) -> ReferenceLogprobs:
        """Of every row."""
        logprobs = await self._in_thread(self._policy.logprobs, whole, reference=True)
        return ReferenceLogprobs(logprobs, torch.ones(len(whole.prompts), dtype=torch.bool), [])


class ServedReference:
    """The `reference` model in tritonserver, asked for each batch as soon as that is generated."""

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

    def ask(self, rollout: Rollout) -> Asked:
        """Send the rows of one batch; the answers are under way."""
        return asyncio.create_task(self._ask(rollout.rows()))

    async def logprobs(self, whole: Rollout, asked: Sequence[Asked]) -> ReferenceLogprobs:
        """Of the rows of `whole`, which are those of `asked` in this order."""
        answers = [answer for part in asked if part is not None for answer in await part]
        found = torch.zeros(len(answers), whole.tokens.shape[1] - 1)
        known = torch.zeros(len(answers), dtype=torch.bool)
        failures = set()
        for i, (answer, prompt_length) in enumerate(zip(answers, whole.prompt_lengths.tolist(), strict=True)):
            if isinstance(answer, str):
                failures.add(answer)
            elif not np.isfinite(answer[prompt_length - 1 :]).all():
                failures.add(f"{REFERENCE} gave a response log-probs that are not finite")
            else:
                found[i, : answer.size] = torch.tensor(answer)
                known[i] = True
        return ReferenceLogprobs(found, known, sorted(failures))

    async def _ask(self, rows: list[np.ndarray]) -> list[Answer]:
        step = self._settings.client.rows_per_request
        chunks = [rows[i : i + step] for i in range(0, len(rows), step)]
        return [answer for part in await asyncio.gather(*map(self._ask_chunk, chunks)) for answer in part]

    async def _ask_chunk(self, rows: list[np.ndarray]) -> list[Answer]:
        try:
            logprobs = await self._client.logprobs(rows)
        except RequestFailed as error:  # counted and masked by the caller
            return [str(error)] * len(rows)
        return [logprobs[i, : row.size - 1] for i, row in enumerate(rows)]


def make_reference(
    config: RunConfig, client: TritonClient, policy: Policy, in_thread: Callable[..., Awaitable[Any]]
) -> OwnReference | ServedReference:
    """The one that `actor.reference` names; `in_thread` runs torch work off the event loop."""
    if config.actor.reference == "triton":
        return ServedReference(client, policy, config)
    return OwnReference(policy, in_thread)


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
