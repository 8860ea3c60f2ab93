"""Scores samples: sends their rows concurrently, and reads each answer into the samples themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import operator
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_triton.actor.data.compute import each
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.sample import Conversation, SampledRow, Score, text_places
from rlhf_triton.actor.scoring.environment import with_environment
from rlhf_triton.checkpoints.tokenization import fingerprint, rendering_fingerprint
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config import RunConfig
from rlhf_triton.config.rewards import MODEL_TERM
from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.function import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY, last_reply
from rlhf_triton.rewards.groups import GROUP_KEY
from rlhf_triton.wire.chats import TEMPLATE_COLUMNS
from rlhf_triton.wire.contract import (
    CRITIC,
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

# What the server receives beside a row: the prompt's other columns and, where they are needed, its texts and group.


def row_metadata(
    reward: ServedModel, prompt: Prompt, response: str, group: int, reply: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return a row's metadata: all that functions read, or the messages that the reward model renders, or the response.

    A reward model refuses a row with a reply that is too long for it, where it would truncate a text.

    Args:
        group: the row's group within the request, sent if a function is groupwise.
        reply: messages of a conversation with an environment, from the policy's first one on.
    """
    if not reward.reads_texts:
        if MESSAGES_KEY not in prompt.metadata:
            return {RESPONSE_KEY: response}
        empty = {} if response else {RESPONSE_KEY: ""}  # a reply, while an empty sentence alone is none
        said = {REPLY_KEY: [reply[last_reply(reply)]]} if reply else {}  # it may have tool calls
        options = {name: prompt.metadata[name] for name in TEMPLATE_COLUMNS if prompt.metadata.get(name)}
        return {MESSAGES_KEY: prompt.metadata[MESSAGES_KEY], **options, **empty, **said}
    asked = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
    texts = {**asked, RESPONSE_KEY: response, **({REPLY_KEY: [*reply]} if reply else {})}
    return {**prompt.metadata, **texts, **({GROUP_KEY: group} if reward.groupwise else {})}


# Process rewards as the server replies with them, placed on the policy's tokens.


BLOCK = 32  # tokens decoded at once


