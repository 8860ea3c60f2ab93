"""Slot-based decoding: when a response ends, the next prompt takes its slot.

It replaces two modes of `transformers`: `generate`, which keeps every row in the batch until the longest one ends and
copies its cache at each token, and continuous batching, which is built for paged attention on a GPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.sample import Conversation, sample_of
from rlhf_triton.actor.generation.cache import SlotCache, cache_layers, find_distinct
from rlhf_triton.errors import NotFinite
from rlhf_triton.python_backend.models.card import to_device

# Refill when at least a quarter of the slots are free: a forward pass over prompts costs more than a decoding step.
REFILL_SHARE = 4


@dataclass(frozen=True)
class PolicyTurn:
    """Tokens sampled after a prefix: the response to a prompt, or one turn of a conversation."""

    tokens: list[int]
    ended: bool  # by an end-of-sequence token or a stop string, not by a limit
    logprobs: list[float] | None = None  # nats, per token, at the sampling temperature, before top-k and top-p


Draws = Callable[[int], Iterator[float]]
Finished = Callable[[int, Conversation], None]
Watch = Callable[[list[int], Tensor], None]


class Partner(Protocol):
    """The decoder's counterpart: it supplies the rows, and may continue each one after a turn of the policy."""

    size: int
    """Number of rows."""
    longest: int
    """Maximum tokens of a row."""

    def take(self, index: int, turn: PolicyTurn) -> bool:
        """Receive a turn of row `index`, without waiting for anything; return whether the row may go on."""

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int] | None]]:
        """Return (index, tokens before its next turn) of rows that can go on, or begin; None: the row is complete.

        With `wait`, waits until there is one; an empty list then means that all rows are complete.
        """

    def close(self) -> None:
        """End the rows that are not complete; `next` then raises CancelledError."""


class Prompts:
    """Prompts that have one response each, by the indices of their rows."""

    def __init__(self, prompts: Mapping[int, Prompt], finished: Finished, *, max_new_tokens: int) -> None:
        self._prompts, self._finished = prompts, finished
        self._waiting = [(i, prompt.tokens.tolist()) for i, prompt in prompts.items()]
        self.size = len(prompts)
        self.longest = max(len(tokens) for _, tokens in self._waiting) + max_new_tokens

    def take(self, index: int, turn: PolicyTurn) -> bool:
        """Report the response; the row is complete."""
        sample = sample_of(self._prompts[index], turn.tokens, turn.logprobs, ended=turn.ended)
        self._finished(index, (sample,))
        return False

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int] | None]]:
        """Return all prompts, once."""
        waiting, self._waiting = self._waiting, []
        return [*waiting]

    def close(self) -> None:
        """Nothing waits."""


@dataclass(frozen=True)
class Rules:
    """Sampling settings and stopping criteria."""

    max_new_tokens: int
    eos_ids: list[int]
    banned_ids: list[int] = field(default_factory=list)
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stops: Callable[[list[int]], bool] | None = None  # further stopping criterion, given the response's tokens


@dataclass
class _Row:
    """A response that is being generated."""

    index: int  # of its prompt
    start: int  # cache column of its first token
    tokens: list[int]  # prompt and response
    begin: int  # index of the first token of the response, or of its current turn
    draws: Iterator[float] | None
    logprobs: list[float] = field(default_factory=list)  # of the tokens from `begin` on
    cached: int = 0  # of a parked row: how many tokens have keys and values, all but the last one that was sampled

    @property
    def written(self) -> int:
        return len(self.tokens) - self.begin


class _Inputs(NamedTuple):
    """What one step takes from the host, on the device."""

    ids: Tensor  # int64 [rows, T]
    starts: Tensor  # int64 [rows, 1]: cache column of each row's first token
    draws: Tensor  # float64 [rows], uniform in [0, 1); empty: take the most likely tokens
    early: Tensor  # bool [rows]: fewer than `min_new_tokens` are written
    sources: Tensor  # int64 [rows]: which of the `ids` are each new row's


