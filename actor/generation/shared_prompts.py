"""Hidden states of responses that share prompts: each distinct prompt is computed once instead of once per row.

`transformers` has no equivalent for training. One forward pass computes the keys and values of the prompts; a second
one, over the responses, reads them from a cache, and gradients flow back through the cache.
"""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_triton.actor.generation.cache import cache_layers
from rlhf_triton.models.device_errors import is_device_error, is_out_of_memory
from rlhf_triton.models.gpu import to_device

WORTH_IT = 0.9  # share of a plain pass's tokens above which the second forward pass costs more than it saves
TOLERANCE = 1e-4  # relative to the largest absolute hidden state
ROUNDED_TOLERANCE = 0.05  # the same, in bfloat16


def shared_passes(tokens: Tensor, lengths: Tensor, inside: Tensor) -> tuple[Tensor, ...] | None:
    """Return the inputs of `response_hidden`; None if sharing saves too few tokens (`WORTH_IT`), or none is marked.

    All tensors are on the host; the caller copies the returned ones to the model's device.

    Args:
        tokens: int64 `[B, S]`, padded on the right.
        lengths: int64 `[B]`, tokens of each row.
        inside: bool `[B, S-1]`; the tokens before a row's first marked position are its prompt.
    """
    # The last prompt token. Its hidden state predicts the first response token, so it belongs to the second pass.
    starts = torch.where(inside.any(-1), inside.int().argmax(-1), lengths - 1)
    prompts = [tuple(row[:start]) for row, start in zip(tokens.tolist(), starts.tolist(), strict=True)]
    sources, distinct = find_distinct(prompts)
    before = int(starts.max())
    after = int((lengths - 1 - starts).max())
    if 0 in (before, after) or len(distinct) * before + len(tokens) * after > WORTH_IT * tokens.numel():
        return None
    columns = torch.arange(before + after)
    # Prompts are padded on the left, so that they end in one column and responses begin in the next: without padding
    # inside a row, sliding windows cover the same tokens as in a plain forward pass.
    left_padded = tokens.gather(1, (columns[None, :before] - before + starts[:, None]).clamp(min=0))
    attention = columns[None] >= before - starts[:, None]
    prompts_of_cache = left_padded[distinct], attention[distinct, :before].long()
    places = (starts[:, None] + columns[None, :after]).clamp(max=inside.shape[1] - 1)
    is_response = starts[:, None] + columns[None, :after] < (lengths - 1)[:, None]
    attention = torch.cat([attention[:, :before], is_response], dim=1).long()
    marked = (inside.gather(1, places) & is_response).nonzero(as_tuple=True)
    return *prompts_of_cache, torch.tensor(sources), tokens.gather(1, places), attention, *marked


def response_hidden(
    body: Any,
    prompts: Tensor,
    prompt_mask: Tensor,
    sources: Tensor,
    responses: Tensor,
    attention: Tensor,
    rows: Tensor,
    columns: Tensor,
) -> Tensor:
    """Return the hidden states `[N, H]` at the N positions that `inside` marks, row by row; differentiable.

    Args:
        body: a causal transformer that caches keys and values; `can_share` must be true for its model.
        prompts, ...: the tensors from `shared_passes`, on the body's device.
    """
    cache = DynamicCache(config=body.config.get_text_config(decoder=True))
    _forward(body, prompts, prompt_mask, cache)
    cache.batch_select_indices(sources)
    return _forward(body, responses, attention, cache)[rows, columns]


@torch.no_grad()
def can_share(model: Any) -> bool:
    """Return whether `response_hidden` matches a plain forward pass of this causal LM, on a small test batch.

    Another precision runs other kernels: a model that computes in bfloat16 must pass in float32, where the tolerance is
    small, and under autocast.
    """
    if not cache_layers(model):
        return False
    body = model.base_model
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = (torch.arange(3 * 12).view(3, 12) * 7 + 1) % vocabulary
    tokens[1, :6] = tokens[0, :6]
    lengths = torch.tensor([12, 9, 11])
    positions = torch.arange(11)[None]
    inside = (positions >= torch.tensor([5, 5, 3])[:, None]) & (positions < lengths[:, None] - 1)
    attention = (torch.arange(12)[None] < lengths[:, None]).long()
    passes = shared_passes(tokens, lengths, inside)
    assert passes is not None
    ids, mask, rows, columns, *device_passes = to_device(
        model.device, tokens, attention, *inside.nonzero(as_tuple=True), *passes
    )
    plain = body(input_ids=ids, attention_mask=mask, use_cache=False)[0][rows, columns]
    try:
        shared = response_hidden(body, *device_passes)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # raised by a model's own code
        if is_out_of_memory(error) or is_device_error(error):
            raise
        return False
    tolerance = ROUNDED_TOLERANCE if torch.is_autocast_enabled(model.device.type) else TOLERANCE
    return float((shared - plain).abs().max()) <= tolerance * max(1.0, float(plain.abs().max()))


def _forward(body: Any, ids: Tensor, attention: Tensor, cache: DynamicCache) -> Tensor:
    """Return hidden states `[B, T, H]` for `ids` `[B, T]`; `attention` also covers the cached tokens."""
    inputs: dict[str, Any] = {}
    if "position_ids" in inspect.signature(body.forward).parameters:
        inputs["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return body(input_ids=ids, attention_mask=attention, past_key_values=cache, use_cache=True, **inputs)[0]


def find_distinct(prompts: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return each prompt's index among the distinct prompts, and each distinct prompt's first index in `prompts`."""
    places: dict[Hashable, int] = {}
    first: list[int] = []
    for i, prompt in enumerate(prompts):
        if places.setdefault(prompt, len(first)) == len(first):
            first.append(i)
    return [places[prompt] for prompt in prompts], first
