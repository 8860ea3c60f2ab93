"""A faster forward pass for the Llama and Qwen2 families: the same weights with fewer operations.

For rewards, the last layer computes one token per row. The faster pass is used only if it matches transformers' own
forward pass on a probe batch, which is checked at every load.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FAMILIES = ("llama", "qwen2")
TOLERANCE = 1e-5  # relative to the largest hidden state
PROBE_LENGTHS = (7, 3, 12)  # different lengths, so that padding and the choice of the last token are checked as well


class LeanDecoder:
    """The faster forward pass over the modules of a body, for rows padded on the right.

    Holds references to the modules, not copies, and so always uses their current weights.
    """

    def __init__(self, body: Any) -> None:
        config = body.config
        self._body = body
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        positions = torch.arange(config.max_position_embeddings)[None]
        cos, sin = body.rotary_emb(body.embed_tokens.weight[:1, None], positions)
        self._cos, self._sin = cos[None].float(), sin[None].float()  # [1, 1, positions, head_dim]

    def hidden(self, ids: Tensor) -> Tensor:
        """Return hidden states `[B, S, H]` of `ids` `[B, S]`, padded on the right; undefined at padding."""
        x = F.embedding(ids, self._body.embed_tokens.weight)
        for layer in self._body.layers:
            x = self._layer(layer, x)
        return self._normed(self._body.norm, x)

    def last_hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return hidden states `[B, H]`: index length-1 of each row of `ids` `[B, S]`, with `lengths` `[B]`.

        The last layer needs keys and values of all tokens, but queries, attention and MLP only of one token per row.
        """
        x = F.embedding(ids, self._body.embed_tokens.weight)
        for layer in self._body.layers[:-1]:
            x = self._layer(layer, x)
        layer = self._body.layers[-1]
        normed = self._normed(layer.input_layernorm, x)
        rows, ends = torch.arange(ids.shape[0]), lengths - 1
        key, value = self._keys_and_values(layer.self_attn, normed)
        query = _linear(layer.self_attn.q_proj, normed[rows, ends]).view(len(rows), self._num_heads, 1, self._head_dim)
        at_end = (self._cos[0, 0, ends][:, None, None], self._sin[0, 0, ends][:, None, None])
        visible = torch.arange(ids.shape[1])[None] < lengths[:, None]
        # The query is a row's last token, so it may attend to all tokens but padding: no causal mask is needed.
        mask = None if bool(visible.all()) else visible[:, None, None]
        attended = self._attend(_rotated(query, *at_end), key, value, attn_mask=mask)
        return self._normed(self._body.norm, self._after(layer, x[rows, ends], attended.flatten(1)))

    def _layer(self, layer: Any, x: Tensor) -> Tensor:
        normed = self._normed(layer.input_layernorm, x)
        query = _rotated(self._heads(layer.self_attn.q_proj, normed), *self._rotation(x.shape[1]))
        key, value = self._keys_and_values(layer.self_attn, normed)
        attended = self._attend(query, key, value, is_causal=True)
        return self._after(layer, x, attended.transpose(1, 2).flatten(2))

    def _after(self, layer: Any, x: Tensor, attended: Tensor) -> Tensor:
        x = x + _linear(layer.self_attn.o_proj, attended)
        mlp, normed = layer.mlp, self._normed(layer.post_attention_layernorm, x)
        return x + _linear(mlp.down_proj, F.silu(_linear(mlp.gate_proj, normed)).mul_(_linear(mlp.up_proj, normed)))

    def _keys_and_values(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        key = _rotated(self._heads(attention.k_proj, x), *self._rotation(x.shape[1]))
        return key, self._heads(attention.v_proj, x)

    def _heads(self, layer: Any, x: Tensor) -> Tensor:
        """Project `x` `[B, S, H]` and split it into heads: `[B, heads, S, head_dim]`."""
        return _linear(layer, x).view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _rotation(self, width: int) -> tuple[Tensor, Tensor]:
        return self._cos[:, :, :width], self._sin[:, :, :width]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        grouped = self._num_kv_heads != self._num_heads
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **mask)

    def _normed(self, norm: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


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
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
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
    differences = (lean.hidden(ids) - own).abs().max(), (lean.last_hidden(ids, lengths) - ends).abs().max()
    return all(float(difference) <= limit for difference in differences)


def _linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to `x` `[B, heads, S, head_dim]`; `cos` and `sin` broadcast to its shape."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