class Decoder:
    """Slot-based decoding with one model."""

    def __init__(
        self, model: Any, rules: Rules, *, slots: int, token_budget: int | None = None, watch: Watch = lambda *_: None
    ) -> None:
        """
        Args:
            token_budget: maximum tokens of one forward pass over prompts, padding included; a longer one runs alone.
            watch: called with prompt indices and their next-token logits `[rows, V]` (banned tokens: -inf).
        """
        self._model, self._rules, self._slots, self._watch = model, rules, slots, watch
        self._token_budget = token_budget
        self._layers = cache_layers(model)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._warpers = warpers_of(rules)
        self._banned = torch.tensor(rules.banned_ids, dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def run(self, partner: Partner, draws: Draws | None) -> None:
        """Decode turns of all rows until the partner has completed them.

        Args:
            draws: given a row's index, yields a number for each token that is sampled in it, uniform in [0, 1). Numbers
                of its own make a row independent of those beside it. None: take the most likely tokens.

        Raises:
            NotFinite: the model's logits are not finite.
        """
        self._begin(min(self._slots, partner.size), partner.longest)
        waiting: list[tuple[int, Sequence[int]]] = []
        ready: list[_Row] = []  # parked rows that can go on
        while True:
            wait = not self._rows and not ready and not (waiting and self._free)
            came = partner.next(wait=wait)
            if wait and not came:
                break
            ready += self._sorted_in(came, waiting)
            free = self._free
            if ready and len(ready) >= len(self._rows) // REFILL_SHARE:
                self._go_on(ready)
                ready = []
            elif waiting and free and (not self._rows or free >= self._cache.rows // REFILL_SHARE):
                self._take_in(self._next_prompts(waiting, free), draws)
            elif self._rows:
                self._write_on()
            self._let_go(partner)

    def _begin(self, slots: int, longest: int) -> None:
        # Half more than the longest row needs, so that `_make_room` rarely has to shift the cache.
        self._cache = SlotCache(slots, longest + longest // 2, self._layers)
        self._longest = longest
        self._rows: list[_Row] = []  # that are decoded, in the first slots; their last tokens are in one column
        self._parked: list[_Row] = []  # that wait for the partner, in the slots behind them, from column 0 on
        self._end = 0  # column behind the last one of the rows that are decoded

    @property
    def _free(self) -> int:
        return self._cache.rows - len(self._rows) - len(self._parked)

    def _sorted_in(
        self, came: list[tuple[int, Sequence[int] | None]], waiting: list[tuple[int, Sequence[int]]]
    ) -> list[_Row]:
        """Add new rows to `waiting`, remove complete ones, and return parked rows that received new tokens."""
        parked, ready = {row.index: row for row in self._parked}, []
        for index, tokens in came:
            row = parked.get(index)
            if row is None and tokens is not None:
                waiting.append((index, tokens))
            elif row is not None and tokens is not None:
                row.tokens += tokens
                row.begin = len(row.tokens)
                row.logprobs = []
                ready.append(row)
            elif row is not None:
                del parked[index]
                self._swap_parked(self._parked.index(row), len(self._parked) - 1)
                self._parked.pop()
        # Longest first: a prompt that joins later mostly fits into the columns left of `end`, and padding stays small.
        waiting.sort(key=lambda each: (-len(each[1]), each[0]))
        return ready

    def _next_prompts(self, waiting: list[tuple[int, Sequence[int]]], free: int) -> list[tuple[int, Sequence[int]]]:
        """Remove and return up to `free` prompts for one forward pass, which computes a shared prompt once."""
        new: list[tuple[int, Sequence[int]]] = []
        distinct: set[tuple[int, ...]] = set()
        while waiting and len(new) < free:
            distinct.add(tuple(waiting[0][1]))
            if len(distinct) > 1 and len(distinct) * len(new[0][1]) > (self._token_budget or math.inf):
                break
            new.append(waiting.pop(0))
        return new

    def _take_in(self, new: list[tuple[int, Sequence[int]]], draws: Draws | None) -> None:
        """Run one forward pass over new prompts, the longest first, and draw the first token of each response.

        A prompt shared by several rows, as in a group, is computed once; the other rows copy its keys and values.
        """
        sources, distinct = find_distinct([tuple(prompt) for _, prompt in new])
        width, first, cache = len(new[0][1]), len(self._rows), self._cache
        self._reach(width)
        self._move_parked(first, len(new))
        end = self._end
        order = [*distinct, *(i for i in range(len(new)) if i not in set(distinct))]
        rows = [
            _Row(index, end - len(prompt), [*prompt], len(prompt), draws and draws(index))
            for index, prompt in (new[i] for i in order)
        ]
        ids = _last_tokens(rows[: len(distinct)], width)
        cache.look_at(first, first + len(distinct), end - width, end - width)
        inputs = self._inputs(rows, ids, [sources[i] for i in order])
        logits = self._logits(cache, inputs.ids, inputs.starts[: len(distinct)], end - width, end)
        if self._rules.repetition_penalty != 1.0:
            cache.see(first, inputs.ids, inputs.starts[: len(distinct)] - (end - width), logits.shape[-1])
        if sharing := rows[len(distinct) :]:
            begin = min(row.start for row in sharing)
            cache.copy_rows(first + inputs.sources[len(distinct) :], first + len(distinct), begin, end)
        self._append(cache, first, rows, logits[inputs.sources], inputs)
        self._rows += rows

    def _go_on(self, ready: list[_Row]) -> None:
        """Run one forward pass over the new tokens of parked rows, and draw the first token of each one's next turn.

        A row with fewer new tokens than another computes some of its last ones again, so that no padding lies between
        them and its keys and values.
        """
        first, cache = len(self._rows), self._cache
        self._reach(max(len(row.tokens) for row in ready))
        for place, row in enumerate(ready):
            self._swap_parked(place, self._parked.index(row))
        del self._parked[: len(ready)]
        width, end = max(len(row.tokens) - row.cached for row in ready), self._end
        for slot, row in enumerate(ready, first):
            row.start = end - len(row.tokens)
            cache.shift(slice(slot, slot + 1), 0, row.cached, row.start)
        begin = min(end - width, *(row.start for row in ready))
        cache.look_at(first, first + len(ready), begin, end - width)
        inputs = self._inputs(ready, _last_tokens(ready, width))
        logits = self._logits(cache, inputs.ids, inputs.starts, begin, end)
        if cache.seen is not None:
            cache.see(first, inputs.ids, inputs.starts - (end - width), logits.shape[-1], more=True)
        self._append(cache, first, ready, logits, inputs)
        self._rows += ready

    def _write_on(self) -> None:
        """Run one forward pass over the last token of every row and draw the next tokens."""
        cache, rows = self._cache, self._rows
        if self._end == cache.columns:
            self._shift(0)
        begin = min(row.start for row in rows)
        cache.look_at(0, len(rows), begin, self._end)
        inputs = self._inputs(rows, np.array([row.tokens[-1:] for row in rows]))
        self._end += 1
        self._append(cache, 0, rows, self._logits(cache, inputs.ids, inputs.starts, begin, self._end), inputs)

    def _inputs(self, rows: list[_Row], ids: np.ndarray, sources: Sequence[int] = ()) -> _Inputs:
        """Copy what a step over `rows` takes from the host to the device, all at once."""
        starts = np.array([[row.start] for row in rows])
        draws = np.array([next(row.draws) for row in rows if row.draws])
        early = np.array([row.written < self._rules.min_new_tokens for row in rows])
        return _Inputs(*to_device(self._model.device, ids, starts, draws, early, np.array(sources, np.int64)))

    def _logits(self, cache: SlotCache, ids: Tensor, starts: Tensor, begin: int, end: int) -> Tensor:
        """Return next-token logits, float32 `[rows, V]`; `ids` `[rows, T]` occupy the last columns before `end`."""
        columns = torch.arange(begin, end, device=ids.device)[None]
        some = {"position_ids": (columns[:, -ids.shape[1] :] - starts).clamp(min=0), "logits_to_keep": 1}
        output = self._model(
            input_ids=ids,
            attention_mask=(columns >= starts).long(),
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in some.items() if name in self._takes},
        )
        return output.logits[:, -1].float()

    def _append(self, cache: SlotCache, first: int, rows: list[_Row], logits: Tensor, inputs: _Inputs) -> None:
        """Draw the next token of every row, in slots from `first` on, from `logits` `[rows, V]`; record its log-prob.

        The log-prob belongs to the distribution that the update trains: at the sampling temperature and without banned
        tokens, but before the repetition penalty, `min_new_tokens`, top-k and top-p. Raises NotFinite.
        """
        logits.index_fill_(1, self._banned, -torch.inf)
        self._watch([row.index for row in rows], logits)
        scaled = logits if self._rules.temperature == 1.0 else logits / self._rules.temperature
        normaliser = scaled.logsumexp(-1)
        seen = None if cache.seen is None else cache.seen[first : first + len(rows)]
        allowed = self._restricted(rows, logits, seen, inputs.early)
        chosen = draw(self._warpers(None, allowed), inputs.draws) if len(inputs.draws) else allowed.argmax(-1)
        if seen is not None:
            seen.scatter_(1, chosen[:, None], True)
        logprobs = scaled.gather(-1, chosen[:, None])[:, 0] - normaliser
        # The step's only copy to the host, for which it waits. float64 holds token ids and float32 without rounding.
        results = torch.stack([each.double() for each in (chosen, logprobs, normaliser)]).cpu()
        check_finite(results[2])
        for row, token, logprob in zip(rows, results[0].long().tolist(), results[1].tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)

    def _restricted(self, rows: list[_Row], logits: Tensor, seen: Tensor | None, early: Tensor) -> Tensor:
        """Return logits with the repetition penalty on `seen` tokens, and no end of sequence before `min_new_tokens`.

        `logits` itself stays unchanged, because neither rule is part of the log-probs. `early` `[rows]` marks the rows
        that may not end yet.
        """
        rules = self._rules
        if seen is not None:
            penalty = rules.repetition_penalty
            logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if any(row.written < rules.min_new_tokens for row in rows):
            logits = logits.clone()
            # A tokenizer may have EOS ids beyond the model's vocabulary.
            for token in (token for token in rules.eos_ids if token < logits.shape[-1]):
                logits[:, token].masked_fill_(early, -torch.inf)
        return logits

    def _let_go(self, partner: Partner) -> None:
        """Hand the turns that have ended to the partner, and park the rows that it may continue.

        The last rows take the slots of those that leave, so that the others stay contiguous.
        """
        cache, rules = self._cache, self._rules
        for i in reversed(range(len(self._rows))):
            row = self._rows[i]
            by_itself = self._ends_by_itself(row)
            if not by_itself and row.written < rules.max_new_tokens and len(row.tokens) < self._longest:
                continue
            row.cached = len(row.tokens) - 1
            goes_on = partner.take(row.index, PolicyTurn(row.tokens[row.begin :], by_itself, row.logprobs))
            last = len(self._rows) - 1
            if goes_on:
                cache.swap(i, last, min(row.start, self._rows[last].start), self._end)
                cache.shift(slice(last, last + 1), row.start, self._end, 0)
            elif i < last:
                cache.copy_rows([last], i, self._rows[last].start, self._end)
            self._rows[i] = self._rows[last]
            self._rows.pop()
            if goes_on:
                self._parked.insert(0, row)
            elif self._parked:  # their last one takes the slot between the others and the rows
                end = len(self._rows) + len(self._parked)
                cache.copy_rows([end], len(self._rows), 0, self._parked[-1].cached)
                self._parked.insert(0, self._parked.pop())

    def _ends_by_itself(self, row: _Row) -> bool:
        stops = self._rules.stops
        return row.tokens[-1] in self._rules.eos_ids or (stops is not None and stops(row.tokens[row.begin :]))

    def _reach(self, width: int) -> None:
        """Make room for rows of `width` tokens that end in the same column as the others."""
        if not self._rows:
            self._end = width
        elif self._end < width:
            self._shift(min(row.start for row in self._rows) + width - self._end)

    def _shift(self, to: int) -> None:
        """Move the rows that are decoded, so that the first one begins in column `to`."""
        begin = min(row.start for row in self._rows)
        self._cache.shift(slice(len(self._rows)), begin, self._end, to)
        for row in self._rows:
            row.start += to - begin
        self._end += to - begin

    def _swap_parked(self, one: int, other: int) -> None:
        """Let two parked rows change their slots."""
        parked, first = self._parked, len(self._rows)
        self._cache.swap(first + one, first + other, 0, max(parked[one].cached, parked[other].cached))
        parked[one], parked[other] = parked[other], parked[one]

    def _move_parked(self, first: int, count: int) -> None:
        """Free `count` slots from `first` on, where the parked rows begin."""
        behind = max(first + len(self._parked), first + count)
        moved = min(count, len(self._parked))
        for i, row in enumerate(self._parked[:moved]):
            self._cache.copy_rows([first + i], behind + i, 0, row.cached)
        self._parked = self._parked[moved:] + self._parked[:moved]


def _last_tokens(rows: Sequence[_Row], width: int) -> np.ndarray:
    """Return the last `width` tokens of each row, padded on the left, int64 `[rows, width]`."""
    ids = np.zeros((len(rows), width), np.int64)
    for each, row in zip(ids, rows, strict=True):
        tokens = row.tokens[-width:]
        each[width - len(tokens) :] = tokens
    return ids


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Sample a token int64 `[n]` for each row of `logits` `[n, V]`, by inverting its CDF at `draws` `[n]`, float64."""
    # Scaling by the last value keeps the search inside the vocabulary where rounding leaves it below 1.
    below = logits.softmax(-1).to(torch.float64).cumsum(-1)
    found = torch.searchsorted(below, (draws * below[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)  # NaN is found nowhere; `check_finite` reports it afterwards


def check_finite(normalisers: Tensor) -> None:
    """Raise NotFinite unless these logsumexp of logits are finite."""
    if not normalisers.isfinite().all():
        raise NotFinite(
            "the policy's logits are not finite, so no token can be sampled; check train_optim/grad_norm of "
            "the previous steps, and lower actor.optimizer.lr"
        )


def warpers_of(rules: Rules) -> LogitsProcessorList:
    """Return the logits processors in the order of transformers' `generate`: temperature, top-k, top-p."""
    warpers = LogitsProcessorList()
    if rules.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        warpers.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1.0:
        warpers.append(TopPLogitsWarper(rules.top_p))
    return warpers
