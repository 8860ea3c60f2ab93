"""Sessions of agents: a tree of calls, each with the tokens that the policy saw and sampled, never rendered again."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.actor.data.chat import Chat, Message, TemplateError
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.wire.chats import TOOLS, warn_once

logger = logging.getLogger(__name__)
MOST_ENDED = 100_000  # names that are remembered


@dataclass(frozen=True)
class Sampling:
    """How a request wants its reply to be sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # the first of them to occur ends the reply


class Sampler(Protocol):
    """Samples from the policy."""

    async def sample(self, session: str, tokens: list[int], sampling: Sampling) -> PolicyTurn:
        """Sample a continuation of `tokens`, at least one; cancelling the call stops generation.

        `session`: calls with the same one share a prefix of their tokens.

        Raises HttpError with the status that the agent gets.
        """


@dataclass(eq=False)
class PolicyCall:
    """One call of the policy: what it added to the conversation after the reply to `parent`, and its own reply."""

    parent: PolicyCall | None
    messages: Sequence[Message]  # added
    before: list[int]  # token ids of these messages, up to the reply; without a parent, the whole prompt
    digest: str  # of the tools and all messages before the reply
    options: dict[str, Any]  # arguments of the chat template
    sampled: PolicyTurn = field(default_factory=lambda: PolicyTurn([], ended=False))
    reply: Message = field(default_factory=dict)
    reward: float = 0.0
    number: int = 0  # its place in time among the calls of its session

    @property
    def path(self) -> list[PolicyCall]:
        """The calls of the conversation, the first one first."""
        calls = [self]
        while parent := calls[-1].parent:
            calls.append(parent)
        return calls[::-1]

    @property
    def tokens(self) -> list[int]:
        """Token ids of the conversation, as the policy saw and sampled them."""
        return [token for call in self.path for token in (*call.before, *call.sampled.tokens)]


@dataclass
class CapturedRow(RecordedRow):
    """One conversation of a session as a row to train on."""

    calls: list[PolicyCall] = field(default_factory=list)  # whose replies are trained in this row

    @classmethod
    def of(cls, leaf: PolicyCall, trained: Collection[PolicyCall]) -> CapturedRow:
        """Return the row that ends with a call; replies that are `trained` in another row are observed in this one."""
        row = cls()
        for call in leaf.path:
            row.observe(call.before)
            row.messages += [*call.messages, call.reply]
            if call in trained:
                row.observe(call.sampled.tokens)
            else:
                row.calls.append(call)
                row.sample(call.sampled, reward=call.reward, number=call.number)
        return row

    def exported(self, session: Session, group: str) -> dict[str, Any]:
        """Return the row of a session as a line of JSON; `group`: by default the session's name."""
        columns = ("tokens", "observed", "logprobs", "versions", "messages")
        return {
            "session": session.name,
            "group": group or session.name,
            "session_reward": sum(call.reward for call in session.calls),
            "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in self.turns],
            **{name: getattr(self, name) for name in columns},
            TOOLS: self.calls[-1].options.get(TOOLS, []),
        }


class Session:
    """The calls of one agent, which may lead several conversations, also at the same time."""

    def __init__(self, name: str, tokenizer: Any, max_tokens: int, max_calls: float) -> None:
        self.name, self.num_tokens, self.limit = name, 0, ""
        """`limit`: why a call was refused, `max_tokens` or `max_turns`; empty: none was."""
        self.calls: list[PolicyCall] = []
        self.used, self.in_flight, self.is_over = time.monotonic(), 0, False
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._max_calls = max_calls
        self._ends: dict[str, PolicyCall] = {}  # by the digest of the conversation with the call's reply

    def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[PolicyCall, int]:
        """Return a call that continues the longest conversation that `messages` start with, and its token limit.

        Raises HttpError if there is no room for it, TemplateError if the messages cannot be rendered.
        """
        if len(self.calls) + self.in_flight > self._max_calls:
            self.limit = "max_turns"
            raise HttpError(400, f"the session has reached its limit of {self._max_calls} calls: end it")
        digests = [_digest("", tools)]
        for message in messages:
            digests.append(_digest(digests[-1], _identity(message)))
        known = max((length for length, digest in enumerate(digests) if digest in self._ends), default=0)
        parent, chat, before = self._ends.get(digests[known]), Chat(self._tokenizer, tools), None
        if parent is not None:
            try:
                said = " ".join(call.reply["content"] for call in parent.path)
                before = chat.after_reply(messages[known:], parent.sampled.tokens[-1], said)
            except TemplateError as error:
                warn_once(f"a call does not continue its conversation but begins another trajectory: {error}")
        if before is None:
            parent, known = None, 0
            before = [*self._tokenizer(chat.prompt(messages), add_special_tokens=False)["input_ids"]]
        left = self._max_tokens - self.num_tokens - len(before)
        if left < 1:
            self.limit = "max_tokens"
            raise HttpError(
                400,
                f"messages: {len(before)} tokens beside the {self.num_tokens} of the session's earlier calls leave no "
                f"room for a reply, with at most {self._max_tokens} (environment.max_tokens in a run): end the session",
                "messages",
            )
        return PolicyCall(parent, messages[known:], before, digests[-1], chat.options), left

    def record(self, call: PolicyCall, sampled: PolicyTurn, reply: Message) -> None:
        """Add a call with its reply. Raises HttpError if the session has ended meanwhile."""
        if self.is_over:
            raise _session_ended(self.name)
        call.sampled = sampled
        call.reply = reply
        call.number = len(self.calls)
        self.num_tokens += len(call.before) + len(sampled.tokens)
        self.calls.append(call)
        self._ends[_digest(call.digest, _identity(reply))] = call

    def rows(self) -> list[CapturedRow]:
        """Return a row per call that no later call extends. A reply in several rows is trained in the first of them."""
        continued, rows = {call.parent for call in self.calls}, list[CapturedRow]()
        for leaf in (call for call in self.calls if call not in continued):
            rows.append(CapturedRow.of(leaf, {call for row in rows for call in row.calls}))
        return rows


