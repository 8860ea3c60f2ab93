"""Conversations of the policy with environments: each is a coroutine in a thread of its own event loop.

A conversation is a list of token ids, as they were sampled or observed; nothing is ever rendered again. The decoding
thread and the event loop exchange turns and observations, and neither waits for the other as long as it has work.
"""

import asyncio
import queue
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actor.data.chat import Chat, Message, TemplateError, tool_calls
from actor.data.rollout import Prompt, SampledTurn, Trajectory
from actor.generation.slots import Finished, Response
from python_backend.config.environment import EnvironmentSection
from python_backend.environments.pool import EnvironmentFailed, Environments, Instance
from python_backend.rewards.function import MESSAGES_KEY, PROMPT_KEY

SEED = "seed"  # column that environments receive, equal for all responses to a prompt
Arrival = tuple[int, Sequence[int] | None] | BaseException


@dataclass
class _Talk:
    """The conversation of one row so far."""

    prompt: Prompt
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    observed: list[bool] = field(default_factory=list)  # of the environment, not of the policy
    logprobs: list[float] = field(default_factory=list)
    turns: list[SampledTurn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    truncated: str = ""
    error: str = ""

    @property
    def length(self) -> int:
        """Tokens of the row so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    def add(self, turn: Response) -> None:
        """Append what the policy has sampled."""
        start = self.length
        self.tokens += turn.tokens
        self.observed += [False] * len(turn.tokens)
        self.logprobs += turn.logprobs or []
        self.turns.append(SampledTurn(start, self.length, tokens=tuple(turn.tokens)))

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens that are not the policy's."""
        self.tokens += tokens
        self.observed += [True] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def reward(self, amount: float | None) -> None:
        """Add to the reward of the last turn."""
        if self.turns and amount is not None:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + amount)

    def response(self) -> Response:
        """Return the conversation as the response to its prompt."""
        trajectory = Trajectory(tuple(self.turns), tuple(self.messages), self.truncated, self.error)
        logprobs = self.logprobs if len(self.logprobs) == len(self.tokens) else None
        ended = bool(self.turns) and not self.truncated and not self.error
        return Response(self.tokens, ended, logprobs, self.prompt, self.observed, trajectory)


class Agent:
    """The environments of this process, and how the policy talks with them."""

    def __init__(
        self,
        settings: EnvironmentSection,
        tokenizer: Any,
        *,
        max_prompt_tokens: int,
        in_step: bool = False,
        hidden_variables: Sequence[str] = (),
    ) -> None:
        """Start the workers of the environments.

        Args:
            in_step: all rows wait for the slowest environment, so that what is decoded together, and with it the last
                bits of log-probs, does not depend on how fast environments are.
            hidden_variables: environment variables that the workers do not inherit.

        Raises:
            RlhfError: the class of the environment cannot be used.
        """
        self._settings, self._tokenizer, self._max_prompt_tokens = settings, tokenizer, max_prompt_tokens
        self.longest, self.in_step = settings.max_tokens, in_step
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="environments", daemon=True)
        self._thread.start()
        self._environments = Environments(settings, hidden_variables=hidden_variables)
        self._limit = asyncio.Semaphore(settings.concurrent)
        try:
            self._call(self._environments.start())
            self._chat = Chat(tokenizer, self._environments.tools)
        except BaseException:
            self.close()
            raise

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemplateError if a conversation about one of the prompts could not be continued as it was sampled."""
        if any(MESSAGES_KEY in prompt.metadata for prompt in prompts):
            self._chat.check()

    def begin(self, prompts: Mapping[int, Prompt], finished: Finished, *, seed: int) -> "Talks":
        """Begin the conversations of some rows; `finished` receives each one when it is over."""
        return Talks(self, prompts, finished, seed=seed)

    def close(self) -> None:
        """End all environments, once."""
        if self._thread.is_alive():
            self._call(self._environments.close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def talk(
        self, prompt: Prompt, seed: int, sampled: Callable[[Sequence[int]], Awaitable[Response]]
    ) -> Response:
        """Lead one conversation to its end; a failure of the environment is recorded in it.

        Args:
            seed: for the environment; conversations about the same prompt have the same one.
            sampled: returns the policy's turn behind the tokens that it receives, which follow those before.
        """
        talk, instance = _Talk(prompt), None
        shown = {} if MESSAGES_KEY in prompt.metadata else {PROMPT_KEY: prompt.text}
        async with self._limit:
            try:
                instance = await self._environments.open({SEED: seed, **prompt.metadata, **shown})
                talk.prompt = self._begun(prompt, instance.observation)
                await self._turns(talk, instance, sampled)
                talk.reward(await instance.reward())
            except (EnvironmentFailed, TemplateError) as error:
                talk.error = str(error)
            finally:
                if instance is not None:
                    await instance.close()
        return talk.response()

    async def _turns(
        self, talk: _Talk, instance: Instance, sampled: Callable[[Sequence[int]], Awaitable[Response]]
    ) -> None:
        """Let policy and environment take turns until one of them ends the conversation, or a limit."""
        settings, deadline = self._settings, time.monotonic() + self._settings.timeout_s
        before: Sequence[int] = talk.prompt.tokens.tolist()
        for number in range(1, settings.max_turns + 1):
            turn = await sampled(before)
            talk.add(turn)
            text = self._tokenizer.decode(turn.tokens, skip_special_tokens=True)
            talk.messages.append({"role": "assistant", "content": text})
            if not turn.ended:
                talk.truncated = (
                    "environment.max_tokens" if talk.length >= self.longest else "actor.generation.max_new_tokens"
                )
                return
            answers = await self._answers(talk, instance, text)
            talk.messages += answers or ()
            if answers is None:
                return
            if number == settings.max_turns:
                talk.truncated = "environment.max_turns"
                return
            before = self._after(talk, turn, answers)
            if talk.length + len(before) >= self.longest:
                talk.truncated = "environment.max_tokens"
            if time.monotonic() > deadline:
                talk.truncated = "environment.timeout_s"
            if talk.truncated:
                return
            talk.observe(before)

    async def _answers(self, talk: _Talk, instance: Instance, text: str) -> list[Message] | None:
        """Return the environment's answers to a turn; None at its end, or where the policy calls no tool."""
        if self._chat.tools is None:
            step = await instance.step(text)
            talk.reward(step.reward)
            return None if step.done else [{"role": "user", "content": step.observation}]
        answers = []
        for call in tool_calls(text):
            result = call.error or await instance.call(call.name, call.arguments or {})
            answers.append({"role": "tool", "name": call.name, "content": result})
        return answers or None

    def _begun(self, prompt: Prompt, observation: str | None) -> Prompt:
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
            begun = replace(prompt, text=text, tokens=tokens, metadata={**prompt.metadata, MESSAGES_KEY: messages})
        if len(begun.tokens) > self._max_prompt_tokens:
            raise EnvironmentFailed(
                f"the prompt has {len(begun.tokens)} tokens with the environment's first observation, more than "
                f"actor.prompts.max_tokens ({self._max_prompt_tokens})"
            )
        return begun

    def _after(self, talk: _Talk, turn: Response, answers: Sequence[Message]) -> list[int]:
        """Return the tokens between a turn and the next one."""
        if MESSAGES_KEY in talk.prompt.metadata:
            return self._chat.after_reply(answers, turn.tokens[-1])
        text = "".join(str(answer["content"]) for answer in answers)
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()


