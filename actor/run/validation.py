"""Validation on held-out prompts, sampled with the same seed each time and scored by the server."""

import asyncio
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from rlhf_triton.actor.algorithms.advantages import explained_variance
from rlhf_triton.actor.algorithms.batch import score_returns
from rlhf_triton.actor.algorithms.sample_metrics import sequence_kl
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.compute import InThread
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.sample import Conversation, Group, conversations_of, failure_of, rows_of, text_places
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.collection import collect
from rlhf_triton.actor.run.metrics import Timers
from rlhf_triton.actor.scoring.reference import Reference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.monitoring.tracing import span
from rlhf_triton.rewards.function import MESSAGES_KEY
from rlhf_triton.wire.contract import VersionRange

SEED_OFFSET = 1_000_000  # keeps validation seeds apart from the seeds of training rollouts


@dataclass(frozen=True)
class Validation:
    """One pass over the held-out prompts."""

    conversations: list[Conversation]
    kl: float | None  # nats per sequence, k1, over scored ones; None without reference log-probs
    explained_variance: float | None  # of the scores' Monte-Carlo returns; None without a critic

    @property
    def reward(self) -> float:
        """Mean reward of the scored conversations."""
        scores = [each[-1].score for each in self.conversations if not failure_of(each)]
        return float(np.mean([score.reward for score in scores], dtype=np.float32)) if scores else math.nan


async def validate(
    policy: Policy,
    scorer: Scorer,
    reference: Reference,
    prompts: list[Prompt],
    *,
    with_kl: bool,
    seed: int,
    in_thread: InThread,
) -> Validation:
    """Generate one response per held-out prompt, score them, and return the result.

    `seed`: the seed of the run; every validation uses it, so that validations are comparable.

    Raises: NotFinite from generation.
    """
    await in_thread(policy.renew_sampler)
    ready: asyncio.Future[VersionRange | None] = asyncio.get_running_loop().create_future()
    ready.set_result(None)
    with span("validation"):
        groups = await collect(
            policy,
            scorer,
            reference,
            prompts,
            seed=seed + SEED_OFFSET,
            ready=ready,
            in_thread=in_thread,
            timers=Timers(),
            with_kl=with_kl,
            with_logprobs=False,
        )
    return await in_thread(_measured, conversations_of(groups))


def _measured(conversations: list[Conversation]) -> Validation:
    has_values = any(row.score.version >= 0 for row in rows_of(conversations))
    return Validation(
        conversations, sequence_kl(conversations), explained(conversations, conversations) if has_values else None
    )


def explained(rewarded: Sequence[Conversation], valued: Sequence[Conversation]) -> float:
    """Return the share of the variance of the returns of `rewarded` that the values of `valued` explain.

    Both are the same conversations; one that failed on either side does not count.
    """
    pairs = [pair for pair in zip(rewarded, valued, strict=True) if not any(map(failure_of, pair))]
    if not pairs:
        return 0.0
    _, returns, mask = score_returns([pair[0] for pair in pairs])
    values = score_returns([pair[1] for pair in pairs])[0]
    return float(explained_variance(values, returns, mask))


def read_texts(conversations: Sequence[Conversation], tokenizer: Any, limit: int | None = None) -> list[dict[str, Any]]:
    """Return prompt, response, reward (None if unavailable) and reward version of the first conversations.

    A conversation with an environment has its turns, too, in all of its rows.
    """
    texts = []
    for conversation in conversations[:limit]:
        end = conversation[-1]
        places = [place for place in text_places(end, tokenizer) if place >= end.prompt.tokens.size]
        text = {
            "prompt": conversation[0].prompt.text,
            "response": tokenizer.decode(end.tokens[places].tolist(), skip_special_tokens=False),
            "reward": None if failure_of(conversation) else end.score.reward,
            **_turns(conversation),
        }
        version = end.score.reward_version
        texts.append(text if version is None else {**text, "reward_version": version})
    return texts


def samples(validation: Validation, when: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Return one line per response of a validation, for samples.jsonl."""
    conversations = validation.conversations
    return [
        {
            "prompt_id": conversation[-1].prompt.prompt_id,
            "when": when,
            **text,
            **_question(conversation[0].prompt),
            **_steps(conversation),
            "ended": conversation[-1].ended,
        }
        for conversation, text in zip(conversations, read_texts(conversations, tokenizer), strict=True)
    ]


def _steps(conversation: Conversation) -> dict[str, list[float]]:
    """Return the process rewards of one response, in its order."""
    score = conversation[-1].score
    if score.steps is None or failure_of(conversation):
        return {}
    return {"step_rewards": score.steps[score.ends].tolist()}


def _turns(conversation: Conversation) -> dict[str, Any]:
    """Return the turns of a conversation with an environment, and how it ended.

    The policy's turns have the rewards that the environment gave, and the critic's mean
    value of the states in which their tokens were sampled.
    """
    end = conversation[-1]
    if end.turns is None:
        return {}
    messages, seen = list[dict[str, Any]](), [conversation[0].prompt.metadata.get(MESSAGES_KEY, [])]
    for row in conversation:
        whole = [*row.prompt.metadata.get(MESSAGES_KEY, ()), *row.messages[row.known :]]
        new = [len([*takewhile(bool, map(operator.eq, whole, earlier))]) for earlier in seen]
        messages += whole[max(new) :]
        seen.append(whole)
    turns = [(row, turn) for row in conversation for turn in row.turns or ()]
    line: dict[str, Any] = {"turns": messages, "turn_rewards": [turn.reward for _, turn in turns]}
    values = [row.score.values[turn.start - 1 : turn.end - 1] for row, turn in turns if row.score.values is not None]
    if values and len(values) == len(turns):
        line["turn_values"] = [float(each.mean()) for each in values]
    return line | {name: text for name in ("truncated", "error") if (text := getattr(end, name))}


def training_texts(groups: Sequence[Group], batch: PPOBatch, tokenizer: Any, limit: int) -> list[dict[str, Any]]:
    """Return the first conversations of a step as `read_texts` does; those with environments have their tokens, too.

    `batch` has the rows of `groups`.
    """
    conversations = conversations_of(groups)[:limit]
    texts, first = read_texts(conversations, tokenizer), 0
    for conversation, text in zip(conversations, texts, strict=True):
        if conversation[-1].turns is not None:
            text["turn_tokens"] = turn_tokens(conversation, batch, tokenizer, first)
        first += len(conversation)
    return texts


def turn_tokens(
    conversation: Conversation, batch: PPOBatch, tokenizer: Any, first: int
) -> list[list[tuple[str, float, float]]]:
    """Return the sampled tokens of a conversation by turn: text, the critic's value before it, 0 without, advantage.

    `first`: the row of the batch with which the conversation begins.
    """
    return [
        [
            (
                tokenizer.decode([int(row.tokens[t])]),
                *(float(each[i, t - 1]) for each in (batch.prev_values, batch.advantages)),
            )
            for t in range(turn.start, turn.end)
        ]
        for i, row in enumerate(conversation, first)
        for turn in row.turns or ()
    ]


def _question(prompt: Prompt) -> dict[str, str]:
    """Return the last message of a chat prompt, which is easier to read than text full of template markers."""
    messages = prompt.metadata.get(MESSAGES_KEY)
    return {"question": str(messages[-1]["content"])} if messages else {}
