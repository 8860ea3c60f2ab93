"""The prompts and the seed of each step; a resumed run gets the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from actor.data.prompts import take
from actor.data.rollout import Prompt


@dataclass(frozen=True)
class StepInputs:
    """Chooses the prompts and the seed of each step."""

    prompts: list[Prompt]
    seed: int  # of the run
    prompts_per_step: int
    responses_per_prompt: int
    prompts_taken: Callable[[int], int]  # step -> number of prompts used by all steps up to it

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`; each is repeated `responses_per_prompt` times, once per response."""
        start = self.prompts_taken(step - 1)
        taken = take(self.prompts, start=start, count=self.prompts_per_step, seed=self.seed)
        return [prompt for prompt in taken for _ in range(self.responses_per_prompt)]

    def seed_of(self, step: int) -> int:
        """Return the seed for sampling and shuffling in `step`."""
        return step_seed(self.seed, step)


def step_seed(run_seed: int, step: int) -> int:
    """Return a 32-bit hash of run seed and step: torch's CPU generator uses only the lowest 32 bits of a seed."""
    return int(np.random.SeedSequence([run_seed, step]).generate_state(1)[0])
