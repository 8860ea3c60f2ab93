"""The prompts of each step: the order within prompt files, the weights of the files, and resuming.

Prompts are read and tokenised when a step needs them. Each file is an infinite sequence of shuffled epochs. Its
position counts the rows used so far, including skipped ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.actor.data.prompt_files import PromptError, fingerprint, open_rows
from rlhf_triton.actor.data.prompt_reader import Prompt, PromptReader
from rlhf_triton.config.actor import PromptFileSection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Positions:
    """Position of a run in each of its prompt files."""

    prompts: int = 0  # used so far, from all files
    rows: Mapping[str, int] = field(default_factory=dict)  # path -> position
    credits: Mapping[str, float] = field(default_factory=dict)  # path -> prompts due by its weight minus prompts used


class ShuffledFile:
    """The shuffled epochs of one prompt file."""

    def __init__(self, path: Path, reader: PromptReader, seed: Sequence[int]) -> None:
        self.rows = open_rows(path)
        self._reader = reader
        self._seed = seed
        self.fingerprint = fingerprint(path)  # identifies the opened file, which may be replaced during the run
        if not len(self.rows):
            raise PromptError(f"{path} has no prompts")
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))  # current epoch and its permutation
        self._num_long = 0  # long prompts seen by this process

    def next_prompt(self, position: int) -> tuple[Prompt, int]:
        """Return the first prompt at or after `position` that is not skipped, and the position after it."""
        # Up to the end of the first whole epoch, because rows may recur sooner where two epochs meet.
        first_whole = -(-position // len(self.rows))
        for current in range(position, (first_whole + 1) * len(self.rows)):
            prompt = self.prompt_at(current)
            if prompt is not None:
                return prompt, current + 1
        raise PromptError(f"{self.rows.path} has no prompts of at most {self._reader.max_tokens} tokens")

    def prompt_at(self, position: int) -> Prompt | None:
        """Return the prompt at `position`; None if it is too long and skipped."""
        epoch, index = divmod(position, len(self.rows))
        if self._order[0] != epoch:
            rng = np.random.default_rng([self._seed[0], epoch, *self._seed[1:]])
            self._order = (epoch, rng.permutation(len(self.rows)))
        row = self.rows.row(int(self._order[1][index]))
        prompt = self._reader.prompt(row)
        if self._reader.is_long(prompt):
            self._num_long += 1
            if str(self._num_long).strip("0") == "1":  # the first, 10th, 100th, …
                logger.warning(
                    "%s: %d tokens, more than actor.prompts.max_tokens (%d); %d such prompts of this file were %s "
                    "since the start",
                    row.where,
                    prompt.tokens.size,
                    self._reader.max_tokens,
                    self._num_long,
                    self._reader.long_prompt_action,
                )
        return self._reader.fitted(prompt)


KEPT_STEPS = 3  # the current step and the two before it


class StepInputs:
    """Chooses the prompts and the seed of each step; a resumed run gets the same ones.

    Prompts come from the files in proportion to their weights.
    """

    def __init__(
        self,
        sources: Sequence[PromptFileSection],
        reader: PromptReader,
        *,
        seed: int,
    ) -> None:
        """Open the files and find their rows. Raises PromptError if a file is unreadable or has no rows."""
        self._reader = reader
        self._seed = seed
        self.positions = {0: Positions()}
        """The positions after each step: the last complete one, the two before it, and the one of the start."""
        paths = [source.path for source in sources]
        # The first file has the same order as in a run with this file alone.
        seeds = [[seed, number] if number else [seed] for number in range(len(paths))]
        self._files = {
            str(path): ShuffledFile(path, reader, file_seed) for path, file_seed in zip(paths, seeds, strict=True)
        }
        self.fingerprints = {path: file.fingerprint for path, file in self._files.items()}
        total = sum(source.weight for source in sources)
        self._shares = {str(source.path): source.weight / total for source in sources}

    def read(self, count: int, start: Positions) -> list[tuple[Prompt, Positions]]:
        """Return the next `count` prompts from the positions `start` on, each with the positions after it.

        Each prompt comes from the file whose share lags furthest behind its weight, so a file never exceeds its share
        by a whole prompt.

        Raises:
            PromptError: a row is malformed or its prompt is refused; the message names file and row.
        """
        credits = dict(start.credits)
        rows = dict(start.rows)
        prompts: list[tuple[Prompt, Positions]] = []
        for number in range(start.prompts + 1, start.prompts + 1 + count):
            for path, share in self._shares.items():
                credits[path] = credits.get(path, 0.0) + share
            path = max(self._shares, key=credits.__getitem__)
            credits[path] -= 1
            prompt, rows[path] = self._files[path].next_prompt(rows.get(path, 0))
            prompts.append((prompt, Positions(number, {**rows}, {**credits})))
        return prompts

    def record(self, step: int, positions: Positions) -> None:
        """Record the positions after the last prompt of `step`."""
        self.positions[step] = positions
        first = min(self.positions)  # the step at which this process started
        for old in [other for other in self.positions if first < other <= step - KEPT_STEPS]:
            del self.positions[old]

    def first_prompts(self) -> list[Prompt]:
        """Return the prompt of each file's first row, except skipped ones, for checks before the run starts."""
        prompts = (self._reader.fitted(self._reader.prompt(file.rows.row(0))) for file in self._files.values())
        return [prompt for prompt in prompts if prompt is not None]

    def epoch(self, step: int) -> int:
        """Return the number of complete epochs after `step` of the file that has been repeated most often."""
        rows = self.positions[step].rows
        return max(rows.get(path, 0) // len(file.rows) for path, file in self._files.items())

    def state(self, step: int) -> dict[str, Any]:
        """Return the state to save in a checkpoint of `step`: each file's position, credit and fingerprint."""
        after = self.positions[step]
        files = {
            path: {
                "rows": after.rows.get(path, 0),
                "credit": after.credits.get(path, 0.0),
                "fingerprint": file.fingerprint,
            }
            for path, file in self._files.items()
        }
        return {"prompts_taken": after.prompts, "prompt_files": files}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after `step`; `state` is the result of the method `state` for this step.

        Warn about files that have changed since. A single file may have moved to another path.
        """
        saved = state["prompt_files"]
        if len(saved) == len(self._files) == 1:
            saved = dict(zip(self._files, saved.values(), strict=True))
        for path, file in self._files.items():
            saved_file = saved.get(path)
            if saved_file is None:
                logger.warning("%s is not in the checkpoint; its prompts are taken from the beginning", path)
            elif saved_file["fingerprint"] != file.fingerprint:
                logger.warning(
                    "%s has changed since the checkpoint: after %d rows the run continues in the order of the new "
                    "file, so it may repeat some prompts in this epoch and skip others",
                    path,
                    saved_file["rows"],
                )
        saved_files = {path: saved[path] for path in self._files if path in saved}
        rows, credits = ({path: file[key] for path, file in saved_files.items()} for key in ("rows", "credit"))
        self.positions = {step: Positions(state["prompts_taken"], rows, credits)}

    def seed_of(self, step: int, *repeat: int) -> int:
        """Return the seed for sampling and shuffling in `step`; `repeat`: number of a resampling within the step.

        A 32-bit hash: torch's CPU generator uses only the lowest 32 bits of a seed.
        """
        return int(np.random.SeedSequence([self._seed, step, *repeat]).generate_state(1)[0])
