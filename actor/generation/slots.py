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
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.data.sample import Conversation, sample_of
from rlhf_triton.actor.generation.cache import SlotCache, cache_layers, find_distinct
from rlhf_triton.errors import NotFinite
from rlhf_triton.python_backend.models.card import to_device

# Refill when at least a quarter of the slots are free: a forward pass over prompts costs more than a decoding step.
REFILL_SHARE = 4


Draws = Callable[[int], Iterator[float]]
Finished = Callable[[int, Conversation], None]
Watch = Callable[[list[int], Tensor], None]


class Partner(Protocol):
    """The other side of what is decoded: it asks for turns of the policy, and receives them."""

    size: int
    """Number of conversations: how many turns there mostly are at the same time, at most."""
    longest: int
    """Maximum tokens of a row."""

    def take(self, index: int, turn: PolicyTurn) -> None:
        """Receive the turn of row `index`, without waiting for anything."""

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int]]]:
        """Return (index, all tokens before its next turn) of each row that has a turn of the policy next.

        With `wait`, waits until there is one; an empty list then means that there are no more turns.
        """

    def close(self) -> None:
        """End what is not complete; `next` then raises CancelledError."""


class Prompts:
    """Prompts that have one response each, by the indices of their rows."""

    def __init__(self, prompts: Mapping[int, Prompt], finished: Finished, *, max_new_tokens: int) -> None:
        self._prompts, self._finished = prompts, finished
        self._waiting = [(i, prompt.tokens.tolist()) for i, prompt in prompts.items()]
        self.size = len(prompts)
        self.longest = max(len(tokens) for _, tokens in self._waiting) + max_new_tokens

    def take(self, index: int, turn: PolicyTurn) -> None:
        """Report the response."""
        self._finished(index, (sample_of(self._prompts[index], turn),))

    def next(self, *, wait: bool) -> list[tuple[int, Sequence[int]]]:
        """Return all prompts, once."""
        waiting, self._waiting = self._waiting, []
        return [*waiting]

    def close(self) -> None:
        """Nothing waits."""


@dataclass(frozen=True)
class Rules:
    """TokenSampler settings and stopping criteria."""

    max_new_tokens: int
    eos_ids: list[int]
    banned_ids: list[int] = field(default_factory=list)
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stops: Callable[[list[int]], bool] | None = None  # further stopping criterion, given the response's tokens


@dataclass
class DecodedRow:
    """A row in which the policy has a turn: the response to a prompt, or a part of a conversation."""

    index: int  # of its prompt
    tokens: list[int]  # those before the turn, and its own
    begin: int  # index of the first token of the turn
    draws: Iterator[float] | None  # one number for each token; None: take the most likely ones
    start: int = 0  # cache column of its first token
    logprobs: list[float] = field(default_factory=list)  # of the turn's tokens

    @property
    def written(self) -> int:
        """Number of tokens of the turn."""
        return len(self.tokens) - self.begin

    def ends_by_itself(self, rules: Rules) -> bool:
        """Return whether the last token ends the turn."""
        return self.tokens[-1] in rules.eos_ids or (rules.stops is not None and rules.stops(self.tokens[self.begin :]))

    def is_over(self, rules: Rules, longest: int) -> bool:
        """Return whether the turn has ended, or has reached its limit or the row's."""
        is_full = self.written >= rules.max_new_tokens or len(self.tokens) >= longest
        return self.written > 0 and (is_full or self.ends_by_itself(rules))

    def turn(self, rules: Rules) -> PolicyTurn:
        """Return the current turn, which is over."""
        return PolicyTurn(self.tokens[self.begin :], self.ends_by_itself(rules), self.logprobs)


