"""The held-out texts of a run before and after training, as pairs, and gains over them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.store.jsonl import each_line
from rlhf_triton.tools.report.conversations import ReportConversation

NUM_RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One held-out prompt, continued by the initial and by the final policy.

    A text is prompt + response. For a chat it is the response alone, and `prompt` is the last message.
    """

    prompt: str
    response_before: str
    response_after: str
    text_before: str
    text_after: str
    reward_before: float | None
    reward_after: float | None
    is_chat: bool = False
    conversation_before: ReportConversation | None = None
    """The conversation with the environment; None in a run without one."""
    conversation_after: ReportConversation | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the environment of one of its conversations failed."""
        return any(talk and talk.has_failed for talk in (self.conversation_before, self.conversation_after))


Scored = tuple[Pair, float, float]  # with the scores of its two texts, before and after


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The mean gain over the held-out prompts with its 95 % interval, by paired bootstrap."""

    before: float
    """The mean before, as `after`."""
    after: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The gain."""
        return self.after - self.before

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> "Gain":
        """Return the mean gain of one or more pairs, with a bootstrap interval over 4,000 resamples."""
        before, after = (np.array([item[side] for item in scored], np.float64) for side in (1, 2))
        picks = np.random.default_rng(0).integers(len(scored), size=(NUM_RESAMPLES, len(scored)))
        low, high = np.percentile((after - before)[picks].mean(axis=1), [2.5, 97.5])
        return cls(before=before.mean().item(), after=after.mean().item(), low=low.item(), high=high.item())


def read_pairs(run_dir: Path) -> list[Pair]:
    """Return the pairs in samples.jsonl, in its order: of the prompts that the run validated before and after.

    There are none in a fork, and in a run that validates only since it was resumed, or since then other prompts.
    """
    path = run_dir / "samples.jsonl"
    sides: dict[str, dict[tuple[str, str, int], dict[str, Any]]] = {"before": {}, "after": {}}
    counts = Counter[tuple[str, str, str]]()
    for row in each_line(path, required=True):
        # An id may name several prompts, or one of an earlier file. An environment's first text may differ each time.
        prompt = "" if "turns" in row else row.get("question", row["prompt"])
        named = row["when"], row["prompt_id"], prompt
        sides[row["when"]][row["prompt_id"], prompt, counts[named]] = row
        counts[named] += 1
    before = sides["before"]
    after = sides["after"]
    # If no response has a leading space, the decoder strips it; without one, prompt and response would run together.
    stripped = not any(row["response"][:1].isspace() for side in sides.values() for row in side.values())
    glue = " " if stripped else ""
    return [_pair(row, after[key], glue) for key, row in before.items() if key in after]


def _pair(before: dict[str, Any], after: dict[str, Any], glue: str) -> Pair:
    is_chat = "question" in before
    start = "" if is_chat else before["prompt"] + glue
    return Pair(
        prompt=before.get("question", before["prompt"]),
        response_before=before["response"],
        response_after=after["response"],
        text_before=start + before["response"],
        text_after=start + after["response"],
        reward_before=before["reward"],
        reward_after=after["reward"],
        is_chat=is_chat,
        conversation_before=ReportConversation.of(before),
        conversation_after=ReportConversation.of(after),
    )


def rewarded(pairs: Sequence[Pair]) -> list[Scored]:
    """Return the pairs that have both rewards, each with its reward before and after."""
    scored = ((pair, pair.reward_before, pair.reward_after) for pair in pairs)
    return [(pair, before, after) for pair, before, after in scored if before is not None and after is not None]
