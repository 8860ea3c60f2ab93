"""Scores rollouts: sends rows concurrently, without the rollout's padding, and marks failed rows as not scored."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

import numpy as np
import torch

from actor.data.compute import each
from actor.data.rollout import Rollout, Scores, joined
from actor.scoring import process
from actor.scoring.mixture import RewardMixture
from python_backend.checkpoints.tokenization import fingerprint
from python_backend.client.client import RequestFailed, TritonClient
from python_backend.client.retry import RequestRefused
from python_backend.errors import RlhfError
from python_backend.rewards.function import MESSAGES_KEY
from python_backend.wire.contract import (
    CRITIC,
    REWARD_COMPONENTS,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    STORE,
    VALUES,
    WEIGHTS_VERSION,
)

Answer = dict[str, np.ndarray] | str  # outputs, or the error message


class ModelMismatch(RlhfError):
    """The served models do not fit the policy: they have e.g. another vocabulary, or several rewards per row."""


class Scorer:
    """Requests rewards and values of rollouts from the servers."""

    def __init__(
        self, client: TritonClient, tokenizer: Any, *, rows_per_request: int, with_critic: bool = True
    ) -> None:
        """`with_critic`: request values as well; if False, values are 0 and their version is -1."""
        self._client = client
        self.has_critic = with_critic
        self._tokenizer = tokenizer
        self.rows_per_request = rows_per_request
        self.sends_sentences = self.sends_pairs = False
        self.mixture = RewardMixture()
        self._is_live = False  # whether the server names the version of its reward model

    async def compare_tokenizers(self) -> None:
        """Read which rewards are served, and compare the tokenizers of reward model and critic with the policy's.

        A reward model with another vocabulary, with a template, or of text pairs, receives sentences instead of token
        ids.

        Raises:
            ModelMismatch: the critic is not served or has another vocabulary, a model's configuration names no
                tokenizer, or the reward model returns several rewards per row, or rewards per token of another
                vocabulary.
            RequestFailed: the server cannot be reached.
        """
        ours = fingerprint(self._tokenizer)
        theirs, folders = {}, {}
        for model in (REWARD_MODEL, CRITIC) if self.has_critic else (REWARD_MODEL,):
            parameters = await self._parameters_of(model)
            theirs[model], folders[model] = parameters.get("tokenizer_fingerprint"), parameters.get("checkpoint")
            if int(parameters.get("num_rewards") or 1) > 1:
                raise ModelMismatch(
                    f"{model} returns {parameters['num_rewards']} rewards per row, but the actor needs one; set "
                    "reward.merge_attributes to true, and reward.attribute_weights to one weight per reward"
                )
            if model == REWARD_MODEL:
                self.mixture = RewardMixture.of(parameters)
                self._is_live = bool(parameters.get(STORE))
                self.sends_pairs = parameters.get("text") == "pair"
            if not theirs[model]:
                raise ModelMismatch(
                    f"{model} was rendered without its checkpoint's tokenizer, so it cannot be checked against "
                    "the policy's; put the tokenizer into the checkpoint folder and render the configs again"
                )
        if theirs.get(CRITIC, ours) != ours:
            raise ModelMismatch(
                f"the critic's tokenizer differs from the policy's ({folders[CRITIC]} and "
                f"{self._tokenizer.name_or_path}): values belong to the policy's tokens, so the critic must start "
                "from a checkpoint with the same vocabulary"
            )
        self.sends_sentences = self.sends_pairs or theirs[REWARD_MODEL] != ours or self.mixture.texts_only
        if self.sends_sentences and self.mixture.granularity == "token":
            raise ModelMismatch(
                f"reward.process.granularity is token, but the tokens of {folders[REWARD_MODEL]} are not the policy's "
                f"({self._tokenizer.name_or_path}); use a reward model with the policy's tokenizer, or set it to step"
            )

    async def _parameters_of(self, model: str) -> dict[str, str]:
        try:
            return await self._client.model_parameters(model)
        except RequestFailed as error:
            if model != CRITIC or "unknown model" not in str(error):
                raise
            raise ModelMismatch(
                f"the server has no {CRITIC}, which actor.algorithm.name: ppo needs ({error}); start it with this "
                "configuration, or choose grpo, rloo or reinforce++"
            ) from error

    async def score(self, rollout: Rollout, group_size: int = 1) -> Scores:
        """Return rewards, values and the weights version of the values for every row.

        `group_size`: number of consecutive rows that a groupwise reward function receives together.
        """
        count, unit = len(rollout.prompts), group_size if self.mixture.groupwise else 1
        step = max(1, self.rows_per_request // unit) * unit
        chunks = [slice(i, min(i + step, count)) for i in range(0, count, step)]
        parts = await each(lambda chunk: self._score_part(rollout, chunk, group_size, unit), chunks)
        return await asyncio.to_thread(self._assembled, rollout, [*itertools.chain(*parts)])

    async def values(self, rollout: Rollout) -> Scores:
        """Return values without running the reward model; all rewards are 0."""
        parts = await each(lambda i: self._values_of(rollout, slice(i, i + 1)), range(len(rollout.prompts)))
        return await asyncio.to_thread(_assemble, rollout, parts, RewardMixture())

    async def _values_of(self, rollout: Rollout, chunk: slice) -> tuple[slice, Answer]:
        try:
            return chunk, await self._client.score(rollout.rows(chunk), (VALUES, WEIGHTS_VERSION))
        except RequestFailed as error:
            return chunk, str(error)

    async def _score_part(
        self, rollout: Rollout, chunk: slice, group_size: int, unit: int
    ) -> list[tuple[slice, Answer]]:
        """Score rows; if the server refuses a request of several `unit` rows, its halves are sent.

        So one row that it refuses, such as a text that is too long for its template, does not cost the others.
        """
        try:
            return [(chunk, await self._score_chunk(rollout, chunk, group_size))]
        except RequestFailed as error:  # counted and masked by the caller
            num_units = (chunk.stop - chunk.start) // unit
            if num_units < 2 or not isinstance(error, RequestRefused):
                return [(chunk, str(error))]
        middle = chunk.start + num_units // 2 * unit
        halves = (slice(chunk.start, middle), slice(middle, chunk.stop))
        parts = await asyncio.gather(*(self._score_part(rollout, half, group_size, unit) for half in halves))
        return [*parts[0], *parts[1]]

    async def _score_chunk(self, rollout: Rollout, chunk: slice, group_size: int) -> dict[str, np.ndarray]:
        rows, wanted = rollout.rows(chunk), self.mixture.outputs + (REWARD_VERSION,) * self._is_live
        metadata = texts = pairs = None
        if self.mixture.names or self.sends_sentences:
            metadata, texts, pairs = await asyncio.to_thread(self._texts, rollout, chunk, group_size)
        is_process = self.mixture.granularity is not None
        more: dict[str, Any] = {"prompt_lengths": rollout.prompt_lengths[chunk].tolist()} if is_process else {}
        if texts is None and self.has_critic:
            return await self._client.score(rows, (*wanted, VALUES, WEIGHTS_VERSION), metadata, **more)
        if texts is None:
            return await self._client.rewards(rows, wanted, metadata, **more)
        rewards = self._client.score_sentences(texts, wanted, metadata, pairs=pairs)
        if not self.has_critic:
            return await rewards
        values, answer = await asyncio.gather(self._client.score(rows, (VALUES, WEIGHTS_VERSION)), rewards)
        return {**values, **answer}

    def _texts(
        self, rollout: Rollout, chunk: slice, group_size: int
    ) -> tuple[list[dict[str, Any]], list[str] | None, list[str] | None]:
        """Return the metadata of rows and, if they are sent as texts, their sentences, or both texts of each pair."""
        indices, metadata = range(len(rollout.prompts))[chunk], self._metadata(rollout, chunk, group_size)
        if self.sends_pairs:
            return metadata, [self._prompt(rollout, i) for i in indices], [self._response(rollout, i) for i in indices]
        return metadata, [self.render(rollout, i) for i in indices] if self.sends_sentences else None, None

    def _assembled(self, rollout: Rollout, parts: list[tuple[slice, Answer]]) -> Scores:
        if self.sends_sentences and self.mixture.granularity is not None:
            parts = [(chunk, self._on_tokens(rollout, chunk, answer)) for chunk, answer in parts]
        return _assemble(rollout, parts, self.mixture, is_live=self._is_live)

    def _on_tokens(self, rollout: Rollout, chunk: slice, answer: Answer) -> Answer:
        if isinstance(answer, str):
            return answer
        rows, firsts = rollout.rows(chunk), rollout.prompt_lengths[chunk].tolist()
        starts = [first if self._is_chat(rollout, i) else 0 for i, first in enumerate(firsts, start=chunk.start)]
        return process.ends_on_tokens(answer, self._tokenizer, rows, starts, firsts)

    @staticmethod
    def _is_chat(rollout: Rollout, index: int) -> bool:
        return MESSAGES_KEY in rollout.prompts[index].metadata

    def render(self, rollout: Rollout, index: int) -> str:
        """Return the text for a reward model with another tokenizer.

        For a chat prompt, it is the text of the reply only, because the messages are sent as metadata.
        """
        if self._is_chat(rollout, index):
            return self._response(rollout, index)
        return self._text(rollout, index)

    def _prompt(self, rollout: Rollout, index: int) -> str:
        """Return the text of a prompt; of a chat, nothing, because the messages are sent as metadata."""
        return (
            "" if self._is_chat(rollout, index) else self._text(rollout, index, end=int(rollout.prompt_lengths[index]))
        )

    def _response(self, rollout: Rollout, index: int) -> str:
        return self._text(rollout, index, start=int(rollout.prompt_lengths[index]))

    def _text(self, rollout: Rollout, index: int, *, start: int = 0, end: int | None = None) -> str:
        row = rollout.tokens[index, start : int(rollout.lengths[index]) if end is None else end]
        return self._tokenizer.decode(row.tolist(), skip_special_tokens=True)

    def _metadata(self, rollout: Rollout, chunk: slice, group_size: int) -> list[dict[str, Any]]:
        return [
            self.mixture.metadata(rollout.prompts[i], self._response(rollout, i), i // group_size)
            for i in range(len(rollout.prompts))[chunk]
        ]


def _assemble(
    rollout: Rollout, parts: list[tuple[slice, Answer]], mixture: RewardMixture, *, is_live: bool = False
) -> Scores:
    count, width = rollout.tokens.shape
    rewards, values = torch.zeros(count), torch.zeros(count, width)
    versions, scored = torch.full((count,), -1, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    components = torch.full((count, len(mixture.names)), torch.nan)
    reward_versions = torch.full((count,), -1, dtype=torch.int64) if is_live else None
    steps = None if mixture.granularity is None else process.empty(count, width)
    failures, num_explained = [], 0
    for chunk, answer in parts:
        if isinstance(answer, str):
            failures.append(answer)
            continue
        if REWARDS in answer:
            rewards[chunk] = torch.tensor(answer[REWARDS][:, 0])
        if steps is not None and REWARDS in answer:
            process.place(steps, chunk, answer, mixture.model_weight)
        if mixture.names:
            components[chunk] = torch.tensor(answer[REWARD_COMPONENTS])
            failures += mixture.causes(answer)
            num_explained += len(mixture.causes(answer))
        if VALUES in answer:
            values[chunk, : answer[VALUES].shape[1]] = torch.tensor(answer[VALUES])
            versions[chunk] = _one_version(answer[WEIGHTS_VERSION], chunk.stop - chunk.start)
        if reward_versions is not None:
            reward_versions[chunk] = _one_version(answer[REWARD_VERSION], chunk.stop - chunk.start)
        scored[chunk] = True
    # Rows whose reward failed are not finite either, but `reward_errors` has explained them already.
    finite = torch.isfinite(rewards) & torch.isfinite(values).all(-1)
    if steps is not None:
        steps = dataclasses.replace(steps, outcome=mixture.beyond_the_model(components))
        finite &= torch.isfinite(steps.rewards).all(-1)
    if int((~finite).sum()) > num_explained:
        what = "rewards or values that are not finite" + (", or no steps" if steps is not None else "")
        failures.append(f"{int((~finite).sum()) - num_explained} rows have {what}")
    rewards, values = torch.where(finite, rewards, 0.0), torch.where(finite[:, None], values, 0.0)
    by_name = dict(zip(mixture.names, components.unbind(-1), strict=True))
    return Scores(rewards, values, versions, scored & finite, sorted(set(failures)), by_name, reward_versions, steps)


def _one_version(versions: np.ndarray, rows: int) -> int:
    """Return the one version that scored a request; a row must never mix versions of a model."""
    assert versions.shape == (rows, 1), f"the versions of {rows} rows have the shape {versions.shape}"
    assert (versions == versions[0]).all(), f"one request was scored by the versions {sorted(set(versions.flat))}"
    return int(versions[0, 0])


def join_scores(parts: list[Scores], width: int) -> Scores:
    """Concatenate scores of several rollouts, with values padded to `width` tokens."""
    reward_versions = [part.reward_versions for part in parts if part.reward_versions is not None]
    return Scores(
        torch.cat([part.rewards for part in parts]),
        joined([part.values for part in parts], width),
        torch.cat([part.versions for part in parts]),
        torch.cat([part.scored for part in parts]),
        sorted({failure for part in parts for failure in part.failures}),
        {name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components},
        torch.cat(reward_versions) if reward_versions else None,
        process.join(steps, width) if (steps := [part.process for part in parts if part.process is not None]) else None,
    )
