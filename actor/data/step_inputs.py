"""The prompts and the seed of each step; a resumed run gets the same ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actor.data.prompt_stream import Positions, PromptStream
from actor.data.rollout import Prompt

logger = logging.getLogger(__name__)
KEPT_STEPS = 3  # the last complete step, the current one and the one whose rollout is prefetched


@dataclass(frozen=True)
class StepInputs:
    """Chooses the prompts and the seed of each step, and knows the positions in the prompts after it."""

    stream: PromptStream
    seed: int  # of the run
    prompts_per_step: int
    responses_per_prompt: int
    known: dict[int, Positions] = field(default_factory=lambda: {0: Positions()})  # step -> positions after it

    def prompts_of(self, step: int) -> list[Prompt]:
        """Read the prompts of `step`; each is repeated `responses_per_prompt` times, once per response.

        Raises:
            PromptError: a row is malformed or its prompt is refused; the message names file and row.
        """
        taken, after = self.stream.take(step, self.prompts_per_step, self.after(step - 1))
        self.known[step] = after
        first = min(self.known)  # of the start
        for old in [known for known in self.known if first < known <= step - KEPT_STEPS]:
            del self.known[old]
        return [prompt for prompt in taken for _ in range(self.responses_per_prompt)]

    def after(self, step: int) -> Positions:
        """Return the positions after `step`, by reading the prompts of the steps up to it where necessary."""
        if step not in self.known:
            self.prompts_of(step)
        return self.known[step]

    def epoch(self, step: int) -> int:
        """Return the number of complete epochs, of the file that has been repeated most often, after `step`."""
        return self.stream.epoch(self.after(step))

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of `step` saves."""
        after = self.after(step)
        return {
            "prompts_taken": after.prompts,
            "prompt_files": self.stream.state(after),
            "add_special_tokens": self.stream.reader.add_special_tokens,
        }

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after `step`, from what `state` returned for it; warn if text prompts have other tokens now."""
        added, adds = state.get("add_special_tokens", False), self.stream.reader.add_special_tokens
        if added != adds:
            logger.warning(
                "actor.prompts.add_special_tokens was %s up to the checkpoint and is %s now: text prompts have other "
                "tokens",
                added,
                adds,
            )
        self.known.clear()
        self.known[step] = self.stream.restored(state["prompts_taken"], state.get("prompt_files"))

    def seed_of(self, step: int) -> int:
        """Return the seed for sampling and shuffling in `step`."""
        return step_seed(self.seed, step)


def step_seed(run_seed: int, step: int) -> int:
    """Return a 32-bit hash of run seed and step: torch's CPU generator uses only the lowest 32 bits of a seed."""
    return int(np.random.SeedSequence([run_seed, step]).generate_state(1)[0])
