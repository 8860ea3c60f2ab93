"""Conversations of the policy with environments: each is a coroutine in a thread of its own event loop.

A conversation is a list of token ids, as they were sampled or observed; nothing is ever rendered again. The decoding
thread and the event loop exchange turns and observations, and neither waits for the other as long as it has work.
"""

import asyncio
import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhf_triton.actor.data.chat import Chat, HistoryChanged, Message, TemplateError
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.actor.data.sample import Conversation, conversation_of
from rlhf_triton.actor.environments.pool import SEED, EnvironmentFailed, Environments, Instance
from rlhf_triton.actor.generation.slots import Finished
from rlhf_triton.checkpoints.tokenization import reply_text, without_embedding
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.rewards.function import MESSAGES_KEY, PROMPT_KEY
from rlhf_triton.wire.chats import warn_once

logger = logging.getLogger(__name__)
ANOTHER_ROW = "%s: the conversation continues in another row of the same group"
RESTARTS = 2  # of a conversation whose environment is lost
MAX_INSTANCES = 256  # of environments at the same time
ROW_STEP = 1 << 32  # between the numbers of a conversation's rows, of which the first is the prompt's index


@dataclass(frozen=True)
class _FinishedConversation:
    """A conversation that is over."""

    index: int
    conversation: Conversation


# A row's number and its tokens before the next turn; a conversation that is over; or its error.
Arrival = tuple[int, Sequence[int]] | _FinishedConversation | BaseException


@dataclass
class _Conversation:
    """A conversation so far."""

    prompt: Prompt  # of the row
    row: RecordedRow = field(default_factory=RecordedRow)
    before: list[tuple[Prompt, RecordedRow]] = field(default_factory=list)  # rows that do not go on
    messages: list[Message] = field(default_factory=list)  # behind the prompt of the first row
    known: int = 0  # how many of them the row's prompt has
    truncated: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        self.row.observe(self.prompt.tokens.tolist())

    def begin(self, prompt: Prompt) -> None:
        """Begin a row."""
        if self.row.turns:
            self.before.append((self.prompt, self.row))
        self.prompt, self.row, self.known = prompt, RecordedRow(), len(self.messages)
        self.row.observe(prompt.tokens.tolist())

    def conversation(self) -> Conversation:
        """Return the rows of the conversation."""
        self.row.messages = self.messages
        rows = [*self.before, (self.prompt, self.row)]
        return conversation_of(rows, truncated=self.truncated, error=self.error, known=self.known)


