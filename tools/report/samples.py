"""Samples of a run's last steps, token by token, as its journal of samples has them, for the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.actor.replay.recorded_steps import OLD_LOGPROBS, STORED_TENSOR, RecordedSteps, find_steps
from rlhf_triton.checkpoints.inspection import tokenizer_kind
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.sections import RunSection
from rlhf_triton.errors import REPORTED, reason_of
from rlhf_triton.rewards.sample import MESSAGES_KEY
from rlhf_triton.tools.report.data import RunRecord

# Bounds of the page.
MAX_STEPS = 3
MAX_SAMPLES = 4  # per step
MAX_TOKENS = 128  # per sample
MAX_CHARACTERS = 500  # per prompt


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """A token after the prompt. Of an environment's token, only the text is known."""

    text: str
    is_sampled: bool = False  # by the policy
    logprob: float | None = None  # nats, when it was sampled
    value: float | None = None  # the critic's, before the token
    advantage: float = 0.0
    ratio: float | None = None  # its probability under the policy before the update / when it was sampled
    version: int | None = None  # last update in the weights that sampled it


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A row that a step trained on."""

    prompt: str
    reward: float | None
    failure: str  # why it was masked
    tokens: Sequence[ShownToken]
    num_left_out: int  # tokens after these


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """The first samples of a step."""

    step: int
    samples: Sequence[ShownSample]
    num_samples: int  # in the whole step


def shown_steps(run: RunRecord) -> tuple[list[ShownStep], str]:
    """Return the newest steps in the run's journal, and what of it cannot be read."""
    last = run.steps[-1]["step"] if run.steps else 0
    try:
        recorded = find_steps(RunSection(dir=run.folder).sample_journal_dir, max(1, last - MAX_STEPS + 1), last)
        tokenizer = _tokenizer_of(run) if recorded.steps else None
        problem = reason_of(recorded.damage[0]) if recorded.damage else ""
        return [_shown_step(recorded, step, tokenizer) for step in sorted(recorded.steps)], problem
    except REPORTED as error:  # the rest of the page does not depend on it
        return [], reason_of(error)


def _tokenizer_of(run: RunRecord) -> Any:
    """Return the policy's tokenizer; None if it is not there, so that tokens are shown as ids."""
    folders = (run.policy, run.settings.get("actor.policy.model"))
    with_tokenizer = [folder for folder in folders if folder is not None and tokenizer_kind(Path(folder))]
    return load_tokenizer(with_tokenizer[0]) if with_tokenizer else None


def _shown_step(recorded: RecordedSteps, step: int, tokenizer: Any) -> ShownStep:
    from rlhf_triton.actor.data.rollout_rows import conversations_of, rows_of  # torch: slow to import
    from rlhf_triton.actor.data.sample_records import group_of

    record = recorded.step(step)
    numbers = record.header["groups"][: len(record.header["groups"]) - record.header["num_dropped"]]
    rows = rows_of(conversations_of([group_of(recorded.group(step, number)) for number in numbers]))
    ends = np.cumsum([len(row.tokens) - 1 for row in rows])[:-1]
    advantages = np.split(record.arrays[STORED_TENSOR], ends)
    old: Sequence[np.ndarray | None]
    if OLD_LOGPROBS in record.arrays:
        old = np.split(record.arrays[OLD_LOGPROBS], ends)
    else:
        # Those of sampling are of the policy before the update, too, unless an older one may have sampled.
        ahead = record.header["settings"]["actor"]["max_off_policy_steps"]
        computed = [None if ahead and row.policy_logprobs is row.logprobs else row.policy_logprobs for row in rows]
        old = [None if logprobs is None else logprobs[1:] for logprobs in computed]
    samples = [
        _shown_sample(row, advantages[i], old[i], tokenizer=tokenizer) for i, row in enumerate(rows[:MAX_SAMPLES])
    ]
    return ShownStep(step=step, samples=samples, num_samples=len(rows))


def _shown_sample(row: Any, advantages: np.ndarray, old: np.ndarray | None, *, tokenizer: Any) -> ShownSample:
    """Return a `RolloutRow` as it is shown.

    Args:
        advantages: `[n - 1]`.
        old: log-probs `[n - 1]` under the policy before the update; None if they are unknown.
    """
    first = len(row.prompt.tokens)
    size = len(row.tokens)
    messages = row.prompt.metadata.get(MESSAGES_KEY)
    prompt = str(messages[-1]["content"]) if messages else row.prompt.text
    tokens = list[ShownToken]()
    for t in range(first, min(size, first + MAX_TOKENS)):
        text = f"{row.tokens[t]} " if tokenizer is None else tokenizer.decode([int(row.tokens[t])])
        if not row.sampled[t]:
            tokens.append(ShownToken(text=text))
            continue
        ratio = None
        if old is not None and row.logprobs is not None and not row.score.failure:
            ratio = math.exp(float(old[t - 1]) - float(row.logprobs[t]))
        tokens.append(
            ShownToken(
                text=text,
                is_sampled=True,
                logprob=None if row.logprobs is None else float(row.logprobs[t]),
                value=None if row.score.values is None else float(row.score.values[t - 1]),
                advantage=float(advantages[t - 1]),
                ratio=ratio,
                version=None if row.policy_steps is None else int(row.policy_steps[t]),
            )
        )
    return ShownSample(
        prompt=prompt if len(prompt) <= MAX_CHARACTERS else f"… {prompt[-MAX_CHARACTERS:]}",
        reward=None if row.score.failure else row.score.reward,
        failure=row.score.failure,
        tokens=tokens,
        num_left_out=max(0, size - first - MAX_TOKENS),
    )