def _session_ended(name: str) -> HttpError:
    """Return the error of a call in a session that has ended. No client repeats a 404, as it does a 409."""
    return HttpError(404, f"session {name} has ended: call under another name")


class Sessions:
    """The open sessions, by name.

    A session that has ended stays so for `idle_s`: an agent that still runs would otherwise begin it again, and its
    calls would be rows of the next session of that name.
    """

    def __init__(
        self, tokenizer: Any, *, most: int, most_tokens: int, idle_s: float, most_calls: float = math.inf
    ) -> None:
        """
        Args:
            most: number of open sessions.
            most_tokens: of all calls of a session; a prefix that several share counts once.
            most_calls: of a session.
            idle_s: how long a session stays without a request.

        Raises TemplateError if the tokenizer has no chat template.
        """
        self.tokenizer, self._most, self._idle_s = tokenizer, most, idle_s
        self._most_tokens, self._most_calls = most_tokens, most_calls
        self._open: dict[str, Session] = {}
        self._ended: dict[str, float] = {}  # when, by name; the first one first
        chat = Chat(tokenizer)
        if not chat.has_template:
            raise TemplateError("the policy's tokenizer has no chat template, which agents need: add one to its folder")
        try:
            chat.check()
        except TemplateError as error:
            warn_once(f"a call of an agent may begin another trajectory: {error}")

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[Session]:
        """Yield the session for a call, a new one if there is none; one that is left without calls is forgotten.

        Raises HttpError if it has ended, or there are too many.
        """
        self._drop_idle()
        if name in self._ended:
            raise _session_ended(name)
        if name not in self._open and len(self._open) >= self._most:
            raise HttpError(429, f"session {name}: {len(self._open)} open sessions are the limit: end some")
        new = Session(name, self.tokenizer, self._most_tokens, self._most_calls)
        session = self._open.setdefault(name, new)
        session.in_flight += 1
        try:
            yield session
        finally:
            session.in_flight -= 1
            session.used = time.monotonic()
            if not session.calls and not session.in_flight and not session.is_over:
                del self._open[name]

    def find(self, name: str) -> Session:
        """Return an open session. Raises HttpError if there is none."""
        self._drop_idle()
        if name not in self._open or not self._open[name].calls:
            raise HttpError(404, f"session {name} is unknown: it has had no call, has ended, or was idle too long")
        self._open[name].used = time.monotonic()
        return self._open[name]

    def end(self, name: str) -> Session | None:
        """Remove a session and return it, None if it is unknown; later calls in it are refused."""
        session = self._open.pop(name, None)
        if session is not None:
            session.is_over = True
            self._ended[name] = time.monotonic()
            if len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        return session

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for session in [each for each in self._open.values() if not each.in_flight and each.used < oldest]:
            logger.warning("session %s: dropped with %d calls, as it was not ended", session.name, len(session.calls))
            self.end(session.name)
        for name in list(itertools.takewhile(lambda name: self._ended[name] < oldest, self._ended)):
            del self._ended[name]


def _identity(message: Message) -> list[Any]:
    """Return a message's identity for comparisons, without call ids and the space around a reply."""
    is_reply = message["role"] == "assistant"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"].strip() if is_reply else message["content"], message.get("name"), calls]


def _digest(before: str, content: Any) -> str:
    return hashlib.sha256(f"{before}{json.dumps(content, sort_keys=True)}".encode()).hexdigest()
