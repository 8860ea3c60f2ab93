"""Reference log-probs from tritonserver, in place of the actor's own copy of the frozen policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_triton.actor.data.rollout_rows import RolloutRow
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.scoring.reply_shapes import check_shape
from rlhf_triton.checkpoints.inspection import fingerprint_model
from rlhf_triton.checkpoints.tokenization import fingerprint
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import (
    BANNED_TOKEN_IDS,
    CHECKPOINT_FINGERPRINT,
    LOGPROBS,
    REFERENCE,
    TEMPERATURE,
)
from rlhf_triton.wire.texts import printable


@dataclass(frozen=True)
class ServedReference:
    """The `reference` model in tritonserver, which receives each row as soon as it ends."""

    client: TritonClient
    policy: Policy
    checkpoint: Path
    """The reference's folder, which this machine need not be able to access."""

    async def compare(self) -> None:
        """Check that the served reference computes the same log-probs as the initial policy.

        The weights are compared only if this machine can access `reference.model`.

        Raises:
            RlhfError: the reference is not served, or differs in vocabulary, dtype, temperature, banned tokens or
                weights.
            RequestFailed: the server cannot be reached.
        """
        try:
            declared = await self.client.describe(REFERENCE)
        except RequestFailed as error:
            if error.code != UNKNOWN_MODEL:
                raise
            raise RlhfError(
                f"the server has no model {REFERENCE} ({error}); start it with this configuration, or set "
                "actor.kl.reference to actor"
            ) from error
        served = declared.parameters
        policy, precision = self.policy, self.policy.settings.precision
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
        expected = {TEMPERATURE: repr(policy.temperature), BANNED_TOKEN_IDS: json.dumps(policy.banned_ids)}
        for name, value in expected.items():
            if served.get(name) != value:
                theirs, ours = (printable(str(each), limit=200) for each in (served.get(name), value))
                raise RlhfError(
                    f"the server's {REFERENCE} was rendered with {name} {theirs}, the actor has {ours}: its "
                    "log-probs would belong to a different distribution; start the server with the actor's "
                    "configuration"
                )
        if self.checkpoint.is_dir() and served.get(CHECKPOINT_FINGERPRINT) != fingerprint_model(self.checkpoint):
            raise RlhfError(
                f"the server's {REFERENCE} is {declared.folder}, whose weights, config.json or tokenizer differ from "
                f"reference.model ({self.checkpoint}); start the server with the actor's configuration"
            )

    async def request_logprobs(self, rows: Sequence[RolloutRow]) -> list[np.ndarray | str]:
        """Request the log-probs of rows; return for each row an array float32 `[n]`, or the error message."""
        try:
            answer = await self.client.logprobs([row.tokens for row in rows])
            check_shape(LOGPROBS, answer, len(rows), max(len(row.tokens) for row in rows), is_padded=True)
        except RequestFailed as error:  # counted and masked by the caller
            return [str(error)] * len(rows)
        results: list[np.ndarray | str] = []
        for row, row_logprobs in zip(rows, answer, strict=True):
            logprobs = np.zeros(len(row.tokens), np.float32)
            logprobs[1:] = row_logprobs[: len(logprobs) - 1]
            # A banned token in a prompt has log-prob -inf.
            is_finite = np.isfinite(logprobs[row.sampled]).all()
            failure = f"{REFERENCE} returned log-probs that are not finite for a response"
            results.append(logprobs if is_finite else failure)
        return results
