"""Slot-based decoding: when a response ends, the next prompt takes its slot.

It replaces two modes of `transformers`: `generate` keeps every row in the batch until the longest one ends, and copies
its cache at each token; continuous batching is built for paged attention on a GPU.

The model's weights may change between two forward passes: `Decoder.renew` then makes the unfinished rows compute their
keys and values again, so that each token has the log-prob that a forward pass with the weights of that time gives it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_triton.actor.data.recorded import PolicyTurn, RecordedVersion
from rlhf_triton.actor.generation.cache import SlotCache, cache_layers
from rlhf_triton.actor.generation.row_sources import IsPaused, NewRow, RowId, RowSource
from rlhf_triton.actor.generation.shared_prompts import find_distinct
from rlhf_triton.errors import NotFinite
from rlhf_triton.models.gpu import to_device

# Refill when at least a quarter of the slots are free: a forward pass over prompts costs more than a decoding step.
REFILL_SHARE = 4


Watch = Callable[[list[RowId], Tensor], None]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling parameters and stopping criteria of a turn."""

    max_new_tokens: int
    eos_ids: list[int]
    banned_ids: list[int] = field(default_factory=list)
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    has_stop_string: Callable[[list[int]], bool] | None = None  # returns whether a turn's tokens end with a stop string


class DecodedRow:
    """A row in decoding: a prompt with the response so far, or a conversation with the turn so far."""

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.tokens = [*new.tokens]
        """Tokens before the turn, and the turn's tokens."""
        self.turn_start = len(new.tokens)
        self.first_column = 0
        """Cache column of the row's first token."""
        self.logprobs: list[float] = []
        """Log-probs of the turn's tokens."""
        self.policy_steps: list[RecordedVersion] = []
        """For each of the turn's tokens, the last step whose update was in the weights that sampled it."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled in the turn."""
        return len(self.tokens) - self.turn_start

    def has_ended(self, settings: SamplingSettings) -> bool:
        """Return whether the last token ends the turn: an end-of-sequence token or the end of a stop string."""
        return self.tokens[-1] in settings.eos_ids or (
            settings.has_stop_string is not None and settings.has_stop_string(self.tokens[self.turn_start :])
        )

    def is_over(self, settings: SamplingSettings, longest: int) -> bool:
        """Return whether the turn has ended, or has reached the limit of a turn or of the row (`longest`)."""
        is_full = self.num_sampled >= settings.max_new_tokens or len(self.tokens) >= longest
        return self.num_sampled > 0 and (is_full or self.has_ended(settings))

    def turn(self, settings: SamplingSettings) -> PolicyTurn:
        """Return the finished turn."""
        return PolicyTurn(self.tokens[self.turn_start :], self.has_ended(settings), self.logprobs, self.policy_steps)


