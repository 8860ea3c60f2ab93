"""Slot-based decoding: when a response ends, the next prompt takes its slot.

It replaces two modes of `transformers`: `generate`, which keeps every row in the batch until the longest one ends and
copies its cache at each token, and continuous batching, which is built for paged attention on a GPU.
"""

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from actor.generation.cache import SlotCache, cache_layers, find_distinct
from python_backend.errors import NotFinite
from python_backend.models.card import to_device

# Refill when at least a quarter of the slots are free: a forward pass over prompts costs more than a decoding step.
REFILL_SHARE = 4


@dataclass(frozen=True)
class Response:
    """The response to one prompt."""

    tokens: list[int]
    ended: bool  # by an end-of-sequence token or a stop string, not by `max_new_tokens`
    logprobs: list[float] | None = None  # nats, per token, at the sampling temperature, before top-k and top-p


Draws = Callable[[int], Iterator[float]]
Finished = Callable[[int, Response], None]
Watch = Callable[[list[int], Tensor], None]


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
    prompt_length: int
    draws: Iterator[float] | None
    logprobs: list[float] = field(default_factory=list)  # of the response's tokens

    @property
    def written(self) -> int:
        return len(self.tokens) - self.prompt_length


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
    def run(self, prompts: Sequence[np.ndarray], draws: Draws | None, finished: Finished) -> None:
        """Generate a response to each prompt.

        Args:
            prompts: int64 `[length]` each.
            draws: given a prompt's index, yields a number for each token of its response, uniform in [0, 1). Numbers
                of its own make a response independent of the rows beside it. None: take the most likely tokens.
            finished: called with the prompt's index and the response as soon as the response ends.

        Raises:
            NotFinite: the model's logits are not finite.
        """
        longest = max(len(prompt) for prompt in prompts)
        slots = min(self._slots, len(prompts))
        span = longest + self._rules.max_new_tokens
        # Half a span more than the longest row needs, so that `_make_room` rarely has to shift the cache.
        cache = SlotCache(slots, span + span // 2, self._layers)
        # Longest first: a prompt that joins later fits into the columns left of `end`, and padding stays small.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)))
        rows: list[_Row] = []
        end = 0
        while waiting or rows:
            free = slots - len(rows)
            if waiting and (not rows or free >= max(1, slots // REFILL_SHARE)):
                new = self._next_prompts(prompts, waiting, free)
                if not rows:
                    end = len(prompts[new[0]])
                rows += self._take_in(cache, [prompts[i] for i in new], new, len(rows), end, draws)
            else:
                if end == cache.columns:
                    end = self._make_room(cache, rows, end)
                self._write_on(cache, rows, end)
                end += 1
            self._let_go(cache, rows, end, finished)

    def _next_prompts(self, prompts: Sequence[np.ndarray], waiting: deque[int], free: int) -> list[int]:
        """Remove and return up to `free` prompts for one forward pass, which computes a shared prompt once."""
        new: list[int] = []
        distinct: set[bytes] = set()
        while waiting and len(new) < free:
            distinct.add(prompts[waiting[0]].tobytes())
            if len(distinct) > 1 and len(distinct) * len(prompts[new[0]]) > (self._token_budget or math.inf):
                break
            new.append(waiting.popleft())
        return new

    def _take_in(
        self,
        cache: SlotCache,
        prompts: list[np.ndarray],
        indices: list[int],
        first: int,
        end: int,
        draws: Draws | None,
    ) -> list[_Row]:
        """Run one forward pass over new prompts, into the columns before `end`; return rows with their first tokens.

        A prompt shared by several rows, as in a group, is computed once; the other rows copy its keys and values.
        """
        sources, distinct = find_distinct([prompt.tobytes() for prompt in prompts])
        width = len(prompts[0])
        ids = np.zeros((len(distinct), width), np.int64)
        for row, i in zip(ids, distinct, strict=True):
            row[width - len(prompts[i]) :] = prompts[i]
        order = [*distinct, *(i for i in range(len(prompts)) if i not in set(distinct))]
        rows = [
            _Row(indices[i], end - len(prompts[i]), prompts[i].tolist(), len(prompts[i]), draws and draws(indices[i]))
            for i in order
        ]
        cache.look_at(first, first + len(distinct), end - width, end - width)
        inputs = self._inputs(rows, ids, [sources[i] for i in order])
        logits = self._logits(cache, inputs.ids, inputs.starts[: len(distinct)], end - width, end)
        if self._rules.repetition_penalty != 1.0:
            cache.see(first, inputs.ids, inputs.starts[: len(distinct)] - (end - width), logits.shape[-1])
        if sharing := rows[len(distinct) :]:
            begin = min(row.start for row in sharing)
            cache.copy_rows(first + inputs.sources[len(distinct) :], first + len(distinct), begin, end)
        self._append(cache, first, rows, logits[inputs.sources], inputs)
        return rows

    def _write_on(self, cache: SlotCache, rows: list[_Row], end: int) -> None:
        """Run one forward pass over the last token of every row and draw the next tokens."""
        begin = min(row.start for row in rows)
        cache.look_at(0, len(rows), begin, end)
        inputs = self._inputs(rows, np.array([row.tokens[-1:] for row in rows]))
        self._append(cache, 0, rows, self._logits(cache, inputs.ids, inputs.starts, begin, end + 1), inputs)

    def _inputs(self, rows: list[_Row], ids: np.ndarray, sources: Sequence[int] = ()) -> _Inputs:
        """Copy what a step over `rows` takes from the host to the device, all at once."""
        starts = np.array([[row.start] for row in rows])
        draws = np.array([next(row.draws) for row in rows if row.draws])
        early = np.array([row.written < self._rules.min_new_tokens for row in rows])
        return _Inputs(*to_device(self._model.device, ids, starts, draws, early, np.array(sources, np.int64)))

    def _logits(self, cache: SlotCache, ids: Tensor, starts: Tensor, begin: int, end: int) -> Tensor:
        """Return next-token logits, float32 `[rows, V]`; `ids` `[rows, T]` occupy the last columns before `end`."""
        columns = torch.arange(begin, end, device=ids.device)[None]
        inputs: dict[str, Any] = {}
        if "position_ids" in self._takes:
            inputs["position_ids"] = (columns[:, -ids.shape[1] :] - starts).clamp(min=0)
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        output = self._model(
            input_ids=ids,
            attention_mask=(columns >= starts).long(),
            past_key_values=cache,
            use_cache=True,
            **inputs,
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

    def _let_go(self, cache: SlotCache, rows: list[_Row], end: int, finished: Finished) -> None:
        """Report the rows that have ended, and move the last rows into their slots to keep the rows contiguous."""
        ended = [(i, self._ends_by_itself(row)) for i, row in enumerate(rows)]
        gone = [(i, by_itself) for i, by_itself in ended if by_itself or rows[i].written == self._rules.max_new_tokens]
        for i, by_itself in gone:
            row = rows[i]
            finished(row.index, Response(row.tokens[row.prompt_length :], by_itself, row.logprobs))
        for i, _ in reversed(gone):
            last = rows.pop()
            if i < len(rows):
                cache.copy_row(len(rows), i, last.start, end)
                rows[i] = last

    def _ends_by_itself(self, row: _Row) -> bool:
        stops = self._rules.stops
        return row.tokens[-1] in self._rules.eos_ids or (stops is not None and stops(row.tokens[row.prompt_length :]))

    def _make_room(self, cache: SlotCache, rows: list[_Row], end: int) -> int:
        """Shift the rows to the left edge of the cache; return the new end column."""
        begin = min(row.start for row in rows)
        cache.shift(len(rows), begin, end)
        for row in rows:
            row.start -= begin
        return end - begin


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
