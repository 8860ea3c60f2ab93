"""The game of `make demo-agent`: a sum, three tries, and a hint after each wrong one.

As a program, `python sums_game.py GAMES PORT`, it is an OpenEnv server, which needs `openenv` in its own environment.
"""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

TRIES = 3


@functools.cache
def read_games(path: str) -> dict[str, list[str]]:
    """Return question and answer of each game, by its seed."""
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


class SumsGame:
    """One game."""

    def __init__(self, games: str) -> None:
        """`games`: a JSON object with question and answer of each seed."""
        self.games = read_games(games)

    def reset(self, row: dict[str, Any]) -> str:
        """Return the question of the row's seed."""
        self.question, self.answer = self.games[str(row["seed"])]
        self.left = TRIES
        return self.question

    def step(self, action: str) -> tuple[str, float, bool]:
        """Compare the last number of a reply with the answer; return a hint, 1 for the right answer, and the end."""
        self.left -= 1
        numbers = re.findall(r"-?\d{1,9}", action)
        if numbers and int(numbers[-1]) == int(self.answer):
            return "That is right.", 1.0, True
        if not numbers:
            hint = "I see no number."
        else:
            hint = f"{numbers[-1]} is too {'low' if int(numbers[-1]) < int(self.answer) else 'high'}."
        return f"{hint} Try again: {self.question.rpartition(': ')[2]}", 0.0, self.left == 0


def serve(games: str, port: int) -> None:
    """Serve games to any number of sessions."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State

    class Reply(Action):
        message: str

    class Shown(Observation):
        text: str

    class Served(Environment[Reply, Shown, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
            self.game = SumsGame(games)
            return Shown(text=self.game.reset({"seed": seed}))

        def step(self, action: Reply, timeout_s: float | None = None, **_: Any) -> Shown:
            text, reward, done = self.game.step(action.message)
            return Shown(text=text, reward=reward, done=done)

    concurrency = ConcurrencyConfig(max_concurrent_envs=1024)
    app = create_fastapi_app(Served, Reply, Shown, concurrency_config=concurrency)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
