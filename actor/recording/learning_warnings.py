"""Warnings about a run from which the policy learns little or nothing."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_triton.actor.data.rollout_rows import Conversation, RolloutRow, scores_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.recording.metrics import has_signal
from rlhf_triton.config.actor import ActorSection, AlgorithmSection

logger = logging.getLogger(__name__)
RESPONSE_LIMIT = "actor.generation.max_new_tokens"  # as in `RolloutRow.truncated`
GRADIENT = "train_optim/grad_norm"
FIRST_STEPS = 3  # after them, a warning names rewards that were constant and a gradient that was always 0
OPENING_TAG = re.compile(r"<\w+>\s*\Z")  # a tag at the end of a prompt, such as <think>


class LearningWarnings:
    """Warns, mostly once, if rewards are constant, responses do not end or count, or the gradient is 0."""

    def __init__(self, settings: ActorSection, policy: Policy) -> None:
        self._settings = settings
        self._policy = policy
        self._num_first_steps = min(FIRST_STEPS, settings.steps)
        self._constants = ConstantTerms(self._num_first_steps)
        self._num_mostly_excluded = 0  # steps in which fewer than half of the responses contribute
        self._gradients_seen: list[bool] = []  # whether each of the first updates had a gradient besides the KL's
        self._is_first = True
        self._has_warned_of_no_signal = False

    def check(
        self, step: int, line: Mapping[str, Any], conversations: Sequence[Conversation], contributing: set[int]
    ) -> None:
        """Warn if the metrics of a step show that the policy learns little or nothing.

        Args:
            line: the step's line of metrics.jsonl.
            contributing: indices of the conversations that contribute to the policy's update.
        """
        ends = [conversation[-1] for conversation in conversations]
        self._constants.add(conversations)
        if self._is_first:
            self._warn_of_unended(step, line, ends)
            self._is_first = False
        self._warn_of_no_gradient(step, line, counts=bool(contributing))
        self._warn_of_excluded(step, [i in contributing for i in range(len(ends))], ends)

    def _warn_of_unended(self, step: int, line: Mapping[str, Any], ends: Sequence[RolloutRow]) -> None:
        """Warn if no response ended, and each was cut off by `RESPONSE_LIMIT`; `ends`: last rows of conversations."""
        has_ends = bool(line["train_rollouts/fraction_of_samples_properly_ended"])
        if not has_ends and all(end.truncated == RESPONSE_LIMIT for end in ends if end.turns is not None):
            generation = self._settings.generation
            ids = self._policy.eos_ids
            named = [f"{self._policy.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ids]
            logger.warning(
                "step %d: no response ended within %s (%d) by %s: raise it; or if the policy ends its responses with "
                "another token, set that token as eos_token_id in generation_config.json of actor.policy.model",
                step,
                RESPONSE_LIMIT,
                generation.max_new_tokens,
                " or ".join([*named, *map(repr, generation.stop_strings)]),
            )

    def _warn_of_no_gradient(self, step: int, line: Mapping[str, Any], *, counts: bool) -> None:
        """Warn, once each, if a step has no signal, or if none of the first updates has a gradient.

        `counts`: whether any response contributes to the update; if not, `_warn_of_excluded` says why.
        """
        has_gradient = bool(line.get(GRADIENT))
        why = "there are advantages, so check actor.policy.freeze"
        if not has_signal(line):
            has_gradient = False
            why = _why_no_signal(self._settings.algorithm) if counts else "no response counts"
            if counts and not self._has_warned_of_no_signal:
                logger.warning(
                    "step %d has no signal: %s (steps_without_signal in the summary counts these)", step, why
                )
                self._has_warned_of_no_signal = True
        if GRADIENT in line and len(self._gradients_seen) < self._num_first_steps:
            self._gradients_seen.append(has_gradient)
            if len(self._gradients_seen) == self._num_first_steps and not any(self._gradients_seen):
                text = "the gradient of the loss is 0 in each of the first %d steps: %s"
                logger.warning(text, self._num_first_steps, why)

    def _warn_of_excluded(self, step: int, contributes: Sequence[bool], ends: Sequence[RolloutRow]) -> None:
        """Warn the first, 10th, 100th, … time that fewer than half of the responses contribute to the update.

        `Recorder` reports conversations that failed.
        """
        limits = {end.truncated for end, counts in zip(ends, contributes, strict=True) if end.truncated and not counts}
        contributing = sum(contributes)
        total = len(ends)
        if contributing >= total / 2 or (ends[0].turns is not None and not limits):
            return
        self._num_mostly_excluded += 1
        if contributing and str(self._num_mostly_excluded).strip("0") != "1":
            return
        logger.warning(
            "step %d: %d of %d responses are excluded from the update, mostly because they did not end within %s; "
            "raise it, or set %s",
            step,
            total - contributing,
            total,
            " or ".join(sorted(limits)) or RESPONSE_LIMIT,
            "environment.truncated to score" if limits else "actor.algorithm.mask_unfinished to false",
        )


def _why_no_signal(algorithm: AlgorithmSection) -> str:
    """Return why all counted responses of a step have an advantage of 0, and what to do."""
    check = "check what the reward returns (rollouts.jsonl has texts and rewards)"
    if not algorithm.defaults.needs_groups:
        return f"all advantages are 0; {check}"
    return (
        f"all rewards are equal within each group; {check}, raise actor.algorithm.responses_per_prompt, or choose "
        "prompts that are neither too easy nor too hard"
    )


class ConstantTerms:
    """Warns of reward terms that are constant in the first steps, so that nothing can be learned from them."""

    def __init__(self, steps: int) -> None:
        """`steps`: number of steps before the warning."""
        self._steps = steps
        self._num_steps_seen = 0
        self._rows = 0
        self._values: dict[str, set[float]] = {}

    def add(self, conversations: Sequence[Conversation]) -> None:
        """Record the rewards of a step; after the last of the first steps, warn of each term with a single value."""
        if self._num_steps_seen >= self._steps:
            return
        scores = scores_of(conversations)
        self._num_steps_seen = self._num_steps_seen + 1
        self._rows = self._rows + len(scores)
        for score in scores:
            for name, value in (score.components or {"": score.reward}).items():
                self._values.setdefault(name, set()).update([value] if math.isfinite(value) else [])
        if self._num_steps_seen < self._steps or self._rows < 2:
            return
        prompts = [conversation[0].prompt for conversation in conversations]
        tags = {match[0] for prompt in prompts if (match := OPENING_TAG.search(prompt.text))}
        hint = (
            f"the prompts end with {tags.pop().strip()}, which the chat template writes, so no response has it"
            if tags
            else "compare what it looks for with the responses in rollouts.jsonl (actor.logged_texts)"
        )
        for name, values in self._values.items():
            if len(values) == 1:
                logger.warning(
                    "%s is %g for all %d responses of the first %d steps, so nothing is learned from it: %s",
                    f"the reward {name!r}" if name else "the reward",
                    *values,
                    self._rows,
                    self._num_steps_seen,
                    hint,
                )
