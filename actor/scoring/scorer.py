"""Scores rollouts: sends rows concurrently, without the rollout's padding, and marks failed rows as not scored."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhf_triton.actor.data.compute import each
from rlhf_triton.actor.data.rollout import ProcessRewards, Prompt, Rollout, Scores, Trajectory, joined, text_places
from rlhf_triton.actor.scoring.environment import with_environment
from rlhf_triton.checkpoints.tokenization import fingerprint, rendering_fingerprint
from rlhf_triton.client.batching import halved
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


def ends_on_tokens(
    answer: Mapping[str, np.ndarray],
    tokenizer: Any,
    rows: Sequence[np.ndarray],
    texts: Sequence[Sequence[int]],
    firsts: Sequence[int],
    shifts: Sequence[int],
) -> dict[str, np.ndarray]:
    """Return the response to sentences with `step_ends` as indices of the tokens that contain them.

    Args:
        rows: token rows int64 `[length_i]` that the responses were decoded from.
        texts: indices of the tokens of each row whose text the sentence ends with.
        firsts: index of the first response token of each row.
        shifts: what to add to a character of each sentence to get the one of the decoded row.
    """
    ends = answer[STEP_ENDS].copy()
    for i, (row, places, first, shift) in enumerate(zip(rows, texts, firsts, shifts, strict=True)):
        counts = tokens_with((ends[i] + shift).clip(0).tolist(), tokenizer, row[places].tolist())
        # At the end of the response, the tokens that are no text belong to the step.
        at = [first, *places]
        last = [row.size - 1 if count is None else max(first, at[count]) for count in counts]
        ends[i] = np.where(ends[i] >= 0, last, ends[i])
    return {**answer, STEP_ENDS: ends}


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


def place_process_rewards(
    rewards: ProcessRewards, chunk: slice, answer: Mapping[str, np.ndarray], weight: float
) -> None:
    """Write the process rewards of a response's rows to the rows `chunk` of `rewards`, times `weight`; 0: all are 0."""
    found, ends = torch.tensor(answer[STEP_REWARDS]), torch.tensor(answer[STEP_ENDS])
    found = found if weight else torch.zeros_like(found)  # whatever they are, they only chart
    row, step = (ends >= 0).nonzero(as_tuple=True)
    index = (row + chunk.start, ends[row, step])
    rewards.rewards.index_put_(index, weight * found[row, step], accumulate=True)  # a token may end two steps
    rewards.ends[index] = True


def join_process_rewards(parts: Sequence[ProcessRewards], width: int) -> ProcessRewards:
    """Concatenate rewards of several rollouts, padded to `width` tokens."""
    return ProcessRewards(
        joined([part.rewards for part in parts], width),
        joined([part.ends for part in parts], width),
        torch.cat([part.outcome for part in parts]),
    )


Answer = dict[str, np.ndarray] | str  # outputs, or the error message
Part = tuple[Sequence[int], Answer]  # of consecutive rows


