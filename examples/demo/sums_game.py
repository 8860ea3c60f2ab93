"""The game of `make demo-agent`: a sum, three tries, and a hint after each wrong one."""

import re
from typing import Any

TRIES = 3


class SumsGame:
    """A game: guess the answer of a sum."""

    def reset(self, row: dict[str, Any]) -> str:
        """Return the row's question."""
        self.question = row["question"]
        self.answer = int(row["answer"])
        self.left = TRIES
        return self.question

    def step(self, action: str) -> tuple[str, float, bool]:
        """Compare the last number of a reply with the answer; return a hint, 1 for the right answer, and the end."""
        self.left -= 1
        numbers = re.findall(r"-?\d{1,9}", action)
        if numbers and int(numbers[-1]) == self.answer:
            return "That is right.", 1.0, True
        if not numbers:
            hint = "I see no number."
        else:
            hint = f"{numbers[-1]} is too {'low' if int(numbers[-1]) < self.answer else 'high'}."
        return f"{hint} Try again: {self.question.rpartition(': ')[2]}", 0.0, self.left == 0
