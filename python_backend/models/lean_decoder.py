"""A faster forward pass for the Llama, Mistral, Qwen2 and Qwen3 families: the same weights with fewer operations.

For rewards, the last layer computes one token per row. The faster pass is used only if it matches transformers' own
forward pass on a probe batch, which is checked at every load.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = 1e-5  # relative to the largest hidden state
PROBE_LENGTHS = (7, 3, 12)  # different lengths, so that padding and the choice of the last token are checked as well


class LeanDecoder:
    """The faster forward pass over the modules of a body: the rows are packed one behind the other, without padding.

    Holds references to the modules, not copies, and so always uses their current weights.
    """

    def __init__(self, body: Any) -> None:
        config = body.config
        self._body = body
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._norms_heads = config.model_type == "qwen3"
        positions = torch.arange(config.max_position_embeddings)[None]
        cos, sin = body.rotary_emb(body.embed_tokens.weight[:1, None], positions)
        self._cos, sin = cos[0].float(), sin[0].float()  # [positions, head_dim]
        first, second = sin.chunk(2, dim=-1)
        self._sin = torch.cat((-first, second), dim=-1)  # with the sign of what it is multiplied by; see `_rotated`

    def hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return hidden states `[B, S, H]` of `ids` `[B, S]`, with `lengths` `[B]`; 0 at padding, on the right."""
        inside = torch.arange(ids.shape[1]) < lengths[:, None]
        packed = self.packed(ids[inside], lengths.tolist())
        hidden = packed.new_zeros(*ids.shape, packed.shape[-1])
        hidden[inside] = packed
        return hidden

    def packed(self, tokens: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return hidden states `[N, H]` of the N `tokens` of rows of these `sizes`, one behind the other."""
        rows = _PackedRows(sizes, self._cos, self._sin)
        x = F.embedding(tokens, self._body.embed_tokens.weight)
        for layer in self._body.layers:
            x = self._layer(layer, x, rows)
        return self._normed(self._body.norm, x)

    def last_hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return hidden states `[B, H]`: index length-1 of each row of `ids` `[B, S]`, with `lengths` `[B]`.

        The last layer needs keys and values of all tokens, but queries, attention and MLP only of one token per row.
        """
        inside = torch.arange(ids.shape[1]) < lengths[:, None]
        rows = _PackedRows(lengths.tolist(), self._cos, self._sin)
        x = F.embedding(ids[inside], self._body.embed_tokens.weight)
        for layer in self._body.layers[:-1]:
            x = self._layer(layer, x, rows)
        layer, ends = self._body.layers[-1], lengths.cumsum(0) - 1
        normed = self._normed(layer.input_layernorm, x)
        key, value = self._keys_and_values(layer.self_attn, normed, rows)
        query = _rotated(self._queries(layer.self_attn, normed[ends]), rows.cos[ends], rows.sin[ends])
        # The query is a row's last token, so it may attend to all tokens: no causal mask is needed.
        attended = self._attend(rows.groups(query, last=True), rows.groups(key), rows.groups(value))
        return self._normed(self._body.norm, self._after(layer, x[ends], attended))

    def _layer(self, layer: Any, x: Tensor, rows: "_PackedRows") -> Tensor:
        normed = self._normed(layer.input_layernorm, x)
        query = _rotated(self._queries(layer.self_attn, normed), rows.cos, rows.sin)
        key, value = self._keys_and_values(layer.self_attn, normed, rows)
        attended = self._attend(*map(rows.groups, (query, key, value)), is_causal=True)
        return self._after(layer, x, attended)

    def _after(self, layer: Any, x: Tensor, attended: Tensor) -> Tensor:
        x = _linear(layer.self_attn.o_proj, attended).add_(x)
        mlp, normed = layer.mlp, self._normed(layer.post_attention_layernorm, x)
        gate = F.silu(_linear(mlp.gate_proj, normed), inplace=True)
        return _linear(mlp.down_proj, gate.mul_(_linear(mlp.up_proj, normed))).add_(x)

    def _queries(self, attention: Any, x: Tensor) -> Tensor:
        query = self._heads(attention.q_proj, x)
        return self._normed(attention.q_norm, query) if self._norms_heads else query

    def _keys_and_values(self, attention: Any, x: Tensor, rows: "_PackedRows") -> tuple[Tensor, Tensor]:
        key = self._heads(attention.k_proj, x)
        key = self._normed(attention.k_norm, key) if self._norms_heads else key
        return _rotated(key, rows.cos, rows.sin), self._heads(attention.v_proj, x)

    def _heads(self, layer: Any, x: Tensor) -> Tensor:
        """Project `x` `[N, H]` and split it into heads: `[N, heads, head_dim]`."""
        return _linear(layer, x).view(len(x), -1, self._head_dim)

    def _attend(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], **causal: Any) -> Tensor:
        """Return the outputs `[N, heads * head_dim]` of the rows' attention, each of which is within its row."""
        gqa = self._num_kv_heads != self._num_heads
        attended = [
            F.scaled_dot_product_attention(*group, enable_gqa=gqa, **causal).transpose(1, 2).flatten(0, 1).flatten(1)
            for group in zip(queries, keys, values, strict=True)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


class _PackedRows:
    """Where rows are in a tensor of all their N tokens, and these tokens' rotary embeddings `[N, 1, head_dim]`."""

    def __init__(self, sizes: Sequence[int], cos: Tensor, sin: Tensor) -> None:
        positions = torch.cat([torch.arange(size) for size in sizes])
        self.cos, self.sin = cos[positions][:, None], sin[positions][:, None]
        # Neighbours of one length share a call of attention.
        self._runs = [(len(list(run)), size) for size, run in itertools.groupby(sizes)]

    def groups(self, x: Tensor, *, last: bool = False) -> list[Tensor]:
        """Return views `[rows, heads, size, head_dim]` of `x` `[N, heads, head_dim]`, one for each run of one length.

        `last`: `x` has the last token of each row only.
        """
        parts = x.split([rows if last else rows * size for rows, size in self._runs])
        return [
            part.unflatten(0, (rows, -1)).transpose(1, 2) for part, (rows, _) in zip(parts, self._runs, strict=True)
        ]


def lean_decoder(model: Any) -> LeanDecoder | None:
    """Return the lean forward pass of a model's body, or None if the model does not support it.

    The model must belong to a family in `FAMILIES`, be in float32 on the CPU, use default rotary embeddings, SiLU and
    no sliding attention, and give the same hidden states as transformers on the probe batch.
    """
    body, config = model.base_model, model.config
    if config.model_type not in FAMILIES or model.device.type != "cpu" or model.dtype != torch.float32:
        return None
    if model.tp_size is not None:  # a rank has only a part of each layer
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None
    if rope.get("rope_type", "default") != "default" or config.hidden_act != "silu" or slides:
        return None
    lean = LeanDecoder(body)
    return lean if _is_equal(lean, body) else None


@torch.no_grad()
def _is_equal(lean: LeanDecoder, body: Any) -> bool:
    longest = min(max(PROBE_LENGTHS), body.config.max_position_embeddings)
    lengths = torch.tensor([min(length, longest) for length in PROBE_LENGTHS])
    ids = (torch.arange(len(lengths) * longest) % body.config.vocab_size).view(len(lengths), longest)
    own = body(input_ids=ids, use_cache=False)[0]
    limit = TOLERANCE * max(1.0, float(own.abs().max()))
    ends = own[torch.arange(len(lengths)), lengths - 1]
    inside = torch.arange(longest) < lengths[:, None]
    differences = (lean.hidden(ids, lengths) - own)[inside], lean.last_hidden(ids, lengths) - ends
    return all(float(difference.abs().max()) <= limit for difference in differences)


def _linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to `x` `[N, heads, head_dim]`; `cos` and `sin`, whose first half is negated,
    broadcast to its shape.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1).mul_(sin).add_(x * cos)
