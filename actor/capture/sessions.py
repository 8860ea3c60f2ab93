"""Sessions of agents: trees of calls, each with the tokens that the policy saw and sampled."""

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
from rlhf_triton.actor.data.chat import Chat, ChatMessage, TemplateError
from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedRow
from rlhf_triton.checkpoints.tokenization import encode_bare_text
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import TOOLS

logger = logging.getLogger(__name__)
MAX_ENDED = 100_000  # names of ended sessions that are remembered


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of a request."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # stop strings; the first one to occur ends the reply


class Sampler(Protocol):
    """Samples from the policy."""

    async def sample(self, session: str, tokens: list[int], sampling: Sampling) -> PolicyTurn:
        """Sample a continuation of `tokens`, of at least one token; cancelling the call stops generation.

        `session`: name of the session, whose calls share prefixes of tokens.

        Raises HttpError with the status that the agent receives.
        """


@dataclass(eq=False, kw_only=True)
class PolicyCall:
    """One call of the policy: the messages that it added after the reply to `parent`, and the policy's reply."""

    parent: PolicyCall | None
    messages: Sequence[ChatMessage]  # messages added after the parent's reply
    before: list[int]  # token ids between the parent's reply and this one; without a parent, the whole prompt
    digest: str  # digest of the tools and all messages before the reply
    options: dict[str, Any]  # arguments of the chat template
    sampled: PolicyTurn = field(default_factory=lambda: PolicyTurn([], ended=False))
    reply: ChatMessage = field(default_factory=dict)
    reward: float = 0.0
    number: int = 0  # counts the calls of the session in time

    @property
    def path(self) -> list[PolicyCall]:
        """The calls of the conversation up to this one, in order."""
        calls = [self]
        while parent := calls[-1].parent:
            calls.append(parent)
        return calls[::-1]

    @property
    def num_tokens(self) -> int:
        """Number of `tokens`."""
        return sum(len(call.before) + len(call.sampled.tokens) for call in self.path)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the conversation, as the policy saw and sampled them."""
        return [token for call in self.path for token in (*call.before, *call.sampled.tokens)]


@dataclass
class CapturedRow(RecordedRow):
    """One conversation of a session as a training row."""

    calls: list[PolicyCall] = field(default_factory=list)  # calls whose replies this row trains

    @classmethod
    def ending_with(cls, leaf: PolicyCall, trained: Collection[PolicyCall]) -> CapturedRow:
        """Return the row that ends with call `leaf`; replies of `trained` calls count as observed, not as sampled."""
        row = cls()
        for call in leaf.path:
            row.observe(call.before)
            row.messages += [*call.messages, call.reply]
            if call in trained:
                row.observe(call.sampled.tokens)
            else:
                row.calls.append(call)
                row.add_turn(call.sampled, reward=call.reward, number=call.number)
        return row

    def exported(self, session: Session, group: str) -> dict[str, Any]:
        """Return the row as an object for JSON; `group`: empty for the session's name."""
        columns = ("tokens", "observed", "logprobs", "versions", "messages")
        return {
            "session": session.name,
            "group": group or session.name,
            "session_reward": sum(call.reward for call in session.calls),
            "turns": [{"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in self.turns],
            **{name: getattr(self, name) for name in columns},
            TOOLS: self.calls[-1].options.get(TOOLS, []),
        }


@dataclass(frozen=True)
class SessionLimits:
    """What one session may hold."""

    tokens: int  # maximum tokens of all rows
    calls: float = math.inf
    counts_shared: bool = True  # whether tokens that several rows have in common count for each of them


class Session:
    """The calls of one agent, which may have several conversations, even at the same time."""

    def __init__(self, name: str, tokenizer: Any, limits: SessionLimits) -> None:
        self.name = name
        self.num_tokens = 0
        """Tokens of all rows; see `SessionLimits.counts_shared`."""
        self.limit = ""
        """`limit`: the limit for which a call was refused, `max_tokens` or `max_turns`; empty if none was refused."""
        self.calls: list[PolicyCall] = []
        self.used = time.monotonic()
        self.in_flight = 0
        self.is_over = False
        self._tokenizer = tokenizer
        self._limits = limits
        self._ends: dict[str, PolicyCall] = {}  # calls by the digest of their conversation, reply included
        self._begun: dict[PolicyCall, int] = {}  # calls in flight, and how many tokens they add to the rows at least
        self._leaves: dict[PolicyCall, None] = {}  # calls that no later call extends, in order

    def call(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> PolicyCall:
        """Return a call that continues the longest recorded prefix of `messages`.

        Changes nothing, so that a cancelled request leaves nothing behind, even if a thread is still rendering it.
        Raises HttpError if the session has had all its calls, TemplateError if the messages cannot be rendered.
        """
        if len(self.calls) + self.in_flight > self._limits.calls:
            self.limit = "max_turns"
            raise HttpError(400, f"the session has reached its limit of {self._limits.calls} calls: end it")
        digests = [_digest("", tools)]
        for message in messages:
            digests.append(_digest(digests[-1], _identity(message)))
        num_known = max((length for length, digest in enumerate(digests) if digest in self._ends), default=0)
        parent = self._ends.get(digests[num_known])
        chat = Chat(self._tokenizer, tools)
        before = None
        if parent is not None:
            try:
                replies = " ".join(call.reply["content"] for call in parent.path)
                before = chat.after_reply(messages[num_known:], parent.sampled.tokens[-1], replies)
            except TemplateError as error:
                warn_once(f"a call starts a new trajectory instead of continuing its conversation: {error}")
        if before is None:
            parent = None
            num_known = 0
            before = encode_bare_text(self._tokenizer, chat.prompt(messages))
        options = chat.options if parent is None else parent.options  # equal, but kept once
        return PolicyCall(
            parent=parent, messages=messages[num_known:], before=before, digest=digests[-1], options=options
        )

    def begin(self, call: PolicyCall) -> int:
        """Count a call as in flight; return its reply's token limit. Raises HttpError if no token is left for it."""
        num_new = self._num_added(call, self._begun)
        num_earlier = self.num_tokens + sum(self._begun.values())
        num_left = self._limits.tokens - num_earlier - num_new
        if num_left < 1:
            self.limit = "max_tokens"
            raise HttpError(
                400,
                f"messages: {num_new} tokens after the {num_earlier} of the session's rows so far leave no room "
                f"for a reply within {self._limits.tokens} (environment.max_tokens in a run): end the session",
                "messages",
            )
        self._begun[call] = num_new
        return num_left

    def forget(self, call: PolicyCall) -> None:
        """Stop counting a call as in flight."""
        self._begun.pop(call, None)

    def record(self, call: PolicyCall, sampled: PolicyTurn, reply: ChatMessage) -> None:
        """Record a call with its reply. Raises HttpError if the session has ended meanwhile."""
        if self.is_over:
            raise _session_ended(self.name)
        call.sampled = sampled
        call.reply = reply
        call.number = len(self.calls)
        self.forget(call)
        self.num_tokens += self._num_added(call)
        self.calls.append(call)
        if call.parent in self._leaves:
            del self._leaves[call.parent]
        self._leaves[call] = None
        self._ends[_digest(call.digest, _identity(reply))] = call

    def rows(self) -> list[CapturedRow]:
        """Return a row for each call that no later call extends. A reply in several rows is trained in the first."""
        trained = set[PolicyCall]()
        rows = list[CapturedRow]()
        for leaf in [*self._leaves]:
            rows.append(CapturedRow.ending_with(leaf, trained))
            trained.update(rows[-1].calls)
        return rows

    def _num_added(self, call: PolicyCall, in_flight: Collection[PolicyCall] = ()) -> int:
        """Return how many tokens a call adds to the rows: a branch repeats those before it in another row."""
        is_branch = call.parent not in self._leaves or any(other.parent is call.parent for other in in_flight)
        repeats = is_branch and self._limits.counts_shared
        return call.num_tokens if repeats else len(call.before) + len(call.sampled.tokens)


def _session_ended(name: str) -> HttpError:
    """Return the error for a call in an ended session. Clients do not retry a 404, unlike a 409."""
    return HttpError(404, f"session {name} has ended: call under another name")


class Sessions:
    """The open sessions, by name.

    The name of an ended session is refused for `idle_s`: an agent that still runs would otherwise open the session
    again, and its calls would become rows of the next session with that name.
    """

    def __init__(self, tokenizer: Any, limits: SessionLimits, *, most: int, idle_s: float) -> None:
        """
        Args:
            limits: of each session.
            most: maximum number of open sessions.
            idle_s: time without a request after which a session is dropped.

        Raises TemplateError if the tokenizer has no chat template.
        """
        self.tokenizer = tokenizer
        self._most = most
        self._idle_s = idle_s
        self._limits = limits
        self._open: dict[str, Session] = {}
        self._ended: dict[str, float] = {}  # name -> time of the end; oldest first
        chat = Chat(tokenizer)
        if not chat.has_template:
            raise TemplateError("the policy's tokenizer has no chat template; agents need one, so add it to its folder")
        try:
            chat.check()
        except TemplateError as error:
            warn_once(f"a call of an agent may start a new trajectory: {error}")

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[Session]:
        """Yield the session for a call, creating it if needed; a session that stays without calls is removed.

        Raises HttpError if the session has ended, or if too many sessions are open.
        """
        self._drop_idle()
        if name in self._ended:
            raise _session_ended(name)
        if name not in self._open and len(self._open) >= self._most:
            raise HttpError(429, f"session {name}: {len(self._open)} open sessions are the limit: end some")
        session = self._open.setdefault(name, Session(name, self.tokenizer, self._limits))
        session.in_flight += 1
        try:
            yield session
        finally:
            session.in_flight -= 1
            session.used = time.monotonic()
            if not session.calls and not session.in_flight and not session.is_over:
                del self._open[name]

    def find(self, name: str) -> Session:
        """Return the open session with this name. Raises HttpError if there is none, or it has no calls."""
        self._drop_idle()
        if name not in self._open or not self._open[name].calls:
            raise HttpError(404, f"session {name} is unknown: it had no call, has ended, or was idle for too long")
        self._open[name].used = time.monotonic()
        return self._open[name]

    def end(self, name: str) -> Session | None:
        """End a session and return it, None if it is unknown; later calls under its name are refused in both cases."""
        self._ended.pop(name, None)  # the oldest comes first
        self._ended[name] = time.monotonic()
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        session = self._open.pop(name, None)
        if session is not None:
            session.is_over = True
        return session

    def reopen(self, session: Session) -> None:
        """Undo `end`."""
        self._ended.pop(session.name, None)
        self._open[session.name] = session
        session.is_over = False

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for session in [*self._open.values()]:
            if session.in_flight or session.used >= oldest:
                continue
            logger.warning(
                "session %s: dropped with %d calls, because it was idle and not ended", session.name, len(session.calls)
            )
            self.end(session.name)
        for name in list(itertools.takewhile(lambda name: self._ended[name] < oldest, self._ended)):
            del self._ended[name]


def _identity(message: ChatMessage) -> list[Any]:
    """Return the parts by which messages are compared: all but call ids and whitespace around a reply."""
    is_reply = message["role"] == "assistant"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"].strip() if is_reply else message["content"], message.get("name"), calls]


def _digest(before: str, content: Any) -> str:
    return hashlib.sha256(f"{before}{json.dumps(content, sort_keys=True)}".encode()).hexdigest()