def tokens_with(ends: Sequence[int], tokenizer: Any, ids: Sequence[int]) -> list[int | None]:
    """Return for each number of characters the smallest number of tokens with at least as many; None if it takes all.

    Decodes each block of tokens after the block before it, as the text of a token depends on those beside it.
    """

    def characters(block: int, last: int) -> int:
        return len(tokenizer.decode(ids[max(0, block - 1) * BLOCK : last], skip_special_tokens=False))

    def least(end: int) -> int:
        block = max(0, bisect_left(reached, end) - 1)
        span = range(min((block + 1) * BLOCK, len(ids)))
        return bisect_left(span, end, lo=block * BLOCK, key=lambda n: before[block] + characters(block, n))

    before, reached = [0], [0]  # characters before each block's context, and before each block
    for block in range(-(-len(ids) // BLOCK)):
        stop = min((block + 1) * BLOCK, len(ids))
        reached.append(before[block] + characters(block, stop))
        before.append(reached[-1] - characters(block + 1, stop))
    return [None if end >= reached[-1] else least(end) for end in ends]


Answer = dict[str, np.ndarray] | str  # outputs, or the error message


class Scorer:
    """Requests rewards and values of samples from the servers."""

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
            with_rewards: request rewards; if False, only environments give any.
        """
        self._client = client
        self.has_critic = with_critic
        self._has_rewards = with_rewards
        self._tokenizer = tokenizer
        self.sends_sentences = False
        self.reward = ServedModel()
        """The reward's declaration by the server; often a weighted sum of terms."""

    @classmethod
    def of(cls, config: RunConfig, client: TritonClient, tokenizer: Any) -> Scorer:
        """Return the scorer of a run."""
        return cls(
            client,
            tokenizer,
            with_critic=config.actor.algorithm.uses_critic,
            with_rewards=config.serves_rewards,
        )

    async def compare_tokenizers(self) -> None:
        """Read which rewards are served, and compare the tokenizers of reward model and critic with the policy's.

        A reward model receives texts, of which it makes its own rendering: the policy's tokens are rarely the same,
        with the end of a reply least of all. Functions alone, and rewards at tokens, receive the policy's tokens.

        Raises:
            RlhfError: the critic is not served or has another vocabulary, a model's configuration names no
                tokenizer, or the reward model returns several rewards per row, or rewards per token of another
                rendering.
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
                f"the server has no {CRITIC}, which actor.algorithm.name: ppo needs ({error}); start it with this "
                "configuration, or choose grpo, rloo or reinforce++"
            ) from error

    async def score(
        self, conversations: Sequence[Conversation], group_size: int = 1, *, versions: VersionRange | None = None
    ) -> list[Conversation]:
        """Return the conversations with rewards at their ends, and values with their version in all rows.

        Args:
            group_size: number of consecutive conversations that a groupwise reward function receives together.
            versions: versions of the critic that may compute the values; None: any.
        """
        ends = [conversation[-1] for conversation in conversations]
        others = [row for conversation in conversations for row in conversation[:-1]]
        unit = group_size if self.reward.groupwise else 1
        ask = functools.partial(self._ask, group_size, versions)
        chunks = [ends[i : i + unit] for i in range(0, len(ends), unit)]
        scored, valued = await asyncio.gather(
            each(lambda chunk: self._scored(chunk, ask), chunks), self.valued(others, versions)
        )
        found, more = itertools.chain(*scored), iter(valued)
        whole = [(*(next(more) for _ in conversation[:-1]), next(found)) for conversation in conversations]
        return [with_environment(conversation) for conversation in whole]

    async def valued(self, rows: Sequence[SampledRow], versions: VersionRange | None = None) -> list[SampledRow]:
        """Return the samples with the critic's values, of these versions, if there is one, and without rewards."""
        if not self.has_critic:
            return [dataclasses.replace(row, score=Score()) for row in rows]
        ask = functools.partial(self._values, versions)
        return [*itertools.chain(*await each(lambda row: self._scored([row], ask), rows))]

    async def _scored(
        self,
        rows: Sequence[SampledRow],
        ask: Callable[[Sequence[SampledRow]], Awaitable[dict[str, np.ndarray]]],
    ) -> list[SampledRow]:
        """Return the samples of one request with its answer, or with its error as their failure."""
        answer: Answer
        try:
            answer = await ask(rows)
        except RequestFailed as error:
            answer = str(error)
        return [*await asyncio.to_thread(self._read, rows, answer)]

    async def _values(self, versions: VersionRange | None, rows: Sequence[SampledRow]) -> dict[str, np.ndarray]:
        return await self._client.score([row.tokens for row in rows], (VALUES, WEIGHTS_VERSION), versions=versions)

    async def _ask(
        self, group_size: int, versions: VersionRange | None, samples: Sequence[SampledRow]
    ) -> dict[str, np.ndarray]:
        if not self._has_rewards:
            return await self._values(versions, samples) if self.has_critic else {}
        rows, wanted = [sample.tokens for sample in samples], self.reward.reward_outputs
        metadata = texts = pairs = None
        if self.reward.components or self.sends_sentences:
            metadata, texts, pairs = await asyncio.to_thread(self._texts, samples, group_size)
        more: dict[str, Any] = {}
        if self.reward.granularity is not None:
            wanted = (*wanted, STEP_REWARDS, STEP_ENDS)
            more = {"prompt_lengths": [len(sample.prompt.tokens) for sample in samples]}
        if texts is None and self.has_critic:
            outputs = (*wanted, VALUES, WEIGHTS_VERSION)
            return await self._client.score(rows, outputs, metadata, **more, versions=versions)
        if texts is None:
            return await self._client.rewards(rows, wanted, metadata, **more)
        rewards = self._client.score_sentences(texts, wanted, metadata, pairs=pairs)
        if not self.has_critic:
            return await rewards
        values, answer = await asyncio.gather(self._values(versions, samples), rewards)
        return {**values, **answer}

    def _texts(
        self, samples: Sequence[SampledRow], group_size: int
    ) -> tuple[list[dict[str, Any]], list[str] | None, list[str] | None]:
        """Return the metadata of rows and, if they are sent as texts, their sentences, or both texts of each pair.

        Of a chat, a sentence is only the response, because the messages are sent as metadata.
        """
        said = [self._prompt_and_response(sample) for sample in samples]
        metadata = [
            row_metadata(self.reward, prompt, response, i // group_size, reply)
            for i, (prompt, response, reply) in enumerate(said)
        ]
        if not self.sends_sentences:
            return metadata, None, None
        prompts = ["" if MESSAGES_KEY in prompt.metadata else prompt.text for prompt, _, _ in said]
        responses = [response for _, response, _ in said]
        if self.reward.takes_pairs:
            return metadata, prompts, responses
        return metadata, [*map(operator.add, prompts, responses)], None

    def _read(self, rows: Sequence[SampledRow], answer: Answer) -> list[SampledRow]:
        """Return the samples with the server's answer for each, one row of the answer per sample."""
        if isinstance(answer, str):
            return [dataclasses.replace(row, score=Score(failure=answer)) for row in rows]
        size = len(rows)
        causes = sentence_texts(answer[REWARD_ERRORS]) if REWARD_ERRORS in answer else [""] * size
        version = _one_version(answer[WEIGHTS_VERSION], size) if VALUES in answer else -1
        reward_version = _one_version(answer[REWARD_VERSION], size) if REWARD_VERSION in answer else None
        found = []
        for i, (row, cause) in enumerate(zip(rows, causes, strict=True)):
            total = float(answer[REWARDS][i, 0]) if REWARDS in answer else 0.0
            values, components = None, dict[str, float]()
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
            )
            if STEP_REWARDS in answer:
                score = self._with_steps(row, score, answer[STEP_REWARDS][i], answer[STEP_ENDS][i])
            given = [array for array in (np.array(total), values, score.steps) if array is not None]
            if not all(np.isfinite(array).all() for array in given):
                what = ", or there are no steps" if STEP_REWARDS in answer else ""
                score = dataclasses.replace(score, failure=cause or f"the reward or the values are not finite{what}")
            found.append(dataclasses.replace(row, score=score))
        return found

    def _with_steps(self, row: SampledRow, score: Score, rewards: np.ndarray, ends: np.ndarray) -> Score:
        """Return the score with the process rewards of a row, each at the last sampled token of its step.

        Args:
            rewards: float32 `[steps]`; those without an end are padding.
            ends: int32 `[steps]`, the last token of each step, or character if texts were sent; below 0: padding.
        """
        rewards, ends = rewards[ends >= 0], ends[ends >= 0]
        if self.sends_sentences:
            ends = self._ends_on_tokens(row, ends)
        # Text of an environment may be part of a step, or one: the policy did not choose its tokens.
        before = np.maximum.accumulate(np.where(row.sampled, np.arange(len(row.tokens)), -1))
        places = np.where(before[ends] < 0, row.sampled.argmax(), before[ends])
        steps, given = np.zeros(len(row.tokens), np.float32), np.zeros(len(row.tokens), np.bool_)
        if self.reward.model_weight:  # otherwise, whatever they are, they only chart
            np.add.at(steps, places, np.float32(self.reward.model_weight) * rewards)  # a token may end two steps
        given[places] = True
        outcome = sum(
            weight * value
            for weight, (name, value) in zip(self.reward.weights, score.components.items(), strict=True)
            if name != MODEL_TERM and np.isfinite(value)
        )
        return dataclasses.replace(score, steps=steps, ends=given, outcome=outcome)

    def _ends_on_tokens(self, sample: SampledRow, ends: np.ndarray) -> np.ndarray:
        """Return the indices of the tokens that contain these characters of the sentence that was sent."""
        first, row = self._reply_start(sample), sample.tokens
        places, shift = text_places(sample, self._tokenizer), 0
        if self._is_chat(sample):
            places = [place for place in places if place >= first]
        else:
            shift = len(self._decoded(row[:first].tolist())) - len(sample.prompt.text)
        counts = tokens_with((ends + shift).clip(0).tolist(), self._tokenizer, row[places].tolist())
        # At the end of the response, the tokens that are no text belong to the step.
        at = [first, *places]
        return np.array([len(row) - 1 if count is None else max(first, at[count]) for count in counts], np.int64)

    @staticmethod
    def _is_chat(sample: SampledRow) -> bool:
        return MESSAGES_KEY in sample.prompt.metadata

    def _reply_start(self, sample: SampledRow) -> int:
        """Return where the response begins in its row; in a chat with an environment, the policy's last message."""
        if sample.turns and self._is_chat(sample):
            return sample.turns[-1].start
        return len(sample.prompt.tokens)

    def _prompt_and_response(self, sample: SampledRow) -> tuple[Prompt, str, Sequence[Mapping[str, Any]]]:
        """Return prompt and response, and the messages of a conversation from the policy's first one on.

        A text and its response are one text without a gap. Of a conversation, the response is the policy's last
        message, and the prompt has all those before it.
        """
        prompt, start, row = sample.prompt, self._reply_start(sample), sample.tokens.tolist()
        if not (sample.turns and self._is_chat(sample)):
            ids = [row[place] for place in text_places(sample, self._tokenizer)]
            before, whole = ("", "") if self._is_chat(sample) else map(self._decoded, (row[:start], ids))
            is_continued = whole.startswith(before) and before
            return prompt, whole[len(before) :] if is_continued else self._decoded(ids[start:]), ()
        reply, last = sample.messages, last_reply(sample.messages)
        shown = {**prompt.metadata, MESSAGES_KEY: [*prompt.metadata[MESSAGES_KEY], *reply[sample.known : last]]}
        text = self._decoded(row[:start])
        return dataclasses.replace(prompt, text=text, metadata=shown), reply[last]["content"], reply

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))


def _one_version(versions: np.ndarray, rows: int) -> int:
    """Return the one version that scored a request; a row must never mix versions of a model."""
    assert versions.shape == (rows, 1), f"the versions of {rows} rows have the shape {versions.shape}"
    assert (versions == versions[0]).all(), f"one request was scored by the versions {sorted(set(versions.flat))}"
    return int(versions[0, 0])
