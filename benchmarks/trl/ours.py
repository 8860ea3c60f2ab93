"""Our side of `bench trl`: `python -m actor`, whose loop waits for its turn before each step."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from benchmarks.trl.turns import ContenderTurns


def main() -> int:
    """Run the actor with the arguments of this process; return its exit code."""
    turns = ContenderTurns()

    from actor import __main__ as actor
    from actor import loop
    from python_backend.config import RunConfig
    from python_backend.store.jsonl import read_jsonl

    class InTurns(loop.PPORun):
        """A run that waits for its turn before each step, and reports the step's timers from metrics.jsonl."""

        def __init__(self, config: RunConfig, client: Any, ranks: Any = None) -> None:
            super().__init__(config, client, ranks)
            self._lines = config.run.dir / "metrics.jsonl"

        async def one_step(self, step: int, *, is_last: bool) -> None:
            await asyncio.to_thread(turns.begin)  # in a thread, so that the client's connections stay alive
            await super().one_step(step, is_last=is_last)
            line = read_jsonl(self._lines)[-1]
            prefix = "timers/"
            turns.phases = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
            turns.end(tokens=round(line["train_rollouts/generation_length"] * self.settings.rollout_size))

    loop.PPORun = InTurns  # type: ignore[misc]
    return actor.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
