"""Scores conversations: sends their rows to the servers concurrently, and adds each answer to its rows."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_triton.actor.data.compute import map_concurrently
from rlhf_triton.actor.data.rollout_rows import Conversation, RolloutRow, Score, fit_float32
from rlhf_triton.actor.scoring.environment import add_environment_rewards
from rlhf_triton.actor.scoring.reply_shapes import check_shape
from rlhf_triton.actor.scoring.row_metadata import row_metadata
from rlhf_triton.actor.scoring.row_texts import read_text, tokens_at
from rlhf_triton.checkpoints.tokenization import fingerprint, rendering_fingerprint
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed
from rlhf_triton.client.served import ServedModel
from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.sample import MESSAGES_KEY
from rlhf_triton.wire.contract import (
    CRITIC,
    MODEL_TERM,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    STEP_ENDS,
    STEP_REWARDS,
    VALUES,
    WEIGHTS_VERSION,
    VersionRange,
    sentence_texts,
)

logger = logging.getLogger(__name__)


class Scorer:
    """Requests rewards and values of rows from the servers."""

    def __init__(
        self,
        client: TritonClient,
        tokenizer: Any,
        *,
        with_critic: bool = True,
        with_rewards: bool = True,
    ) -> None:
        """
        Args:
            with_critic: request values as well.
            with_rewards: request rewards; if False, rewards come only from environments.
        """
        self._client = client
        self.has_critic = with_critic
        self._has_rewards = with_rewards
        self._tokenizer = tokenizer
        self.sends_sentences = False
        self.reward = ServedModel()
        """The server's declaration of the reward, which may be a weighted sum of terms."""

    async def compare_tokenizers(self) -> None:
        """Read which rewards are served, and compare the tokenizers of reward model and critic with the policy's.

        A reward model receives texts and renders them itself, because the policy's tokens rarely equal its own
        rendering, above all at the end of a reply. Reward functions without a model, and rewards per token, receive the
        policy's tokens.

        Raises:
            RlhfError: the critic is not served or has another vocabulary; a model's configuration names no tokenizer;
                or the reward model returns several rewards per row, or rewards per token of another rendering.
            RequestFailed: the server cannot be reached.
        """
        ours = fingerprint(self._tokenizer)
        models = [REWARD_MODEL] * self._has_rewards + [CRITIC] * self.has_critic
        served = {model: await self._describe(model) for model in models}
        self.reward = served.get(REWARD_MODEL, self.reward)
        for model, declared in served.items():
            if declared.num_rewards > 1:
                raise RlhfError(
                    f"{model} returns {declared.num_rewards} rewards per row, but the actor needs one; set "
                    "reward.attribute_weights to one weight per reward"
                )
            if not declared.tokenizer:
                raise RlhfError(
                    f"{model} was rendered without its checkpoint's tokenizer, so it cannot be checked against "
                    "the policy's; put the tokenizer into the checkpoint folder and render the configs again"
                )
        if self.has_critic and served[CRITIC].tokenizer != ours:
            raise RlhfError(
                f"the critic's tokenizer differs from the policy's ({served[CRITIC].folder} and "
                f"{self._tokenizer.name_or_path}): values belong to the policy's tokens, so the critic must start "
                "from a checkpoint with the same vocabulary"
            )
        at_tokens = self.reward.granularity == "token"
        self.sends_sentences = self._has_rewards and self.reward.has_model and not at_tokens
        if at_tokens and (self.reward.texts_only or self.reward.rendering != rendering_fingerprint(self._tokenizer)):
            raise RlhfError(
                f"reward.process.granularity is token, but {self.reward.folder} does not render and tokenise texts as "
                f"the policy does ({self._tokenizer.name_or_path}): use a reward model with the policy's tokenizer and "
                "chat template, or set it to step"
            )
        if self.sends_sentences:
            logger.info(
                "the reward model scores its own rendering of prompts and replies: it receives texts%s",
                ", the critic the policy's tokens" if self.has_critic else "",
            )

    async def _describe(self, model: str) -> ServedModel:
        try:
            return await self._client.describe(model)
        except RequestFailed as error:
            if model != CRITIC or error.code != UNKNOWN_MODEL:
                raise
            raise RlhfError(
                f"the server has no {CRITIC}, which actor.algorithm.name needs ({error}); start it with this "
                "configuration, or choose an algorithm without a critic, such as grpo, rloo or reinforce++"
            ) from error

    async def score(
        self, conversations: Sequence[Conversation], *, versions: VersionRange | None = None
    ) -> list[Conversation]:
        """Return the conversations with rewards in their last rows, and values with the critic's version in all rows.

        Args:
            conversations: a groupwise reward function receives all of them together.
            versions: versions of the critic that may compute the values; None: any.
        """
        ends = [conversation[-1] for conversation in conversations]
        earlier_rows = [row for conversation in conversations for row in conversation[:-1]]
        request = functools.partial(self._request_scores, versions)
        chunks = [ends] if self.reward.groupwise else [[end] for end in ends]
        scored, valued = await asyncio.gather(
            map_concurrently(lambda chunk: self._score_rows(chunk, request), chunks),
            self.add_values(earlier_rows, versions),
        )
        scored_ends = itertools.chain(*scored)
        valued_rows = iter(valued)
        whole = [(*(next(valued_rows) for _ in conversation[:-1]), next(scored_ends)) for conversation in conversations]
        return [add_environment_rewards(conversation) for conversation in whole]

    async def add_values(self, rows: Sequence[RolloutRow], versions: VersionRange | None = None) -> list[RolloutRow]:
        """Return the rows without rewards, and with the critic's values if there is a critic.

        `versions`: versions of the critic that may compute the values; None: any.
        """
        if not self.has_critic:
            return [dataclasses.replace(row, score=Score()) for row in rows]
        request = functools.partial(self._request_values, versions)
        return [*itertools.chain(*await map_concurrently(lambda row: self._score_rows([row], request), rows))]

    async def _score_rows(
        self,
        rows: Sequence[RolloutRow],
        request: Callable[[Sequence[RolloutRow]], Awaitable[dict[str, np.ndarray]]],
    ) -> list[RolloutRow]:
        """Send one request for `rows`; return the rows with its answer, or with its error as their failure."""
        try:
            answer = await request(rows)
            return await asyncio.to_thread(self._apply_answer, rows, answer)
        except RequestFailed as error:
            return [dataclasses.replace(row, score=Score(failure=str(error))) for row in rows]

    async def _request_values(self, versions: VersionRange | None, rows: Sequence[RolloutRow]) -> dict[str, np.ndarray]:
        return await self._client.score([row.tokens for row in rows], (VALUES, WEIGHTS_VERSION), versions=versions)

    async def _request_scores(self, versions: VersionRange | None, rows: Sequence[RolloutRow]) -> dict[str, np.ndarray]:
        if not self._has_rewards:
            return await self._request_values(versions, rows) if self.has_critic else {}
        tokens = [row.tokens for row in rows]
        wanted = self.reward.reward_outputs
        metadata = texts = pairs = None
        if self.reward.components or self.sends_sentences:
            metadata, texts, pairs = await asyncio.to_thread(self.text_inputs, rows)
        options: dict[str, Any] = {}
        if self.reward.granularity is not None:
            wanted = (*wanted, STEP_REWARDS, STEP_ENDS)
            options = {"prompt_lengths": [len(row.prompt.tokens) for row in rows]}
        if texts is None and self.has_critic:
            outputs = (*wanted, VALUES, WEIGHTS_VERSION)
            return await self._client.score(tokens, outputs, metadata, **options, versions=versions)
        if texts is None:
            return await self._client.rewards(tokens, wanted, metadata, **options)
        rewards = self._client.score_sentences(texts, wanted, metadata, pairs=pairs)
        if not self.has_critic:
            return await rewards
        values, answer = await asyncio.gather(self._request_values(versions, rows), rewards)
        return {**values, **answer}

    def text_inputs(
        self, rows: Sequence[RolloutRow]
    ) -> tuple[list[dict[str, Any]], list[str] | None, list[str] | None]:
        """Return (metadata, sentences, second texts of pairs) of rows; None for texts that are not sent.

        For a chat, a sentence is only the response, because the messages are sent as metadata.
        """
        texts = [read_text(row, self._tokenizer) for row in rows]
        metadata = [row_metadata(self.reward, text) for text in texts]
        if not self.sends_sentences:
            return metadata, None, None
        prompts = ["" if MESSAGES_KEY in text.prompt.metadata else text.prompt.text for text in texts]
        responses = [text.response for text in texts]
        if self.reward.takes_pairs:
            return metadata, prompts, responses
        return metadata, [*map(operator.add, prompts, responses)], None

    def _apply_answer(self, rows: Sequence[RolloutRow], answer: dict[str, np.ndarray]) -> list[RolloutRow]:
        """Return the rows with their scores from the server's answer. Raises RequestFailed if it does not fit."""
        size = len(rows)
        self._check_shapes(rows, answer)
        causes = sentence_texts(answer[REWARD_ERRORS]) if REWARD_ERRORS in answer else [""] * size
        version = _single_version(answer, WEIGHTS_VERSION) if VALUES in answer else -1
        reward_version = _single_version(answer, REWARD_VERSION) if REWARD_VERSION in answer else None
        scored_rows = []
        for i, (row, cause) in enumerate(zip(rows, causes, strict=True)):
            total = float(answer[REWARDS][i, 0]) if REWARDS in answer else 0.0
            values = None
            components = dict[str, float]()
            if VALUES in answer:
                values = np.array(answer[VALUES][i, : len(row.tokens)], np.float32)
            if REWARD_COMPONENTS in answer:
                components = dict(zip(self.reward.components, answer[REWARD_COMPONENTS][i].tolist(), strict=True))
            score = Score(
                reward=total,
                outcome=total,
                values=values,
                version=version,
                components=components,
                reward_version=reward_version,
                weights=dict(zip(self.reward.components, self.reward.weights, strict=True)),
            )
            if STEP_REWARDS in answer:
                score = self._with_steps(row, score, answer[STEP_REWARDS][i], answer[STEP_ENDS][i])
            if failure := _failure_of(score):
                score = dataclasses.replace(score, failure=cause or failure)
            scored_rows.append(dataclasses.replace(row, score=score))
        return scored_rows

    def _check_shapes(self, rows: Sequence[RolloutRow], answer: Mapping[str, np.ndarray]) -> None:
        widths = {REWARD_COMPONENTS: len(self.reward.components)}
        if STEP_ENDS in answer:
            widths[STEP_ENDS] = widths[STEP_REWARDS] = max(answer[STEP_ENDS].shape[1:], default=0)
        for name, output in answer.items():
            if name == VALUES:
                check_shape(name, output, len(rows), max(len(row.tokens) for row in rows), is_padded=True)
            else:
                check_shape(name, output, len(rows), widths.get(name, 1))

    def _with_steps(self, row: RolloutRow, score: Score, rewards: np.ndarray, ends: np.ndarray) -> Score:
        """Return the score with the row's process rewards, each at the last sampled token of its step.

        Args:
            rewards: float32 `[steps]`.
            ends: int32 `[steps]`, index of each step's last token, or last character if texts were sent; below 0 for
                padding.
        """
        rewards = rewards[ends >= 0]
        ends = ends[ends >= 0]
        if self.sends_sentences:
            ends = tokens_at(row, ends, self._tokenizer)
        if (ends >= len(row.tokens)).any():
            raise RequestFailed(f"the server returned {STEP_ENDS} {ends.max()} for a row of {len(row.tokens)} tokens")
        # A step may contain or be text of an environment, whose tokens the policy did not sample.
        last_sampled = np.maximum.accumulate(np.where(row.sampled, np.arange(len(row.tokens)), -1))
        places = np.where(last_sampled[ends] < 0, row.sampled.argmax(), last_sampled[ends])
        steps = np.zeros(len(row.tokens), np.float32)
        has_reward = np.zeros(len(row.tokens), np.bool_)
        if self.reward.model_weight:  # with weight 0 the rewards are only charted, and may be anything
            np.add.at(steps, places, np.float32(self.reward.model_weight) * rewards)  # a token may end two steps
        has_reward[places] = True
        outcome = sum(
            weight * value
            for weight, (name, value) in zip(self.reward.weights, score.components.items(), strict=True)
            if name != MODEL_TERM and np.isfinite(value)
        )
        return dataclasses.replace(score, steps=steps, ends=has_reward, outcome=outcome)


def _failure_of(score: Score) -> str:
    """Return why a score from a server cannot be trained on; "" if it can."""
    if score.values is not None and not np.isfinite(score.values).all():
        return "the critic's values are not finite"
    if not np.isfinite(score.reward):
        has_no_steps = score.ends is not None and not score.ends.any()
        return "the response has no steps to reward" if has_no_steps else f"the reward is {score.reward}"
    if score.steps is not None and not np.isfinite(score.steps).all():
        return "the reward of a step is not finite"
    return "" if fit_float32([score]) else "the rewards are too large for float32"


def _single_version(answer: Mapping[str, np.ndarray], name: str) -> int:
    """Return the version that scored all rows of a request. Raises RequestFailed if there are several."""
    versions = np.unique(answer[name]).tolist()
    if len(versions) > 1:
        raise RequestFailed(f"the server returned {name} {versions} for one request, but one version is expected")
    return int(versions[0])