class TokenSampler:
    """Draws the next token of each row under `Rules`."""

    def __init__(self, rules: Rules, device: torch.device, watch: Watch = lambda *_: None) -> None:
        """`watch`: called with prompt indices and their next-token logits `[rows, V]` (banned tokens: -inf)."""
        self._rules = rules
        self._watch = watch
        self._warpers = warpers_of(rules)
        self._banned = torch.tensor(rules.banned_ids, dtype=torch.int64, device=device)

    def inputs(self, rows: Sequence[DecodedRow]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' draws, float64 `[rows]` or empty, and which are shorter than `min_new_tokens`, bool."""
        draws = np.array([next(row.draws) for row in rows if row.draws])
        return draws, np.array([row.written < self._rules.min_new_tokens for row in rows])

    def append(self, rows: Sequence[DecodedRow], logits: Tensor, draws: Tensor, early: Tensor) -> None:
        """Draw the next token of every row from `logits` `[rows, V]`, which it changes; record its log-prob.

        The log-prob belongs to the distribution that the update trains: at the sampling temperature and without banned
        tokens, but before `min_new_tokens`, top-k and top-p. Raises NotFinite.

        Args:
            draws, early: what `inputs` returned, on the device.
        """
        rules = self._rules
        logits.index_fill_(1, self._banned, -torch.inf)
        self._watch([row.index for row in rows], logits)
        scaled = logits if rules.temperature == 1.0 else logits / rules.temperature
        normaliser = scaled.logsumexp(-1)
        allowed = logits
        if any(row.written < rules.min_new_tokens for row in rows):
            allowed = logits.clone()
            # A tokenizer may have EOS ids beyond the model's vocabulary.
            for token in (token for token in rules.eos_ids if token < logits.shape[-1]):
                allowed[:, token].masked_fill_(early, -torch.inf)
        chosen = draw(self._warpers(None, allowed), draws) if len(draws) else allowed.argmax(-1)
        logprobs = scaled.gather(-1, chosen[:, None])[:, 0] - normaliser
        # The step's only copy to the host, for which it waits. float64 holds token ids and float32 without rounding.
        results = torch.stack([each.double() for each in (chosen, logprobs, normaliser)]).cpu()
        check_finite(results[2])
        for row, token, logprob in zip(rows, results[0].long().tolist(), results[1].tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)


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
        self._model = model
        self._rules = rules
        self._slots = slots
        self._sampling = TokenSampler(rules, model.device, watch)
        self._token_budget = token_budget
        self._layers = cache_layers(model)
        self._takes = set(inspect.signature(model.forward).parameters)

    @torch.no_grad()
    def run(self, partner: Partner, draws: Draws | None) -> None:
        """Decode turns until the partner has no more.

        Args:
            draws: given a row's index, returns an iterator over a number for each token that is sampled in it, uniform
                in [0, 1), which goes on at its next turn. Numbers of its own make a row independent of those beside it.
                None: take the most likely tokens.

        Raises:
            NotFinite: the model's logits are not finite.
        """
        # Half more columns than the longest row needs, so that `_reserve` rarely has to shift the cache.
        columns = partner.longest + partner.longest // 2
        self._cache = SlotCache(min(self._slots, partner.size), columns, self._layers)
        self._longest = partner.longest
        self._rows: list[DecodedRow] = []  # in the first slots; their last tokens are in one column
        self._end = 0  # column behind the last one of the rows
        waiting: list[tuple[int, Sequence[int]]] = []
        while True:
            wait = not self._rows and not waiting
            came = partner.next(wait=wait)
            if wait and not came:
                break
            waiting += came
            # Longest first: what joins later mostly fits into the columns left of `end`, and padding stays small.
            waiting.sort(key=lambda each: (-len(each[1]), each[0]))
            free = self._cache.rows - len(self._rows)
            if waiting and free and (not self._rows or free >= self._cache.rows // REFILL_SHARE):
                self._prefill(self._next_prompts(waiting, free), draws)
            elif self._rows:
                self._decode_step()
            self._evict(partner)

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

    def _prefill(self, new: list[tuple[int, Sequence[int]]], draws: Draws | None) -> None:
        """Run one forward pass over new prompts, the longest first, and draw the first token of each response.

        A prompt shared by several rows, as in a group, is computed once; the other rows copy its keys and values.
        """
        sources, distinct = find_distinct([tuple(prompt) for _, prompt in new])
        width, first, cache = len(new[0][1]), len(self._rows), self._cache
        self._reserve(width)
        end = self._end
        order = [*distinct, *(i for i in range(len(new)) if i not in set(distinct))]
        rows = [
            DecodedRow(index, [*prompt], len(prompt), draws and draws(index), end - len(prompt))
            for index, prompt in (new[i] for i in order)
        ]
        ids = np.array([[0] * (width - len(row.tokens)) + row.tokens for row in rows[: len(distinct)]])
        cache.look_at(first, first + len(distinct), end - width, end - width)
        inputs = self._inputs(rows, ids, [sources[i] for i in order])
        logits = self._logits(cache, inputs.ids, inputs.starts[: len(distinct)], end - width, end)
        if sharing := rows[len(distinct) :]:
            begin = min(row.start for row in sharing)
            cache.copy_rows(first + inputs.sources[len(distinct) :], first + len(distinct), begin, end)
        self._sampling.append(rows, logits[inputs.sources], inputs.draws, inputs.early)
        self._rows += rows

    def _decode_step(self) -> None:
        """Run one forward pass over the last token of every row and draw the next tokens."""
        cache, rows = self._cache, self._rows
        if self._end == cache.columns:
            self._shift(0)
        begin = min(row.start for row in rows)
        cache.look_at(0, len(rows), begin, self._end)
        inputs = self._inputs(rows, np.array([row.tokens[-1:] for row in rows]))
        self._end += 1
        logits = self._logits(cache, inputs.ids, inputs.starts, begin, self._end)
        self._sampling.append(rows, logits, inputs.draws, inputs.early)

    def _inputs(self, rows: list[DecodedRow], ids: np.ndarray, sources: Sequence[int] = ()) -> _Inputs:
        """Copy what a step over `rows` takes from the host to the device, all at once."""
        starts = np.array([[row.start] for row in rows])
        sampling = self._sampling.inputs(rows)
        return _Inputs(*to_device(self._model.device, ids, starts, *sampling, np.array(sources, np.int64)))

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

    def _evict(self, partner: Partner) -> None:
        """Hand the turns that are over to the partner; the last rows take the slots of those that leave."""
        for i in reversed(range(len(self._rows))):
            row, last = self._rows[i], len(self._rows) - 1
            if not row.is_over(self._rules, self._longest):
                continue
            partner.take(row.index, row.turn(self._rules))
            if i < last:
                self._cache.copy_rows([last], i, self._rows[last].start, self._end)
            self._rows[i] = self._rows[last]
            self._rows.pop()

    def _reserve(self, width: int) -> None:
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
