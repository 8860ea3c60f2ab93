"""Validation on held-out prompts, sampled with the same seed each time and scored by the server."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from rlhf_triton.actor.algorithms.batch import score_returns
from rlhf_triton.actor.algorithms.sample_metrics import sequence_kl
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import (
    Conversation,
    conversations_of,
    failure_of,
    rows_of,
    scores_of,
    text_indices,
)
from rlhf_triton.actor.run.collection import Collector
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.monitoring.tracing import span
from rlhf_triton.rewards.sample import MESSAGES_KEY
from rlhf_triton.training_engine.explained_variance import explained_variance

SEED_OFFSET = 1_000_000  # keeps validation seeds apart from the seeds of training rollouts


@dataclass(frozen=True)
class Validation:
    """The result of one pass over the held-out prompts."""

    conversations: list[Conversation]
    kl: float | None  # `sequence_kl`
    explained_variance: float | None  # with the scores' Monte-Carlo returns; None without a critic

    @property
    def reward(self) -> float:
        """Mean reward of the scored conversations."""
        scores = scores_of(self.conversations)
        return float(np.mean([score.reward for score in scores], dtype=np.float32)) if scores else math.nan


async def validate(collector: Collector, prompts: list[Prompt], *, step: int, greedy: bool, seed: int) -> Validation:
    """Generate and score one response per held-out prompt, with the policy after `step`.

    `seed`: the seed of the run; every validation uses the same one, so that validations are comparable.

    Raises: NotFinite from generation.
    """
    await collector.sampling.renew(step)
    with span("validation"):
        groups = await collector.collect(prompts, seed=seed + SEED_OFFSET, timers=Timers(), greedy=greedy)
    conversations = conversations_of(groups)
    kl = await collector.in_thread(sequence_kl, conversations)
    has_values = any(row.score.version >= 0 for row in rows_of(conversations))
    explained = await collector.in_thread(explained_by_values, conversations, conversations) if has_values else None
    return Validation(conversations, kl, explained)


def explained_by_values(rewarded: Sequence[Conversation], valued: Sequence[Conversation]) -> float:
    """Return the explained variance of the returns of `rewarded` by the values of `valued`.

    Both hold the same conversations; a conversation that failed in either one does not count.
    """
    pairs = [pair for pair in zip(rewarded, valued, strict=True) if not any(map(failure_of, pair))]
    if not pairs:
        return 0.0
    _, returns, mask = score_returns([pair[0] for pair in pairs])
    values = score_returns([pair[1] for pair in pairs])[0]
    return explained_variance(values[mask > 0].numpy(), returns[mask > 0].numpy())


def read_texts(conversations: Sequence[Conversation], tokenizer: Any, limit: int | None = None) -> list[dict[str, Any]]:
    """Return prompt, response, reward (None if unavailable) and reward version of the first `limit` conversations.

    Conversations with environments also have the fields of `_turn_fields`.
    """
    texts = []
    for conversation in conversations[:limit]:
        end = conversation[-1]
        indices = [index for index in text_indices(end, tokenizer) if index >= end.prompt.tokens.size]
        text = {
            "prompt": conversation[0].prompt.text,
            "response": tokenizer.decode(end.tokens[indices].tolist(), skip_special_tokens=False),
            "reward": None if failure_of(conversation) else end.score.reward,
            **_turn_fields(conversation),
        }
        version = end.score.reward_version
        texts.append(text if version is None else {**text, "reward_version": version})
    return texts


def samples(validation: Validation, when: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Return one line per response of a validation, for samples.jsonl."""
    conversations = validation.conversations
    lines = []
    for conversation, text in zip(conversations, read_texts(conversations, tokenizer), strict=True):
        end = conversation[-1]
        line = {"prompt_id": end.prompt.prompt_id, "when": when, **text}
        if messages := conversation[0].prompt.metadata.get(MESSAGES_KEY):
            line["question"] = str(messages[-1]["content"])  # without the template's markers
        if end.score.steps is not None and not failure_of(conversation):
            line["step_rewards"] = end.score.steps[end.score.ends].tolist()
        lines.append({**line, "ended": end.ended})
    return lines


def _turn_fields(conversation: Conversation) -> dict[str, Any]:
    """Return the messages of a conversation with an environment and how it ended; {} without an environment.

    For each turn of the policy there is the environment's reward and, with a critic, the mean value of the states in
    which the turn's tokens were sampled.
    """
    end = conversation[-1]
    if end.turns is None:
        return {}
    messages = list[dict[str, Any]]()
    passed = [conversation[0].prompt.metadata.get(MESSAGES_KEY, [])]
    for row in conversation:
        whole = [*row.prompt.metadata.get(MESSAGES_KEY, ()), *row.messages[row.num_prompt_messages :]]
        new = [len([*takewhile(bool, map(operator.eq, whole, earlier))]) for earlier in passed]
        messages += whole[max(new) :]
        passed.append(whole)
    turns = [(row, turn) for row in conversation for turn in row.turns or ()]
    line: dict[str, Any] = {"turns": messages, "turn_rewards": [turn.reward for _, turn in turns]}
    values = [row.score.values[turn.start - 1 : turn.end - 1] for row, turn in turns if row.score.values is not None]
    if values and len(values) == len(turns):
        line["turn_values"] = [float(turn_values.mean()) for turn_values in values]
    return line | {name: text for name in ("truncated", "error") if (text := getattr(end, name))}
