"""Validation on held-out prompts, sampled with the same seed each time and scored by the server."""

import asyncio
import operator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rlhf_triton.actor.algorithms.advantages import explained_variance
from rlhf_triton.actor.algorithms.batch import score_returns, sequence_kl
from rlhf_triton.actor.data.compute import InThread
from rlhf_triton.actor.data.rollout import PPOBatch, Prompt, Rollout, ScoredRollout, Scores, text_places
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.collection import all_rows, collect
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

    rollout: Rollout
    scores: Scores
    kl: float | None  # nats per sequence, k1, over scored rows; None without reference log-probs
    explained_variance: float | None  # of the scores' Monte-Carlo returns; None without a critic
    whole: ScoredRollout  # its rows, and further ones of its conversations

    @property
    def reward(self) -> float:
        """Mean reward of the scored rows."""
        return float(self.scores.rewards[self.scores.scored].mean())


async def validate(
    policy: Policy,
    scorer: Scorer,
    reference: Reference,
    prompts: list[Prompt],
    *,
    greedy: bool,
    with_kl: bool,
    seed: int,
    in_thread: InThread,
) -> Validation:
    """Generate one response per held-out prompt, sampled or greedy, score them, and return the result.

    `seed`: the seed of the run; every validation uses it, so that validations are comparable.

    Raises: NotFinite from generation.
    """
    await in_thread(policy.renew_sampler)
    ready: asyncio.Future[VersionRange | None] = asyncio.get_running_loop().create_future()
    ready.set_result(None)
    with span("validation"):
        scored = await collect(
            policy,
            scorer,
            reference,
            prompts,
            seed=seed + SEED_OFFSET,
            greedy=greedy,
            ready=ready,
            in_thread=in_thread,
            timers=Timers(),
            with_kl=with_kl,
            with_logprobs=False,
        )
    return await in_thread(_measured, scored)


def _measured(scored: ScoredRollout) -> Validation:
    whole = all_rows(scored, (), pad_id=0)
    of_variance = explained(whole.rollout, whole.scores, whole.scores) if scored.scores.has_values else None
    kl = sequence_kl(whole, whole.rollout.mask * whole.scores.scored[:, None])
    return Validation(scored.rollout, scored.scores, kl, of_variance, whole)


def explained(rollout: Rollout, rewarded: Scores, valued: Scores) -> float:
    """Return the share of the variance of the returns of `rewarded` that the values of `valued` explain."""
    returns, mask = score_returns(rewarded, rollout)
    mask = mask * (rewarded.scored & valued.scored)[:, None]
    return float(explained_variance(valued.values[:, :-1], returns, mask))


def read_texts(rollout: Rollout, scores: Scores, tokenizer: Any, limit: int | None = None) -> list[dict[str, Any]]:
    """Return prompt, response, reward (None if unavailable) and a live reward model's version of the first rows.

    A conversation with an environment has its turns, too, in all of its rows.
    """
    texts, versions = [], scores.reward_versions
    for i, row in enumerate(rollout.rows(slice(limit))):
        prompt = rollout.prompts[i]
        places = [place for place in text_places(rollout, i, tokenizer) if place >= prompt.tokens.size]
        text = {
            "prompt": rollout.prompts[_rows(rollout, i)[0]].text,
            "response": tokenizer.decode(row[places].tolist(), skip_special_tokens=False),
            "reward": float(scores.rewards[i]) if scores.scored[i] else None,
            **_conversation(rollout, scores, i),
        }
        texts.append(text if versions is None else {**text, "reward_version": int(versions[i])})
    return texts


def samples(validation: Validation, when: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Return one line per response of a validation, for samples.jsonl."""
    rollout, scores, limit = validation.whole.rollout, validation.scores, len(validation.rollout.prompts)
    texts = read_texts(rollout, validation.whole.scores, tokenizer, limit)
    return [
        {
            "prompt_id": prompt.prompt_id,
            "when": when,
            **text,
            **_question(rollout.prompts[_rows(rollout, i)[0]]),
            **_steps(scores, i),
            "ended": bool(rollout.is_end[i]),
        }
        for i, (prompt, text) in enumerate(zip(validation.rollout.prompts, texts, strict=True))
    ]


def _steps(scores: Scores, index: int) -> dict[str, list[float]]:
    """Return the process rewards of one response, in its order."""
    if scores.process is None or not scores.scored[index]:
        return {}
    return {"step_rewards": scores.process.rewards[index][scores.process.ends[index]].tolist()}


def _conversation(rollout: Rollout, scores: Scores, index: int) -> dict[str, Any]:
    """Return the turns of a conversation with an environment, and how it ended.

    The policy's turns have the rewards that the environment gave, without `environment.weight`, and the critic's mean
    value of the states in which their tokens were sampled.
    """
    if rollout.trajectories is None:
        return {}
    rows = [(i, rollout.trajectories[i]) for i in _rows(rollout, index)]
    turns, seen = list[dict[str, Any]](), [rollout.prompts[rows[0][0]].metadata.get(MESSAGES_KEY, [])]
    for i, row in rows:
        whole = [*rollout.prompts[i].metadata.get(MESSAGES_KEY, ()), *row.messages[row.known :]]
        new = [len([*takewhile(bool, map(operator.eq, whole, earlier))]) for earlier in seen]
        turns += whole[max(new) :]
        seen.append(whole)
    line: dict[str, Any] = {
        "turns": turns,
        "turn_rewards": [turn.reward for _, row in rows for turn in row.turns],
    }
    if scores.versions[index] >= 0:
        line["turn_values"] = [
            float(scores.values[i, turn.start - 1 : turn.end - 1].mean()) for i, row in rows for turn in row.turns
        ]
    return line | {name: text for name in ("truncated", "error") if (text := getattr(rows[-1][1], name))}


def _rows(rollout: Rollout, index: int) -> list[int]:
    """Return the rows of a conversation in order; its own is the last."""
    others = [] if rollout.owners is None else (rollout.owners == index).nonzero()[1:, 0].tolist()
    return [*others, index]


def training_texts(whole: ScoredRollout, batch: PPOBatch, tokenizer: Any, limit: int) -> list[dict[str, Any]]:
    """Return the first rows of a step as `read_texts` does; conversations have their sampled tokens, too."""
    texts = read_texts(whole.rollout, whole.scores, tokenizer, limit)
    for index, text in enumerate(texts if whole.rollout.trajectories else ()):
        text["turn_tokens"] = turn_tokens(whole.rollout, batch, tokenizer, index)
    return texts


def turn_tokens(rollout: Rollout, batch: PPOBatch, tokenizer: Any, index: int) -> list[list[tuple[str, float, float]]]:
    """Return the sampled tokens of a conversation by turn: text, the critic's value before it, 0 without, advantage."""
    return [
        [
            (
                tokenizer.decode([int(rollout.tokens[i, t])]),
                *(float(each[i, t - 1]) for each in (batch.prev_values, batch.advantages)),
            )
            for t in range(turn.start, turn.end)
        ]
        for i in _rows(rollout, index)
        for turn in (rollout.trajectories or [])[i].turns
    ]


def _question(prompt: Prompt) -> dict[str, str]:
    """Return the last message of a chat prompt, which is easier to read than text full of template markers."""
    messages = prompt.metadata.get(MESSAGES_KEY)
    return {"question": str(messages[-1]["content"])} if messages else {}