class Scorer:
    """Requests rewards and values of rollouts from the servers."""

    def __init__(
        self,
        client: TritonClient,
        tokenizer: Any,
        *,
        rows_per_request: int,
        with_critic: bool = True,
        with_rewards: bool = True,
        environment_weight: float = 1.0,
    ) -> None:
        """
        Args:
            with_critic: request values as well; if False, values are 0 and their version is -1.
            with_rewards: request rewards; if False, only environments give any.
            environment_weight: factor of the rewards that environments give.
        """
        self._client = client
        self.has_critic, self._has_rewards, self.environment_weight = with_critic, with_rewards, environment_weight
        self._tokenizer = tokenizer
        self.rows_per_request = rows_per_request
        self.sends_sentences = False
        self.reward = ServedModel()
        """What the server declares of its reward, often a sum of several."""

    @classmethod
    def of(cls, config: RunConfig, client: TritonClient, tokenizer: Any) -> Scorer:
        """Return the scorer of a run."""
        return cls(
            client,
            tokenizer,
            rows_per_request=config.actor.client.rows_per_request,
            with_critic=config.actor.algorithm.uses_critic,
            with_rewards=config.serves_rewards,
            environment_weight=1.0 if config.environment is None else config.environment.weight,
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
                    "reward.merge_attributes to true, and reward.attribute_weights to one weight per reward"
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

    async def score(self, rollout: Rollout, group_size: int = 1, *, versions: VersionRange | None = None) -> Scores:
        """Return rewards, values and the weights version of the values for every row.

        Args:
            group_size: number of consecutive rows that a groupwise reward function receives together.
            versions: versions of the critic that may compute the values; None: any.
        """
        count, unit = len(rollout.prompts), group_size if self.reward.groupwise else 1
        step = max(1, self.rows_per_request // unit) * unit
        chunks = [range(i, min(i + step, count)) for i in range(0, count, step)]
        ask = functools.partial(self._ask, rollout, group_size, versions)
        parts = await each(lambda chunk: halved(chunk, ask, str, unit=unit), chunks)
        scores = await asyncio.to_thread(self._assembled, rollout, [*itertools.chain(*parts)])
        return with_environment(rollout, scores, self.environment_weight)

    async def values(self, rollout: Rollout, versions: VersionRange | None = None) -> Scores:
        """Return values, of these versions, without running the reward model; all rewards are 0."""
        ask = functools.partial(self._values, rollout, versions)
        parts = await each(lambda row: halved([row], ask, str), range(len(rollout.prompts)))
        return await asyncio.to_thread(_assemble, rollout, [*itertools.chain(*parts)], ServedModel())

    async def prompt_values(self, prompts: Sequence[Prompt], versions: VersionRange | None) -> np.ndarray:
        """Return the critic's value after each prompt, float32 `[n]`: its predicted score, NaN if unavailable."""
        rows = [torch.from_numpy(prompt.tokens) for prompt in prompts]
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        scores = await self.values(Rollout([*prompts], tokens, lengths, lengths, lengths > 0), versions)
        values = scores.values[torch.arange(len(rows)), lengths - 1]
        return values.where(scores.versions >= 0, torch.nan).numpy()

    async def _values(
        self, rollout: Rollout, versions: VersionRange | None, chunk: Sequence[int]
    ) -> dict[str, np.ndarray]:
        rows = rollout.rows(_slice(chunk))
        return await self._client.score(rows, (VALUES, WEIGHTS_VERSION), versions=versions)

    async def _ask(
        self, rollout: Rollout, group_size: int, versions: VersionRange | None, chunk: Sequence[int]
    ) -> dict[str, np.ndarray]:
        if not self._has_rewards:
            return await self._values(rollout, versions, chunk) if self.has_critic else {}
        rows, wanted = rollout.rows(_slice(chunk)), self.reward.reward_outputs
        metadata = texts = pairs = None
        if self.reward.components or self.sends_sentences:
            metadata, texts, pairs = await asyncio.to_thread(self._texts, rollout, chunk, group_size)
        more: dict[str, Any] = {}
        if self.reward.granularity is not None:
            wanted = (*wanted, STEP_REWARDS, STEP_ENDS)
            more = {"prompt_lengths": rollout.prompt_lengths[_slice(chunk)].tolist()}
        if texts is None and self.has_critic:
            outputs = (*wanted, VALUES, WEIGHTS_VERSION)
            return await self._client.score(rows, outputs, metadata, **more, versions=versions)
        if texts is None:
            return await self._client.rewards(rows, wanted, metadata, **more)
        rewards = self._client.score_sentences(texts, wanted, metadata, pairs=pairs)
        if not self.has_critic:
            return await rewards
        values, answer = await asyncio.gather(self._values(rollout, versions, chunk), rewards)
        return {**values, **answer}

    def _texts(
        self, rollout: Rollout, chunk: Sequence[int], group_size: int
    ) -> tuple[list[dict[str, Any]], list[str] | None, list[str] | None]:
        """Return the metadata of rows and, if they are sent as texts, their sentences, or both texts of each pair.

        Of a chat, a sentence is only the response, because the messages are sent as metadata.
        """
        said = [self._said(rollout, i) for i in chunk]
        metadata = [
            row_metadata(self.reward, prompt, response, i // group_size, reply)
            for i, (prompt, response, reply) in zip(chunk, said, strict=True)
        ]
        if not self.sends_sentences:
            return metadata, None, None
        prompts = ["" if MESSAGES_KEY in prompt.metadata else prompt.text for prompt, _, _ in said]
        responses = [response for _, response, _ in said]
        if self.reward.takes_pairs:
            return metadata, prompts, responses
        return metadata, [*map(operator.add, prompts, responses)], None

    def _assembled(self, rollout: Rollout, parts: list[Part]) -> Scores:
        if self.sends_sentences and self.reward.granularity is not None:
            parts = [(chunk, self._on_tokens(rollout, chunk, answer)) for chunk, answer in parts]
        return _assemble(rollout, parts, self.reward)

    def _on_tokens(self, rollout: Rollout, chunk: Sequence[int], answer: Answer) -> Answer:
        if isinstance(answer, str):
            return answer
        rows, firsts = rollout.rows(_slice(chunk)), [self._reply_start(rollout, i) for i in chunk]
        texts, shifts = [text_places(rollout, i, self._tokenizer) for i in chunk], [0] * len(rows)
        for i, (index, row, first) in enumerate(zip(chunk, rows, firsts, strict=True)):
            if self._is_chat(rollout, index):
                texts[i] = [place for place in texts[i] if place >= first]
            else:
                shifts[i] = len(self._decoded(row[:first].tolist())) - len(rollout.prompts[index].text)
        return ends_on_tokens(answer, self._tokenizer, rows, texts, firsts, shifts)

    @staticmethod
    def _is_chat(rollout: Rollout, index: int) -> bool:
        return MESSAGES_KEY in rollout.prompts[index].metadata

    def _conversation(self, rollout: Rollout, index: int) -> Trajectory | None:
        """Return the trajectory of a chat with an environment in which the policy has said something, or None."""
        found = rollout.trajectories[index] if rollout.trajectories and self._is_chat(rollout, index) else None
        return found if found is not None and found.turns else None

    def _reply_start(self, rollout: Rollout, index: int) -> int:
        """Return where the response begins in its row; of a conversation, the policy's last message."""
        conversation = self._conversation(rollout, index)
        return int(rollout.prompt_lengths[index]) if conversation is None else conversation.turns[-1].start

    def _said(self, rollout: Rollout, index: int) -> tuple[Prompt, str, Sequence[Mapping[str, Any]]]:
        """Return prompt and response, and the messages of a conversation from the policy's first one on.

        A text and its response are one text without a gap. Of a conversation, the response is the policy's last
        message, and the prompt has all those before it.
        """
        prompt, start = rollout.prompts[index], self._reply_start(rollout, index)
        conversation = self._conversation(rollout, index)
        row = rollout.tokens[index, : int(rollout.lengths[index])].tolist()
        if conversation is None:
            ids = [row[place] for place in text_places(rollout, index, self._tokenizer)]
            before, whole = ("", "") if self._is_chat(rollout, index) else map(self._decoded, (row[:start], ids))
            is_continued = whole.startswith(before) and before
            return prompt, whole[len(before) :] if is_continued else self._decoded(ids[start:]), ()
        reply, last = conversation.messages, last_reply(conversation.messages)
        shown = {**prompt.metadata, MESSAGES_KEY: [*prompt.metadata[MESSAGES_KEY], *reply[conversation.known : last]]}
        text = self._decoded(row[:start])
        return dataclasses.replace(prompt, text=text, metadata=shown), reply[last]["content"], reply

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))


def _slice(chunk: Sequence[int]) -> slice:
    return slice(chunk[0], chunk[-1] + 1)


def _assemble(rollout: Rollout, parts: list[Part], reward: ServedModel) -> Scores:
    count, width = rollout.tokens.shape
    rewards, values = torch.zeros(count), torch.zeros(count, width)
    versions, scored = torch.full((count,), -1, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    components = torch.full((count, len(reward.components)), torch.nan)
    reward_versions = torch.full((count,), -1, dtype=torch.int64) if reward.is_live else None
    nothing = ProcessRewards(torch.zeros(count, width), torch.zeros(count, width, dtype=torch.bool), torch.zeros(count))
    steps = None if reward.granularity is None else nothing
    failures, num_explained = [], 0
    for indices, answer in parts:
        if isinstance(answer, str):
            failures.append(answer)
            continue
        chunk = _slice(indices)
        if REWARDS in answer:
            rewards[chunk] = torch.tensor(answer[REWARDS][:, 0])
        if steps is not None and REWARDS in answer:
            place_process_rewards(steps, chunk, answer, reward.model_weight)
        if reward.components:
            components[chunk] = torch.tensor(answer[REWARD_COMPONENTS])
            causes = [cause for cause in sentence_texts(answer[REWARD_ERRORS]) if cause]
            failures += causes
            num_explained += len(causes)
        if VALUES in answer:
            values[chunk, : answer[VALUES].shape[1]] = torch.tensor(answer[VALUES])
            versions[chunk] = _one_version(answer[WEIGHTS_VERSION], len(indices))
        if reward_versions is not None:
            reward_versions[chunk] = _one_version(answer[REWARD_VERSION], len(indices))
        scored[chunk] = True
    # Rows whose reward failed are not finite either, but `reward_errors` has explained them already.
    finite = torch.isfinite(rewards) & torch.isfinite(values).all(-1)
    if steps is not None:
        others = [0.0 if name == MODEL_TERM else w for name, w in zip(reward.components, reward.weights, strict=True)]
        steps = dataclasses.replace(steps, outcome=components.nan_to_num() @ torch.tensor(others))
        finite &= torch.isfinite(steps.rewards).all(-1)
    if int((~finite).sum()) > num_explained:
        what = "rewards or values that are not finite" + (", or no steps" if steps is not None else "")
        failures.append(f"{int((~finite).sum()) - num_explained} rows have {what}")
    rewards, values = torch.where(finite, rewards, 0.0), torch.where(finite[:, None], values, 0.0)
    by_name = dict(zip(reward.components, components.unbind(-1), strict=True))
    return Scores(rewards, values, versions, scored & finite, sorted(set(failures)), by_name, reward_versions, steps)


def _one_version(versions: np.ndarray, rows: int) -> int:
    """Return the one version that scored a request; a row must never mix versions of a model."""
    assert versions.shape == (rows, 1), f"the versions of {rows} rows have the shape {versions.shape}"
    assert (versions == versions[0]).all(), f"one request was scored by the versions {sorted(set(versions.flat))}"
    return int(versions[0, 0])


def join_scores(parts: list[Scores], width: int) -> Scores:
    """Concatenate scores of several rollouts, with values padded to `width` tokens."""
    reward_versions = [part.reward_versions for part in parts if part.reward_versions is not None]
    steps = [part.process for part in parts if part.process is not None]
    return Scores(
        torch.cat([part.rewards for part in parts]),
        joined([part.values for part in parts], width),
        torch.cat([part.versions for part in parts]),
        torch.cat([part.scored for part in parts]),
        sorted({failure for part in parts for failure in part.failures}),
        {name: torch.cat([part.components[name] for part in parts]) for name in parts[0].components},
        torch.cat(reward_versions) if reward_versions else None,
        join_process_rewards(steps, width) if steps else None,
    )
