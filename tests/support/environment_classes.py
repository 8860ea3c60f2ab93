"""Environments as users write them, and faulty ones. `Doing` does what its action says."""

import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path

from rlhf_triton import EnvironmentLost


class IncrementEnv:
    # TRL's documentation has this class, word for word (docs/source/grpo_trainer.md, "Environments").
    # Reserved methods
    def reset(self, **kwargs) -> str | None:  # required; called at the start of each rollout
        self.counter = 0
        self.target = random.randint(1, 6)  # self-sample the task
        return f"Increment the counter by {self.target}."  # returned string becomes the prompt

    def get_reward(self) -> float:  # optional: the environment scores itself from its own state
        return float(self.counter == self.target)

    # Public methods (exposed as tools)
    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Tools:
    """TRL's shape, async, with faulty tools and a `close`."""

    def __init__(self, log=os.devnull):
        self.log = log

    async def reset(self, target, **kwargs):
        """Begin without an observation; `kwargs` has the other columns."""
        self.target = target
        self.columns = sorted(kwargs)

    async def get_reward(self):
        """Return the row's target."""
        await asyncio.sleep(0)
        return self.target

    async def look(self, where: str, times: int = 1) -> str:
        """
        Look.

        Args:
            where: A place.
            times: How often.
        """
        await asyncio.sleep(0)
        return f"{where} {times} {self.columns}"

    def fail(self, how: str):
        """
        Fail.

        Args:
            how: A way to fail.
        """
        if how == "lost":
            raise EnvironmentLost("the sandbox is gone")
        return {"raise": lambda: {}["key"], "huge": lambda: "x" * 30000, "exit": lambda: os._exit(3)}[how]()

    def close(self):
        """Write that it was called."""
        with Path(self.log).open("a") as file:
            file.write("closed")


class Doing:
    """Does what an action says."""

    meeting = threading.Barrier(64)

    def __init__(self, first="hello", *, timeout_s):
        self.first = first
        self.timeout_s = timeout_s
        self.thread = threading.get_ident()

    def reset(self, row):
        """Return the option, after what the row says."""
        return self._act(row["do"]) if "do" in row else f"{self.first} {row.get('name')} {self.timeout_s:g}"

    def step(self, action):
        """Return the action with a reward of its length, unless it says something else."""
        result = self._act(action)
        return result if isinstance(result, tuple) else (result, len(action), action == "end")

    def _act(self, action):
        results = {
            "five": ("five", True, False, True, {}),
            "info": ("a start", {"difficulty": 1}),
            "two": ("two", 1.0),
            "number": (3, 1.0, False),
            "bytes": (b"x", 1.0, False),
            "text reward": ("a", "1.0", False),
            "nan": ("a", float("nan"), False),
            "no reward": ("a", None, False),
            "done": ("a", 1.0, 1),
            "huge": ("x" * 20001, 1.0, False),
            "surrogate": ("a\ud800", 1.0, False),
            "dict": {},
        }
        return results[action] if action in results else self._live(action)

    def _live(self, action):
        assert threading.get_ident() == self.thread
        actions = {
            "raise": lambda: int("no such move"),
            "stop": lambda: next(iter(())),
            "exit": sys.exit,
            "die": lambda: os._exit(3),
            "fork": os.fork,
            "memory": lambda: bytearray(1 << 40),
            "print": lambda: print("x" * 100),
            "no file": lambda: Path("/no/such/file").read_text(),
            "lost": lambda: (_ for _ in ()).throw(EnvironmentLost("the sandbox is gone")),
            "hang up": lambda: (_ for _ in ()).throw(ConnectionResetError("the server is gone")),
            "hang": lambda: time.sleep(3600),
            "meet": Doing.meeting.wait,
        }
        actions.get(action, lambda: None)()
        return str(os.getpid()) if action == "pid" else action


class Coroutines:
    """A class with coroutine methods, whose `step` waits until 64 have begun one."""

    arrived = 0
    all_are_here = asyncio.Event()

    async def reset(self, name, missing="default"):
        """Return the row's column."""
        await asyncio.sleep(0)
        return f"{name} {missing}"

    async def step(self, action):
        """Wait for the others."""
        Coroutines.arrived += 1
        if Coroutines.arrived == 64:
            self.all_are_here.set()
        await self.all_are_here.wait()
        return action, 0.5, True


def by_state(environments, target):
    """Score by an environment's state and the row's columns."""
    return [10.0 * target[0] + environments[0].target]


def two(environments, **columns):
    """Return a score too many."""
    return [1.0, 2.0]


class Countdown:
    """Ends after `turns` turns of the row; below 0, `reset` fails, or the first step."""

    def reset(self, row):
        """Return how many turns are left."""
        self.left = row["turns"]
        self.seed = row["seed"]
        if self.left == -1:
            raise ValueError(f"{self.left} turns")
        return f" {self.left} left, seed {self.seed}."

    def step(self, action):
        """Count; the last turn has a reward of 2, those before 0.5."""
        if self.left < 0:
            raise ValueError(f"{self.left} turns")
        self.left -= 1
        return f"{self.left} left after {action}", 0.5 if self.left else 2.0, not self.left


class Unplaced(Countdown):
    """Has no place on rank 1."""

    def __init__(self):
        if os.environ.get("RANK") == "1":
            raise ValueError("no place")


class Fragile(Countdown):
    """Loses its server in the first `losses` steps of its worker."""

    steps = 0

    def __init__(self, losses):
        self.losses = losses

    def step(self, action):
        """Count, or fail."""
        Fragile.steps += 1
        if Fragile.steps <= self.losses:
            raise EnvironmentLost("the server has hung up")
        return super().step(action)


class Logged(Countdown):
    """Writes a line for each step."""

    def __init__(self, log=os.devnull):
        self.log = log

    def step(self, action):
        """Reward an early end of the alphabet."""
        with Path(self.log).open("a") as file:
            file.write(f"{action!r}\n")
        observation, reward, done = super().step(action)
        return observation, reward * (len(action) < 5), done
