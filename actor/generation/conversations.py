"""Conversations of the policy with environments: coroutines on an event loop that has its own thread.

A conversation is a list of token ids as they were sampled or observed, which are never rendered again. The decoding
thread and the event loop exchange turns and observations; neither waits for the other while it has work.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_triton.actor.data.chat import Chat, ChatMessage, HistoryChanged, TemplateError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.actor.data.rollout_rows import Conversation, conversation_of
from rlhf_triton.actor.environments.pool import SEED, EnvironmentFailed, Environments, Instance
from rlhf_triton.actor.generation.row_sources import Jobs, NewRow, RowId, SamplingJob
from rlhf_triton.checkpoints.special_tokens import reply_text
from rlhf_triton.checkpoints.tokenization import encode_bare_text, without_embedding
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.errors import RlhfError
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY

logger = logging.getLogger(__name__)
NEW_ROW_WARNING = "%s: the conversation continues in another row of the same group"
RESTARTS = 2  # maximum restarts of a conversation whose environment is lost
MAX_INSTANCES = 256  # environments that are open at the same time


class TurnFailed(RlhfError):
    """A turn of the policy could not be sampled, for example because a server did not respond in time."""


@dataclass(frozen=True)
class _FinishedConversation:
    """A finished conversation, with its number."""

    number: int
    conversation: Conversation


# A row and its tokens before the next turn; a finished conversation; an error; None: from `wake`.
Arrival = tuple[RowId, Sequence[int]] | _FinishedConversation | BaseException | None


@dataclass(kw_only=True)
class _ConversationState:
    """A conversation in progress."""

    prompt: Prompt  # prompt of the current row
    row: RecordedRow = field(default_factory=RecordedRow)  # current row
    earlier_rows: list[tuple[Prompt, RecordedRow]] = field(default_factory=list)  # finished rows
    messages: list[ChatMessage] = field(default_factory=list)  # messages after the first row's prompt
    num_prompt_messages: int = 0  # how many of `messages` the current row's prompt contains
    truncated: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        self.row.observe(self.prompt.tokens.tolist())

    def start_row(self, prompt: Prompt) -> None:
        """Start a new row with this prompt; the current row is finished if it has turns."""
        if self.row.turns:
            self.earlier_rows.append((self.prompt, self.row))
        self.prompt = prompt
        self.row = RecordedRow()
        self.num_prompt_messages = len(self.messages)
        self.row.observe(prompt.tokens.tolist())

    def conversation(self) -> Conversation:
        """Return the conversation as its rows."""
        self.row.messages = self.messages
        rows = [*self.earlier_rows, (self.prompt, self.row)]
        return conversation_of(
            rows, truncated=self.truncated, error=self.error, num_prompt_messages=self.num_prompt_messages
        )


class ConversationRunner:
    """Runs conversations of the policy with this process's environments."""

    def __init__(
        self,
        settings: EnvironmentSection,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        vocab_size: int | None = None,
        lockstep: bool = False,
        hidden_variables: Sequence[str] = (),
        stop_strings: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        """Start the workers of the environments.

        Args:
            vocab_size: of the model's embeddings; None: tokens beyond them are not detected.
            lockstep: all rows wait for the slowest environment, so that the batches of decoding, and thus the last bits
                of log-probs, do not depend on the speed of environments.
            hidden_variables: environment variables that the workers do not inherit.
            stop_strings: strings that end a turn of the policy, unless within its first `min_new_tokens` tokens.

        Raises:
            RlhfError: the class of the environment cannot be used.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._stop_strings = {*stop_strings}
        self._min_new_tokens = min_new_tokens
        self._vocab_size = vocab_size
        self.longest = settings.max_tokens
        self.lockstep = lockstep
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()
        self._environments = Environments(settings, hidden_variables=hidden_variables)
        self.limit = asyncio.Semaphore(MAX_INSTANCES)
        try:
            self._call(self._environments.start())
            self._chat = Chat(tokenizer, self._environments.tools)
        except BaseException:
            self.close()
            raise

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemplateError if the policy's chat template cannot render conversations that start from the prompts."""
        are_chats = {MESSAGES_KEY in prompt.metadata for prompt in prompts}
        if self._chat.tools and False in are_chats:
            warn_once("text prompts do not show the environment's tools: describe the tools in the prompts")
        if True in are_chats:
            try:
                self._chat.check()
            except HistoryChanged as error:
                warn_once(NEW_ROW_WARNING % error)

    def close(self) -> None:
        """End all environments; no-op if they have ended."""
        if self._thread.is_alive():
            self._call(self._shutdown())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def _shutdown(self) -> None:
        await self._environments.close()

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise TemplateError if one of the tokens before a turn of the policy has no embedding."""
        if problem := without_embedding(self._tokenizer, tokens, self._vocab_size):
            raise TemplateError(f"the conversation cannot continue: {problem}")

    async def run(
        self, prompt: Prompt, seed: int, rows: "ConversationRows", *, may_restart: bool = False
    ) -> Conversation:
        """Run one conversation to its end and return it; an environment failure is recorded as its error.

        Args:
            seed: seed of the environment, equal for conversations with the same prompt.
            rows: samples the policy's turns.
            may_restart: raise EnvironmentFailed instead if the environment is lost.
        """
        state = _ConversationState(prompt=prompt)
        instance = None
        try:
            instance = await self._open(prompt, seed)
            first_prompt = self._first_prompt(prompt, instance.observation)
            self.check_tokens(first_prompt.tokens.tolist())
            state.start_row(first_prompt)
            await self._take_turns(state, instance, rows)
            state.row.add_reward(await instance.reward())
        except EnvironmentFailed as error:
            if error.is_lost and may_restart:
                raise
            state.error = str(error)
        except (TemplateError, TurnFailed) as error:
            state.error = str(error)
        finally:
            if instance is not None:
                await instance.close()
        return state.conversation()

    async def _open(self, prompt: Prompt, seed: int) -> Instance:
        """Return a new environment instance, reset with the prompt's columns. Raises EnvironmentFailed."""
        text = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
        return await self._environments.open({SEED: seed, **prompt.metadata, **text})

    async def _take_turns(self, state: _ConversationState, instance: Instance, rows: "ConversationRows") -> None:
        """Let policy and environment take turns until one of them or a limit ends the conversation."""
        settings = self._settings
        deadline = rows.clock() + self._settings.timeout_s
        for number in range(1, settings.max_turns + 1):
            turn = await rows.sample_turn(state.row.tokens)
            state.row.add_turn(turn, number=number)
            text = reply_text(self._tokenizer, turn.tokens)
            state.messages.append({"role": "assistant", "content": text})
            if not turn.ended:
                is_full = len(state.row.tokens) >= self.longest
                state.truncated = "environment.max_tokens" if is_full else "actor.generation.max_new_tokens"
                return
            answers = await self._answer(state, instance, text)
            state.messages += answers or ()
            if answers is None:
                return
            if number == settings.max_turns:
                state.truncated = "environment.max_turns"
                return
            following = self._next_tokens(state, turn, answers)
            row = following.tokens.tolist() if isinstance(following, Prompt) else [*state.row.tokens, *following]
            if len(row) >= self.longest:
                state.truncated = "environment.max_tokens"
            if rows.clock() > deadline:
                state.truncated = "environment.timeout_s"
            if state.truncated:
                return
            self.check_tokens(row)  # first, because log-probs are computed for failed conversations, too
            if isinstance(following, Prompt):
                rows.start_row()
                state.start_row(following)
            else:
                state.row.observe(following)

    async def _answer(self, state: _ConversationState, instance: Instance, text: str) -> list[ChatMessage] | None:
        """Return the environment's answers to a turn; None if it is done, or if the policy calls no tool."""
        if self._chat.tools is None:
            step = await instance.step(text)
            state.row.add_reward(step.reward)
            return None if step.done else [{"role": "user", "content": step.observation}]
        answers = []
        turn = state.row.turns[-1]
        tokens = state.row.tokens
        for call in self._chat.parse_calls(tokens[: turn.start], tokens[turn.start : turn.end]):
            result = call.error or await instance.call(call.name, call.arguments or {})
            answers.append({"role": "tool", "name": call.name, "content": result})
        return answers or None

    def _first_prompt(self, prompt: Prompt, observation: str | None) -> Prompt:
        """Return the prompt with the tools and the first observation. Raises EnvironmentFailed, TemplateError."""
        messages = prompt.metadata.get(MESSAGES_KEY)
        if messages is None:
            text = prompt.text + (observation or "")
            added = np.array(encode_bare_text(self._tokenizer, observation or ""), np.int64)
            first_prompt = replace(prompt, text=text, tokens=np.append(prompt.tokens, added))
        else:
            last = {**messages[-1], "content": messages[-1]["content"] + (observation or "")}
            first_prompt = self._chat_prompt(prompt, [*messages[:-1], last])
        if len(first_prompt.tokens) > self._max_prompt_tokens:
            raise EnvironmentFailed(
                f"the prompt has {len(first_prompt.tokens)} tokens with the environment's tools and first observation, "
                f"more than actor.prompts.max_tokens ({self._max_prompt_tokens})"
            )
        return first_prompt

    def _chat_prompt(self, prompt: Prompt, messages: list[ChatMessage]) -> Prompt:
        """Return the prompt with these messages. Raises TemplateError."""
        text = self._chat.prompt(messages)
        tokens = np.array(encode_bare_text(self._tokenizer, text), np.int64)
        metadata = {**prompt.metadata, **self._chat.options, MESSAGES_KEY: messages}
        return replace(prompt, text=text, tokens=tokens, metadata=metadata)

    def _next_tokens(
        self, state: _ConversationState, turn: PolicyTurn, answers: Sequence[ChatMessage]
    ) -> list[int] | Prompt:
        """Return the tokens between a turn and the next one, or a new row's prompt.

        The conversation needs a new row if the chat template changes earlier messages.
        """
        if MESSAGES_KEY not in state.prompt.metadata:
            return encode_bare_text(self._tokenizer, "".join(str(answer["content"]) for answer in answers))
        try:
            reply = str(state.messages[-1 - len(answers)]["content"])
            return self._chat.after_reply(answers, turn.tokens[-1], reply)
        except HistoryChanged as error:
            warn_once(NEW_ROW_WARNING % error)
        first = state.earlier_rows[0][0] if state.earlier_rows else state.prompt
        return self._chat_prompt(first, [*first.metadata[MESSAGES_KEY], *state.messages])

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()


def seed_of(seed: int, prompt: Prompt) -> int:
    """Return the 31-bit seed of the environments in all conversations that start from a prompt."""
    return int(np.random.SeedSequence([seed, zlib.crc32(prompt.prompt_id.encode())]).generate_state(1)[0] >> 1)


class ConversationSource:
    """Conversations with environments, as the source of the decoder's rows."""

    def __init__(self, runner: ConversationRunner) -> None:
        self.longest = runner.longest
        self._jobs = Jobs()
        self._runner = runner
        self._loop = runner.loop
        self._lockstep = runner.lockstep
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._turns: dict[RowId, asyncio.Future[PolicyTurn]] = {}  # awaited turns
        self._not_started = deque[int]()  # in this order they start, once there is room for their environments
        self._awaited = set[int]()
        self._tasks: dict[int, Future[None]] = {}

    @property
    def size(self) -> int:
        return len(self._jobs)

    def add(self, job: SamplingJob) -> None:
        """Also start a conversation for each prompt of this job."""
        prompts = self._jobs.add(job)
        self._not_started += prompts
        while self._not_started and self.size - len(self._not_started) < MAX_INSTANCES:
            self._awaited.add(self._not_started.popleft())
        for number, prompt in prompts.items():
            conversation = self._run_conversation(number, prompt, job.seed)
            self._tasks[number] = asyncio.run_coroutine_threadsafe(conversation, self._loop)

    def deliver(self, row: RowId, turn: PolicyTurn) -> None:
        """Hand a turn of the policy to its conversation; called by the decoding thread."""

        def set_turn() -> None:
            waiting = self._turns.pop(row)
            if not waiting.done():  # cancelled by `close`, or because an agent has disconnected
                waiting.set_result(turn)

        self._awaited.add(row.conversation)
        self._loop.call_soon_threadsafe(set_turn)

    def next_rows(self, *, wait: bool) -> list[NewRow]:
        """Return the rows that environments have answered, and report finished conversations; raises their errors."""
        ready: list[NewRow] = []
        while self.size:
            try:
                arrival = self._arrivals.get(block=bool(self._awaited) if self._lockstep else wait and not ready)
            except queue.Empty:
                break
            if arrival is None:
                break
            if isinstance(arrival, BaseException):
                raise arrival
            if isinstance(arrival, _FinishedConversation):
                self._awaited.discard(arrival.number)
                self._awaited |= {self._not_started.popleft()} if self._not_started else set()
                del self._tasks[arrival.number]
                ready = self._without(arrival.number, ready)
                self._jobs.finish(arrival.number, arrival.conversation)
                continue
            row = self._jobs.new_row(*arrival)
            ready.append(row)
            self._awaited.discard(row.id.conversation)
        return sorted(ready, key=lambda row: row.id) if self._lockstep else ready

    def _without(self, number: int, ready: Sequence[NewRow]) -> list[NewRow]:
        """Return the rows of other conversations; cancel the calls that an agent has left open."""
        abandoned = [row.id for row in ready if row.id.conversation == number]
        self._loop.call_soon_threadsafe(lambda: [self._turns.pop(row).cancel() for row in abandoned])
        return [row for row in ready if row.id.conversation != number]

    def wake(self) -> None:
        """End the wait of another thread in `next_rows`."""
        self._arrivals.put(None)

    def close(self) -> None:
        """Cancel the unfinished conversations and their environments; `next_rows` then raises CancelledError."""
        for task in [*self._tasks.values()]:
            task.cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the environments have ended
            self._loop.call_soon_threadsafe(lambda: [turn.cancel() for turn in self._turns.values()])  # for agents
        self._arrivals.put(asyncio.CancelledError())

    async def sample_turn(self, row: RowId, tokens: Sequence[int]) -> PolicyTurn:
        """Wait for the policy's next turn in a row, which has the tokens `tokens` so far, and return it."""
        turn = self._turns[row] = self._loop.create_future()
        self._arrivals.put((row, tokens))
        return await turn

    async def _run_conversation(self, index: int, prompt: Prompt, seed: int) -> None:
        rows = ConversationRows(self, index)
        restarts = 0
        conversation = None
        try:
            # Kept across restarts: in lockstep, all rows wait for this one, so freeing its slot would gain nothing.
            async with self._runner.limit:
                while conversation is None:
                    try:
                        may_restart = restarts < RESTARTS
                        environment_seed = seed_of(seed, prompt)
                        conversation = await self._runner.run(prompt, environment_seed, rows, may_restart=may_restart)
                    except EnvironmentFailed as error:
                        restarts += 1
                        logger.warning("a conversation restarts: %s", error)
                    rows.start_row()
            finished_rows = tuple(replace(row, restarts=restarts) for row in conversation)
            self._arrivals.put(_FinishedConversation(index, finished_rows))
        except BaseException as error:  # thread edge: the decoding thread raises it
            self._arrivals.put(error)
            raise


class ConversationRows:
    """Samples the policy's turns in the rows of one conversation."""

    def __init__(self, source: ConversationSource, conversation: int) -> None:
        self._source = source
        self._row = RowId(0, conversation)
        self.failure = ""
        """Why a turn could not be sampled; empty if none has failed."""
        self._num_waiting = 0  # turns that the policy is sampling
        self._waiting_since = 0.0
        self._waited_s = 0.0  # total time in which the conversation waited for the policy

    def clock(self) -> float:
        """Return the conversation's clock in seconds; it stops while the conversation waits for the policy."""
        return (self._waiting_since if self._num_waiting else time.monotonic()) - self._waited_s

    async def sample_turn(self, tokens: Sequence[int]) -> PolicyTurn:
        """Return the policy's turn after the `tokens` of the current row.

        Calls may overlap if each one has its own row.

        Raises TurnFailed if this turn, or an earlier one of the conversation, could not be sampled.
        """
        if self.failure:
            raise TurnFailed(self.failure)
        if not self._num_waiting:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            turn = await self._source.sample_turn(self._row, tokens)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._waited_s += time.monotonic() - self._waiting_since
        if turn.error:
            self.failure = turn.error
            raise TurnFailed(turn.error)
        return turn

    def start_row(self) -> None:
        """Start a new row, which the later turns extend."""
        self._row = RowId(self._row.number + 1, self._row.conversation)