def seed_of(seed: int, prompt: Prompt) -> int:
    """Return a 31-bit seed for the environments of the responses to a prompt."""
    return int(np.random.SeedSequence([seed, zlib.crc32(prompt.prompt_id.encode())]).generate_state(1)[0] >> 1)


class Talks:
    """Partner of the decoder: the conversations of one rollout."""

    def __init__(self, agent: Agent, prompts: Mapping[int, Prompt], finished: Finished, *, seed: int) -> None:
        self.size, self.longest = len(prompts), agent.longest
        self._loop, self._finished = agent.loop, finished
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._turns: dict[int, asyncio.Future[Response]] = {}
        self._done: dict[int, Response] = {}
        self._missing = set(prompts)
        self._awaited, self._in_step = set(prompts), agent.in_step
        self._talks = [
            asyncio.run_coroutine_threadsafe(self._talk(agent, index, prompt, seed), self._loop)
            for index, prompt in prompts.items()
        ]

    def take(self, index: int, turn: Response) -> bool:
        """Hand a turn of the policy to its conversation, which may go on."""

        def deliver() -> None:
            waiting = self._turns.pop(index)
            if not waiting.done():  # cancelled by `close`
                waiting.set_result(turn)

        self._awaited.add(index)
        self._loop.call_soon_threadsafe(deliver)
        return True

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int] | None]]:
        """Return what has arrived from environments, and report conversations that are over; raises their errors."""
        found: list[tuple[int, Sequence[int] | None]] = []
        while self._missing:
            try:
                arrival = self._arrivals.get(block=bool(self._awaited) if self._in_step else wait and not found)
            except queue.Empty:
                break
            if isinstance(arrival, BaseException):
                raise arrival
            found.append(arrival)
            self._awaited.discard(arrival[0])
            if arrival[1] is None:
                self._missing.remove(arrival[0])
                self._finished(arrival[0], self._done.pop(arrival[0]))
        return sorted(found, key=lambda each: each[0]) if self._in_step else found

    def close(self) -> None:
        """End the conversations that are not over, and their environments; `next` then raises CancelledError."""
        for talk in self._talks:
            talk.cancel()
        self._arrivals.put(asyncio.CancelledError())

    async def sampled(self, index: int, before: Sequence[int]) -> Response:
        """Return the policy's next turn in row `index`, behind the tokens `before`."""
        turn = self._turns[index] = self._loop.create_future()
        self._arrivals.put((index, before))
        return await turn

    async def _talk(self, agent: Agent, index: int, prompt: Prompt, seed: int) -> None:
        try:
            own_seed = seed_of(seed, prompt)
            self._done[index] = await agent.talk(prompt, own_seed, lambda before: self.sampled(index, before))
            self._arrivals.put((index, None))
        except BaseException as error:  # thread edge: the decoding thread raises it
            self._arrivals.put(error)
            raise
