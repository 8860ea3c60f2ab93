"""Scoring a rollout: its rows go out unpadded and at once; failed rows are marked, never scored 0.
Given: a `Rollout` and the client. Returns: `Scores`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch

from actor.client import RequestFailed, TritonClient
from actor.rollout import Rollout, Scores
from python_backend.contract import CRITIC, REWARD_MODEL, REWARDS, VALUES, WEIGHTS_VERSION
from python_backend.tokenization import fingerprint


class TokenizerMismatch(RuntimeError):
    """The served critic counts tokens in another vocabulary than the policy."""


class Scorer:
    """Asks one server for rewards and values of rollouts."""

    def __init__(self, client: TritonClient, tokenizer: Any, *, rows_per_request: int) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._rows_per_request = rows_per_request
        self.sends_sentences = False

    async def compare_tokenizers(self) -> None:
        """Find out whether reward and critic read the policy's token ids.

        A reward model with another vocabulary is sent sentences instead.

        Raises:
            TokenizerMismatch: the critic has another vocabulary, or a model's configuration names none.
            RequestFailed: the server cannot be asked.
        """
        ours = fingerprint(self._tokenizer)
        theirs, folders = {}, {}
        for model in (REWARD_MODEL, CRITIC):
            parameters = await self._client.model_parameters(model)
            theirs[model], folders[model] = parameters.get("tokenizer_fingerprint"), parameters.get("checkpoint")
            if not theirs[model]:
                raise TokenizerMismatch(
                    f"{model} was rendered without its checkpoint's tokenizer, so it cannot be compared with the "
                    "policy's; put the tokenizer into the checkpoint folder and render the configs again"
                )
        if theirs[CRITIC] != ours:
            raise TokenizerMismatch(
                f"the critic's tokenizer differs from the policy's ({folders[CRITIC]} and "
                f"{self._tokenizer.name_or_path}): values belong to the policy's tokens, so the critic must start "
                "from a checkpoint with the same vocabulary"
            )
        self.sends_sentences = theirs[REWARD_MODEL] != ours

    async def score(self, rollout: Rollout) -> Scores:
        """Rewards, values and the version they are of, for every row."""
        rows, step = rollout.rows(), self._rows_per_request
        chunks = [slice(i, min(i + step, len(rows))) for i in range(0, len(rows), step)]
        answers = await asyncio.gather(*(self._score_chunk(rollout, rows, chunk) for chunk in chunks))
        return _assemble(rollout, chunks, answers)

    async def values(self, rollout: Rollout) -> Scores:
        """Values alone (the reward model does not run); rewards are 0."""
        return _assemble(
            rollout,
            [slice(i, i + 1) for i in range(len(rollout.prompts))],
            await asyncio.gather(*(self._values_of(row) for row in rollout.rows())),
        )

    async def _values_of(self, row: np.ndarray) -> dict[str, np.ndarray] | str:
        try:
            return await self._client.score([row], (VALUES, WEIGHTS_VERSION))
        except RequestFailed as error:
            return str(error)

    async def _score_chunk(self, rollout: Rollout, rows: list[np.ndarray], chunk: slice) -> dict[str, np.ndarray] | str:
        try:
            if not self.sends_sentences:
                return await self._client.score(rows[chunk], (REWARDS, VALUES, WEIGHTS_VERSION))
            texts = [self.render(row) for row in rows[chunk]]
            values, rewards = await asyncio.gather(
                self._client.score(rows[chunk], (VALUES, WEIGHTS_VERSION)), self._client.score_sentences(texts)
            )
            return {**values, REWARDS: rewards}
        except RequestFailed as error:  # counted and masked by the caller
            return str(error)

    def render(self, row: np.ndarray) -> str:
        """The text that a reward model with another tokenizer reads."""
        return self._tokenizer.decode(row.tolist(), skip_special_tokens=True)


def _assemble(rollout: Rollout, chunks: list[slice], answers: list[dict[str, np.ndarray] | str]) -> Scores:
    count, width = rollout.tokens.shape
    rewards, values = torch.zeros(count), torch.zeros(count, width)
    versions, scored = torch.full((count,), -1, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    failures = []
    for chunk, answer in zip(chunks, answers, strict=True):
        if isinstance(answer, str):
            failures.append(answer)
            continue
        if REWARDS in answer:
            rewards[chunk] = torch.tensor(answer[REWARDS][:, 0])
        values[chunk, : answer[VALUES].shape[1]] = torch.tensor(answer[VALUES])
        versions[chunk] = torch.tensor(answer[WEIGHTS_VERSION][:, 0])
        scored[chunk] = True
    finite = torch.isfinite(rewards) & torch.isfinite(values).all(-1)
    if not finite.all():
        failures.append(f"{int((~finite).sum())} rows were scored with values that are not finite")
    rewards, values = torch.where(finite, rewards, 0.0), torch.where(finite[:, None], values, 0.0)
    return Scores(rewards, values, versions, scored & finite, sorted(set(failures)))


def join_scores(parts: list[Scores], width: int) -> Scores:
    """Scores of several rollouts as one, values padded to `width`."""
    values = [torch.nn.functional.pad(part.values, (0, width - part.values.shape[1])) for part in parts]
    return Scores(
        torch.cat([part.rewards for part in parts]),
        torch.cat(values),
        torch.cat([part.versions for part in parts]),
        torch.cat([part.scored for part in parts]),
        sorted({failure for part in parts for failure in part.failures}),
    )