class TokenSampler:
    """Draws the next token of each row under `SamplingSettings`."""

    def __init__(self, settings: SamplingSettings, device: torch.device, watch: Watch = lambda *_: None) -> None:
        """`watch`: called with rows and their next-token logits `[rows, V]` (banned tokens: -inf)."""
        self._settings = settings
        self._watch = watch
        self._warpers = warpers_of(settings)
        self._banned = torch.tensor(settings.banned_ids, dtype=torch.int64, device=device)

    def inputs(self, rows: Sequence[DecodedRow]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' next draws, float64 `[rows]` or empty, and whether each is below `min_new_tokens`, bool."""
        draws = np.array([next(row.new.draws) for row in rows if row.new.draws])
        return draws, np.array([row.num_sampled < self._settings.min_new_tokens for row in rows])

    def append(
        self, rows: Sequence[DecodedRow], logits: Tensor, draws: Tensor, early: Tensor, *, policy_step: int
    ) -> None:
        """Draw the next token of every row from `logits` `[rows, V]`, and append it and its log-prob to the row.

        Changes `logits` in place. The log-prob belongs to the distribution that the update trains: at the sampling
        temperature and without banned tokens, but before `min_new_tokens`, top-k and top-p. Raises NotFinite.

        Args:
            draws, early: the results of `inputs`, on the device.
            policy_step: the last one whose update the weights contain.
        """
        settings = self._settings
        logits.index_fill_(1, self._banned, -torch.inf)
        self._watch([row.new.id for row in rows], logits)
        scaled = logits if settings.temperature == 1.0 else logits / settings.temperature
        normaliser = scaled.logsumexp(-1)
        allowed = logits
        if any(row.num_sampled < settings.min_new_tokens for row in rows):
            allowed = logits.clone()
            # A tokenizer may have EOS ids beyond the model's vocabulary.
            for token in (token for token in settings.eos_ids if token < logits.shape[-1]):
                allowed[:, token].masked_fill_(early, -torch.inf)
        chosen = draw(self._warpers(None, allowed), draws) if len(draws) else allowed.argmax(-1)
        logprobs = scaled.gather(-1, chosen[:, None])[:, 0] - normaliser
        # The step's only wait, for one copy to the host. float64 holds token ids and float32 without rounding.
        results = torch.stack([tensor.double() for tensor in (chosen, logprobs, normaliser)]).cpu()
        check_finite(results[2])
        for row, token, logprob in zip(rows, results[0].long().tolist(), results[1].tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.policy_steps.append(policy_step)


class _Inputs(NamedTuple):
    """The inputs of one decoding step, copied from the host to the device."""

    ids: Tensor  # int64 [rows, T]
    starts: Tensor  # int64 [rows, 1]: cache column of each row's first token
    draws: Tensor  # float64 [rows], uniform in [0, 1); empty: take the most likely tokens
    early: Tensor  # bool [rows]: fewer than `min_new_tokens` tokens are sampled
    sources: Tensor  # int64 [rows]: index in `ids` of each new row's prompt


class Decoder:
    """Slot-based decoding with one model."""

    def __init__(
        self,
        model: Any,
        settings: SamplingSettings,
        *,
        slots: int,
        token_budget: int | None = None,
        watch: Watch = lambda *_: None,
    ) -> None:
        """
        Args:
            token_budget: maximum tokens of one forward pass over prompts, padding included; a longer one runs alone.
            watch: called with rows and their next-token logits `[rows, V]` (banned tokens: -inf).
        """
        self._model = model
        self._settings = settings
        self._slots = slots
        self._sampler = TokenSampler(settings, model.device, watch)
        self._token_budget = token_budget
        self._layers = cache_layers(model)
        self._forward_parameters = set(inspect.signature(model.forward).parameters)
        self._cache: Any = None  # a SlotCache from the first row on
        self._longest = 0
        self._rows: list[DecodedRow] = []  # they occupy the first slots; their last tokens share a column
        self._end = 0  # column after the rows' last one
        self._waiting: list[DecodedRow] = []  # without a slot
        self._policy_step = 0

    @torch.no_grad()
    def run(self, row_source: RowSource, is_paused: IsPaused = lambda: False, *, policy_step: int = 0) -> None:
        """Decode turns until `row_source` has no unfinished conversation, or until `is_paused`; call again to resume.

        Args:
            row_source: at a time, all of its rows have draws, or none.
            is_paused: called before each forward pass.
            policy_step: the last one whose update the weights contain.

        Raises:
            NotFinite: the model's logits are not finite.
        """
        self._policy_step = policy_step
        while not is_paused():
            wait = not self._rows and not self._waiting
            new_rows = row_source.next_rows(wait=wait)
            if wait and not new_rows and not row_source.size:
                break
            self._waiting += map(DecodedRow, new_rows)
            self._resize(row_source)
            # Longest first: rows that join later mostly fit into the columns left of `end`, and padding stays small.
            self._waiting.sort(key=lambda row: (row.new.order, -len(row.tokens), row.new.id))
            free = self._cache.rows - len(self._rows)
            if self._waiting and free and (not self._rows or free >= self._cache.rows // REFILL_SHARE):
                self._prefill(self._next_prompts(free))
            elif self._rows:
                self._decode_step()
            self._evict(row_source)

    def renew(self) -> None:
        """Compute the keys and values of unfinished rows again, because the model's weights have changed."""
        self._waiting += self._rows
        self._rows = []

    def _resize(self, row_source: RowSource) -> None:
        """Allocate the cache, or a larger one if there are more or longer rows than it was allocated for."""
        rows = min(self._slots, row_source.size)
        if self._cache is not None and self._cache.rows >= rows and self._longest >= row_source.longest:
            return
        self.renew()
        self._longest = max(self._longest, row_source.longest)
        rows = max(rows, 0 if self._cache is None else self._cache.rows)
        self._cache = None  # frees the memory before the new cache needs it
        # Half more columns than the longest row needs, so that `_reserve` rarely has to shift the cache.
        self._cache = SlotCache(rows, self._longest + self._longest // 2, self._layers)

    def _next_prompts(self, free: int) -> list[DecodedRow]:
        """Remove up to `free` rows from `_waiting`, within the token budget of one forward pass; return them."""
        new: list[DecodedRow] = []
        distinct: set[tuple[int, ...]] = set()
        width = 0
        while self._waiting and len(new) < free:
            row = self._waiting[0]
            distinct.add(tuple(row.tokens))
            width = max(width, len(row.tokens))
            if len(distinct) > 1 and len(distinct) * width > (self._token_budget or math.inf):
                break
            new.append(self._waiting.pop(0))
        return sorted(new, key=lambda row: -len(row.tokens))

    def _prefill(self, new: list[DecodedRow]) -> None:
        """Run one forward pass over new rows, the longest first, and draw the next token of each.

        A prompt shared by several rows, as in a group, is computed once; the other rows copy its keys and values.
        """
        sources, distinct = find_distinct([tuple(row.tokens) for row in new])
        width = len(new[0].tokens)
        first = len(self._rows)
        cache = self._cache
        self._reserve(width)
        end = self._end
        order = [*distinct, *(i for i in range(len(new)) if i not in set(distinct))]
        rows = [new[i] for i in order]
        for row in rows:
            row.first_column = end - len(row.tokens)
        ids = np.array([[0] * (width - len(row.tokens)) + row.tokens for row in rows[: len(distinct)]])
        cache.set_window(first, first + len(distinct), end - width, end - width)
        inputs = self._inputs(rows, ids, [sources[i] for i in order])
        logits = self._logits(cache, inputs.ids, inputs.starts[: len(distinct)], end - width, end)
        if sharing := rows[len(distinct) :]:
            begin = min(row.first_column for row in sharing)
            cache.copy_rows(first + inputs.sources[len(distinct) :], first + len(distinct), begin, end)
        self._sampler.append(rows, logits[inputs.sources], inputs.draws, inputs.early, policy_step=self._policy_step)
        self._rows += rows

    def _decode_step(self) -> None:
        """Run one forward pass over the last token of every row and draw the next tokens."""
        cache = self._cache
        rows = self._rows
        if self._end == cache.columns:
            self._shift(0)
        begin = min(row.first_column for row in rows)
        cache.set_window(0, len(rows), begin, self._end)
        inputs = self._inputs(rows, np.array([row.tokens[-1:] for row in rows]))
        self._end += 1
        logits = self._logits(cache, inputs.ids, inputs.starts, begin, self._end)
        self._sampler.append(rows, logits, inputs.draws, inputs.early, policy_step=self._policy_step)

    def _inputs(self, rows: list[DecodedRow], ids: np.ndarray, sources: Sequence[int] = ()) -> _Inputs:
        """Return the inputs of a step over `rows` on the device, from a single copy."""
        starts = np.array([[row.first_column] for row in rows])
        sampling = self._sampler.inputs(rows)
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
            **{name: value for name, value in some.items() if name in self._forward_parameters},
        )
        return output.logits[:, -1].float()

    def _evict(self, row_source: RowSource) -> None:
        """Deliver the finished turns, and move the last rows into the slots of the rows that leave."""
        for i in reversed(range(len(self._rows))):
            row = self._rows[i]
            last = len(self._rows) - 1
            if not row.is_over(self._settings, self._longest):
                continue
            row_source.deliver(row.new.id, row.turn(self._settings))
            if i < last:
                self._cache.copy_rows([last], i, self._rows[last].first_column, self._end)
            self._rows[i] = self._rows[last]
            self._rows.pop()

    def _reserve(self, width: int) -> None:
        """Make room for new rows of up to `width` tokens that end in the same column as the current rows."""
        if not self._rows:
            self._end = width
        elif self._end < width:
            self._shift(min(row.first_column for row in self._rows) + width - self._end)

    def _shift(self, to: int) -> None:
        """Move all rows within the cache, so that the leftmost one starts in column `to`."""
        begin = min(row.first_column for row in self._rows)
        self._cache.shift(slice(len(self._rows)), begin, self._end, to)
        for row in self._rows:
            row.first_column += to - begin
        self._end += to - begin


def draw(logits: Tensor, draws: Tensor) -> Tensor:
    """Sample a token for each row of `logits` `[n, V]`, int64 `[n]`, by inverting its CDF at `draws`, float64 `[n]`."""
    # Scaling by the last value keeps the search inside the vocabulary if rounding leaves that value below 1.
    cdf = logits.softmax(-1).to(torch.float64).cumsum(-1)
    tokens = torch.searchsorted(cdf, (draws * cdf[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)  # NaN gives an index out of range; `check_finite` reports it later


def check_finite(normalisers: Tensor) -> None:
    """Raise NotFinite unless these logsumexp values of logits are finite."""
    if not normalisers.isfinite().all():
        raise NotFinite(
            "the policy's logits are not finite, so no token can be sampled; check train_optim/grad_norm of "
            "the previous steps, and lower actor.optimizer.lr"
        )


def warpers_of(settings: SamplingSettings) -> LogitsProcessorList:
    """Return the logits processors in the order of transformers' `generate`: temperature, top-k, top-p."""
    warpers = LogitsProcessorList()
    if settings.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    return warpers