class Agent:
    """The environments of this process, and how the policy talks with them."""

    def __init__(
        self,
        settings: EnvironmentSection,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        vocab_size: int | None = None,
        in_step: bool = False,
        hidden_variables: Sequence[str] = (),
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Start the workers of the environments.

        Args:
            vocab_size: of the model's embeddings; None: tokens beyond them are not detected.
            in_step: all rows wait for the slowest environment, so that what is decoded together, and with it the last
                bits of log-probs, does not depend on how fast environments are.
            hidden_variables: environment variables that the workers do not inherit.
            stop_strings: what ends a turn of the policy.

        Raises:
            RlhfError: the class of the environment cannot be used.
        """
        self._settings, self._tokenizer, self._max_prompt_tokens = settings, tokenizer, max_prompt_tokens
        self._stop_strings, self._vocab_size = {*stop_strings}, vocab_size
        self.longest, self.in_step = settings.max_tokens, in_step
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
        """Raise TemplateError if the policy's chat template cannot render conversations about the prompts."""
        are_chats = {MESSAGES_KEY in prompt.metadata for prompt in prompts}
        if self._chat.tools and False in are_chats:
            warn_once("prompts that are texts do not show the environment's tools: describe them there")
        if True in are_chats:
            try:
                self._chat.check()
            except HistoryChanged as error:
                warn_once(ANOTHER_ROW % error)

    def close(self) -> None:
        """End all environments, once."""
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
            raise TemplateError(f"what the policy would read: {problem}")

    async def talk(self, prompt: Prompt, seed: int, rows: "TalkRows", *, may_restart: bool = False) -> Conversation:
        """Run one conversation to its end; an environment failure is recorded in it.

        Args:
            seed: for the environment; conversations about the same prompt have the same one.
            may_restart: raise EnvironmentFailed instead if the environment is lost.
        """
        talk, instance = _Conversation(prompt), None
        try:
            instance = await self._open(prompt, seed)
            talk.begin(self._first_prompt(prompt, instance.observation))
            await self._turns(talk, instance, rows)
            talk.row.reward(await instance.reward())
        except EnvironmentFailed as error:
            if error.is_lost and may_restart:
                raise
            talk.error = str(error)
        except TemplateError as error:
            talk.error = str(error)
        finally:
            if instance is not None:
                await instance.close()
        return talk.conversation()

    async def _open(self, prompt: Prompt, seed: int) -> Instance:
        """Return an instance of the environment that has received the prompt's columns. Raises EnvironmentFailed."""
        shown = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
        return await self._environments.open({SEED: seed, **prompt.metadata, **shown})

    async def _turns(self, talk: _Conversation, instance: Instance, rows: "TalkRows") -> None:
        """Let policy and environment take turns until one of them ends the conversation, or a limit."""
        settings, deadline = self._settings, rows.clock() + self._settings.timeout_s
        for number in range(1, settings.max_turns + 1):
            turn = await rows.sampled(talk.row.tokens)
            talk.row.sample(turn, number=number)
            text = reply_text(self._tokenizer, turn.tokens)
            talk.messages.append({"role": "assistant", "content": text})
            if not turn.ended:
                is_full = len(talk.row.tokens) >= self.longest
                talk.truncated = "environment.max_tokens" if is_full else "actor.generation.max_new_tokens"
                return
            answers = await self._answers(talk, instance, text)
            talk.messages += answers or ()
            if answers is None:
                return
            if number == settings.max_turns:
                talk.truncated = "environment.max_turns"
                return
            before, another = self._tokens_between_turns(talk, turn, answers)
            length = len(before) if another else len(talk.row.tokens) + len(before)
            if length >= self.longest:
                talk.truncated = "environment.max_tokens"
            if rows.clock() > deadline:
                talk.truncated = "environment.timeout_s"
            if talk.truncated:
                return
            if another is None:
                talk.row.observe(before)
            else:
                rows.renew()
                talk.begin(another)

    async def _answers(self, talk: _Conversation, instance: Instance, text: str) -> list[Message] | None:
        """Return the environment's answers to a turn; None at its end, or where the policy calls no tool."""
        if self._chat.tools is None:
            step = await instance.step(text)
            talk.row.reward(step.reward)
            return None if step.done else [{"role": "user", "content": step.observation}]
        answers = []
        turn = talk.row.turns[-1]
        for call in self._chat.calls(talk.row.tokens[: turn.start], turn.tokens):
            result = call.error or await instance.call(call.name, call.arguments or {})
            answers.append({"role": "tool", "name": call.name, "content": result})
        return answers or None

    def _first_prompt(self, prompt: Prompt, observation: str | None) -> Prompt:
        """Return the prompt with the tools and the first observation. Raises EnvironmentFailed, TemplateError."""
        messages = prompt.metadata.get(MESSAGES_KEY)
        if messages is None:
            text = prompt.text + (observation or "")
            added = self._tokenizer(observation or "", add_special_tokens=False)["input_ids"]
            begun = replace(prompt, text=text, tokens=np.append(prompt.tokens, np.array(added, np.int64)))
        else:
            last = {**messages[-1], "content": messages[-1]["content"] + (observation or "")}
            text = self._chat.prompt(messages := [*messages[:-1], last])
            tokens = np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
            metadata = {**prompt.metadata, **self._chat.options, MESSAGES_KEY: messages}
            begun = replace(prompt, text=text, tokens=tokens, metadata=metadata)
        if len(begun.tokens) > self._max_prompt_tokens:
            raise EnvironmentFailed(
                f"the prompt has {len(begun.tokens)} tokens with the environment's tools and first observation, more "
                f"than actor.prompts.max_tokens ({self._max_prompt_tokens})"
            )
        return begun

    def _tokens_between_turns(
        self, talk: _Conversation, turn: PolicyTurn, answers: Sequence[Message]
    ) -> tuple[list[int], Prompt | None]:
        """Return the tokens between a turn and the next one, and the prompt of another row if these begin one."""
        if MESSAGES_KEY not in talk.prompt.metadata:
            text = "".join(str(answer["content"]) for answer in answers)
            return [*self._tokenizer(text, add_special_tokens=False)["input_ids"]], None
        try:
            said = str(talk.messages[-1 - len(answers)]["content"])
            return self._chat.after_reply(answers, turn.tokens[-1], said), None
        except HistoryChanged as error:
            warn_once(ANOTHER_ROW % error)
        first = talk.before[0][0] if talk.before else talk.prompt
        whole = [*first.metadata[MESSAGES_KEY], *talk.messages]
        text = self._chat.prompt(whole)
        tokens = [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        metadata = {**first.metadata, MESSAGES_KEY: whole}
        return tokens, replace(first, text=text, tokens=np.array(tokens, np.int64), metadata=metadata)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()


def seed_of(seed: int, prompt: Prompt) -> int:
    """Return a 31-bit seed for the environments of the responses to a prompt."""
    return int(np.random.SeedSequence([seed, zlib.crc32(prompt.prompt_id.encode())]).generate_state(1)[0] >> 1)


class Talks:
    """Partner of the decoder: the conversations of one rollout."""

    def __init__(self, agent: Agent, prompts: Mapping[int, Prompt], finished: Finished, *, seed: int) -> None:
        """Begin the conversations of some rows; `finished` receives each one when it is over."""
        self.size, self.longest = len(prompts), agent.longest
        self._loop, self._finished = agent.loop, finished
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._turns: dict[int, asyncio.Future[PolicyTurn]] = {}  # by the row's number
        self._missing = set(prompts)
        self._in_step = agent.in_step
        self._later = deque(prompts)  # they begin in this order, when there is room for their environments
        self._awaited = {self._later.popleft() for _ in range(min(MAX_INSTANCES, len(prompts)))}
        self._talks = [
            asyncio.run_coroutine_threadsafe(self._run_conversation(agent, index, prompt, seed), self._loop)
            for index, prompt in prompts.items()
        ]

    def take(self, index: int, turn: PolicyTurn) -> None:
        """Hand a turn of the policy to its conversation."""

        def deliver() -> None:
            waiting = self._turns.pop(index)
            if not waiting.done():  # cancelled by `close`, or because an agent has hung up
                waiting.set_result(turn)

        self._awaited.add(index % ROW_STEP)
        self._loop.call_soon_threadsafe(deliver)

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int]]]:
        """Return what has arrived from environments, and report conversations that are over; raises their errors."""
        found: list[tuple[int, Sequence[int]]] = []
        while self._missing:
            try:
                arrival = self._arrivals.get(block=bool(self._awaited) if self._in_step else wait and not found)
            except queue.Empty:
                break
            if isinstance(arrival, BaseException):
                raise arrival
            if isinstance(arrival, _FinishedConversation):
                self._missing.remove(arrival.index)
                self._awaited.discard(arrival.index)
                self._awaited |= {self._later.popleft()} if self._later else set()
                self._finished(arrival.index, arrival.conversation)
                continue
            found.append(arrival)
            self._awaited.discard(arrival[0] % ROW_STEP)
        return sorted(found, key=lambda each: each[0]) if self._in_step else found

    def close(self) -> None:
        """End the conversations that are not over, and their environments; `next` then raises CancelledError."""
        for talk in self._talks:
            talk.cancel()
        self._loop.call_soon_threadsafe(lambda: [turn.cancel() for turn in self._turns.values()])  # of agents, too
        self._arrivals.put(asyncio.CancelledError())

    async def sampled(self, row: int, tokens: Sequence[int]) -> PolicyTurn:
        """Return the policy's next turn in a row, behind its `tokens`."""
        turn = self._turns[row] = self._loop.create_future()
        self._arrivals.put((row, tokens))
        return await turn

    async def _run_conversation(self, agent: Agent, index: int, prompt: Prompt, seed: int) -> None:
        rows = TalkRows(self, index, agent.check_tokens)
        restarts = 0
        found = None
        try:
            # Kept across restarts: in step, all rows wait for this one, so freeing its slot would gain nothing.
            async with agent.limit:
                while found is None:
                    try:
                        may_restart = restarts < RESTARTS
                        found = await agent.talk(prompt, seed_of(seed, prompt), rows, may_restart=may_restart)
                    except EnvironmentFailed as error:
                        restarts += 1
                        logger.warning("a conversation begins again: %s", error)
                    rows.renew()
            self._arrivals.put(_FinishedConversation(index, tuple(replace(row, restarts=restarts) for row in found)))
        except BaseException as error:  # thread edge: the decoding thread raises it
            self._arrivals.put(error)
            raise


class TalkRows:
    """The rows of one conversation."""

    def __init__(self, talks: Talks, index: int, check_tokens: Callable[[Sequence[int]], None]) -> None:
        self._talks, self._row = talks, index
        self._check_tokens = check_tokens
        self._asked, self._since, self._waited = 0, 0.0, 0.0

    def clock(self) -> float:
        """Return the conversation's clock in seconds; it stops while the conversation waits for the policy."""
        return (self._since if self._asked else time.monotonic()) - self._waited

    async def sampled(self, tokens: Sequence[int]) -> PolicyTurn:
        """Return the policy's turn behind the `tokens` of the row. Raises TemplateError.

        Rows of which each has one turn may be sampled at the same time.
        """
        self._check_tokens(tokens)
        if not self._asked:
            self._since = time.monotonic()
        self._asked += 1
        try:
            return await self._talks.sampled(self._row, tokens)
        finally:
            self._asked -= 1
            if not self._asked:
                self._waited += time.monotonic() - self._since

    def renew(self) -> None:
        """Start another row."""
        self._row += ROW_STEP
