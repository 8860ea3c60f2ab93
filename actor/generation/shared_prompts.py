"""Hidden states of responses whose prompts are shared: a group's prompt goes through the body once, not once a row.

`transformers` has nothing like it for training. The prompt's keys and values come from a forward of their own; the rows
of the responses read them from a cache, and gradients flow back through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from actor.generation.cache import cache_layers

WORTH_IT = 0.9  # share of a plain forward's tokens: a second forward costs more than the few tokens above this
TOLERANCE = 1e-4  # of the hidden states' largest value


def response_hidden(body: Any, tokens: Tensor, lengths: Tensor, inside: Tensor) -> Tensor | None:
    """Hidden states `[N, H]` at the N positions that `inside` marks, row by row; differentiable.

    Args:
        body: a causal transformer that keeps keys and values, as `can_share` finds out.
        tokens: int64 `[B, S]`, padded on the right.
        lengths: int64 `[B]`.
        inside: bool `[B, S-1]`; the tokens before a row's first marked position are its prompt.

    Returns: None where a plain forward has hardly more tokens.
    """
    starts = torch.where(inside.any(-1), inside.int().argmax(-1), lengths.to(inside.device) - 1)  # of the prompt's end
    prompts = [tuple(row[:start]) for row, start in zip(tokens.tolist(), starts.tolist(), strict=True)]
    sources, distinct = find_distinct(prompts)
    before, after = int(starts.max()), int((lengths.to(starts.device) - 1 - starts).max())
    if before == 0 or len(distinct) * before + len(tokens) * after > WORTH_IT * tokens.numel():
        return None
    device, cache = tokens.device, DynamicCache(config=body.config.get_text_config(decoder=True))
    columns = torch.arange(before + after, device=device)
    # Prompts end in one column and responses begin in the next: no padding within a row, so windows slide as in it.
    left = tokens.gather(1, (columns[None, :before] - before + starts[:, None]).clamp(min=0))
    attention = columns[None] >= before - starts[:, None]
    chosen = torch.tensor(distinct, device=device)
    _forward(body, left[chosen], attention[chosen, :before], cache)
    cache.batch_select_indices(torch.tensor(sources, device=device))
    places = (starts[:, None] + columns[None, :after]).clamp(max=inside.shape[1] - 1)
    is_response = starts[:, None] + columns[None, :after] < (lengths.to(device) - 1)[:, None]
    attention = torch.cat([attention[:, :before], is_response], dim=1)
    hidden = _forward(body, tokens.gather(1, places), attention, cache)
    return hidden[inside.gather(1, places) & is_response]


@torch.no_grad()
def can_share(model: Any) -> bool:
    """Whether a causal LM's body gives the same hidden states this way as in a plain forward; tried on a few tokens."""
    if not cache_layers(model):
        return False
    body, device = model.base_model, model.device
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = (torch.arange(3 * 12, device=device).view(3, 12) * 7 + 1) % vocabulary
    tokens[1, :6] = tokens[0, :6]
    lengths = torch.tensor([12, 9, 11], device=device)
    positions = torch.arange(11, device=device)[None]
    inside = (positions >= torch.tensor([5, 5, 3], device=device)[:, None]) & (positions < lengths[:, None] - 1)
    attention = (torch.arange(12, device=device)[None] < lengths[:, None]).long()
    plain = body(input_ids=tokens, attention_mask=attention, use_cache=False)[0][:, :-1][inside]
    try:
        shared = response_hidden(body, tokens, lengths, inside)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):  # from a model's own code
        return False
    return shared is not None and float((shared - plain).abs().max()) <= TOLERANCE * max(1.0, float(plain.abs().max()))


def _forward(body: Any, ids: Tensor, attention: Tensor, cache: DynamicCache) -> Tensor:
    """Hidden states `[B, columns of ids, H]`; `attention` covers the columns in the cache too."""
    inputs: dict[str, Any] = {}
    if "position_ids" in inspect.signature(body.forward).parameters:
        inputs["position_ids"] = (attention.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return body(input_ids=ids, attention_mask=attention.long(), past_key_values=cache, use_cache=True, **inputs)[0]


def find_distinct(prompts: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return which of the distinct prompts each one equals, and the index at which each of those first comes."""
    places: dict[Hashable, int] = {}
    first: list[int] = []
    for i, prompt in enumerate(prompts):
        if places.setdefault(prompt, len(first)) == len(first):
            first.append(i)
    return [places[prompt] for prompt in prompts], first
