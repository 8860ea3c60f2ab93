"""Agents as environments: programs in worker processes that call the policy over HTTP while it generates."""

import asyncio
import math
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette

from rlhf_triton.actor.capture.app import capture_routes
from rlhf_triton.actor.capture.http import HttpError, refused
from rlhf_triton.actor.capture.sessions import CapturedRow, Sampling, SessionLimits, Sessions
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.actor.data.rollout_rows import Conversation, conversation_of
from rlhf_triton.actor.environments.pool import EnvironmentFailed
from rlhf_triton.actor.generation.conversations import MAX_INSTANCES, ConversationRows, ConversationRunner, TurnFailed
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.sample import MESSAGES_KEY


class CapturedAgents(ConversationRunner):
    """Runs this process's agents; each has a session of an HTTP server on loopback, which samples with the decoder.

    Every call is a separate row in the decoder. The run decides how replies are sampled, not the requests.
    """

    _serving: Future[None] | None = None

    def __init__(self, settings: EnvironmentSection, tokenizer: Any, **options: Any) -> None:
        """Start the workers and the server; arguments and errors as in `ConversationRunner`, but `lockstep` is off."""
        super().__init__(settings, tokenizer, **{**options, "lockstep": False})
        self._rows: dict[str, ConversationRows] = {}
        limits = SessionLimits(settings.max_tokens, settings.max_turns, counts_shared=False)
        self._sessions = Sessions(tokenizer, limits, most=MAX_INSTANCES, idle_s=math.inf)
        routes = capture_routes(
            self._sessions, self, model="policy", max_tokens=settings.max_tokens, min_tokens=self._min_new_tokens
        )
        app = Starlette(routes=routes, exception_handlers={RlhfError: refused})
        config = uvicorn.Config(app, "127.0.0.1", 0, log_config=None, log_level="warning", lifespan="off")
        bound = config.bind_socket()
        self._server = uvicorn.Server(config)
        self._url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([bound]), self.loop)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """No-op: `Sessions` checked the chat template when it was created."""

    async def _shutdown(self) -> None:
        await super()._shutdown()  # first, because the server waits for the agents' connections
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wrap_future(self._serving)

    async def sample(self, session: str, tokens: list[int], sampling: Sampling) -> PolicyTurn:
        """Return the policy's reply, sampled with the run's settings.

        Raises HttpError if the agent or the rollout has ended, a reply could not be sampled, or for stop strings that
        the run does not have; TemplateError if a token has no embedding.
        """
        if session not in self._rows:
            raise HttpError(404, f"session {session} is over: its agent has ended")
        if unknown := [stop for stop in sampling.stop if stop not in self._stop_strings]:
            problem = "must be in actor.generation.stop_strings, because the run decides what ends a reply"
            raise HttpError(400, f"stop: {unknown} {problem}", "stop")
        self.check_tokens(tokens)
        try:
            self._rows[session].start_row()  # each call has its own row
            return await self._rows[session].sample_turn(tokens)
        except TurnFailed as error:
            raise HttpError(404, f"session {session} is over: {error}") from error
        except asyncio.CancelledError as error:
            raise HttpError(409, f"session {session} is over: the rollout was interrupted") from error

    async def run(
        self, prompt: Prompt, seed: int, rows: ConversationRows, *, may_restart: bool = False
    ) -> Conversation:
        """Run one agent to its end; return all of its conversations with the policy as rows of one conversation."""
        name = uuid.uuid4().hex
        instance = None
        reward = None
        failed = None
        truncated = ""
        self._rows[name] = rows
        deadline = math.inf  # until a worker, which may have to be started, has taken the agent
        try:
            instance = await self._open(prompt, seed)
            deadline = rows.clock() + self._settings.timeout_s
            reward = (await instance.step(f"{self._url}/sessions/{name}/v1", rows.clock)).reward
        except EnvironmentFailed as failure:
            failed = failure
        finally:
            if rows.clock() > deadline:
                truncated = "environment.timeout_s"
            del self._rows[name]
            session = self._sessions.end(name)
            if instance is not None:
                await instance.close()
        if session is not None and session.limit:
            truncated = f"environment.{session.limit}"
        if failed is not None and failed.is_lost and may_restart and not truncated:
            raise failed
        error = rows.failure or ("" if failed is None or truncated else str(failed))
        if session is None or not session.calls:
            error = rows.failure or str(failed or f"{self._settings.agent}: ended without a reply from the policy")
            empty = RecordedRow()
            empty.observe(prompt.tokens.tolist())
            return conversation_of([(prompt, empty)], error=error)
        last = session.calls[-1]
        last.reward += reward or 0.0
        if not last.sampled.ended and not truncated and not error:
            truncated = "actor.generation.max_new_tokens"
        rows_in_order = sorted(session.rows(), key=lambda row: last in row.calls)  # the row of the last call is last
        rows_with_prompts = [(self._prompt(prompt, row), row) for row in rows_in_order]
        return conversation_of(rows_with_prompts, truncated=truncated, error=error)

    def _prompt(self, prompt: Prompt, row: CapturedRow) -> Prompt:
        """Return a row's prompt: what the policy saw before its first reply. Removes its messages from the row."""
        first = row.calls[-1].path[0]
        row.messages = row.messages[len(first.messages) :]
        return Prompt(
            prompt.prompt_id,
            self._tokenizer.decode(first.before),
            np.array(first.before, np.int64),
            {**prompt.metadata, **first.options, MESSAGES_KEY: [*first.messages]},
        )
