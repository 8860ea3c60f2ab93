"""An agent function as an environment with a single step, whose action is the base URL of the policy."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlhf_triton.user_code import import_function

imported = functools.cache(import_function)


class AgentRun:
    """One run of an agent function `run(base_url, task, **options)`, which returns a reward or None."""

    def __init__(self, run: str, **options: Any) -> None:
        self._run: Callable[..., Any] = imported(run)
        inspect.signature(self._run).bind("", {}, **options)
        self._options = options

    def reset(self, row: Mapping[str, Any]) -> None:
        """Store the task; the agent itself starts the conversation."""
        self._row = row

    def step(self, action: str) -> Any:
        """Run the agent to its end; `action`: the base URL of the policy."""
        outcome = self._run(action, dict(self._row), **self._options)
        return _awaited(outcome) if inspect.isawaitable(outcome) else ("", outcome, True)


async def _awaited(outcome: Awaitable[Any]) -> tuple[str, Any, bool]:
    return "", await outcome, True
