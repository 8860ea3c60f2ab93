"""A preallocated key-value cache in which rows can be added and removed during decoding.

A column holds one token of every row. All rows end in the same column, so a row that joins later starts further right,
and the columns left of its start are masked. Keys are rotated by their position within the row, so results do not
depend on the column in which a row starts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


class SlotCache(Cache):
    """Keys and values `[rows, heads, columns, size]` of every layer; a forward pass reads a window of them."""

    def __init__(self, rows: int, columns: int, layers: int) -> None:
        self.columns = columns
        self.rows = rows
        super().__init__(layers=[_SlotLayer(rows, columns) for _ in range(layers)])

    @property
    def is_compileable(self) -> bool:
        """Whether transformers always builds the mask of one token; deciding to skip it would wait for the GPU."""
        return all(layer.is_initialized and layer.keys.is_cuda for layer in self.layers)

    def set_window(self, first: int, last: int, begin: int, end: int) -> None:
        """Set the window of the next forward pass: rows `first:last`, columns `begin:end`; it writes from `end` on."""
        for layer in self.layers:
            layer.window = (first, last, begin, end)

    def copy_rows(self, sources: Tensor | Sequence[int], first: int, begin: int, end: int) -> None:
        """Copy columns `begin:end` of rows `sources`, int64 `[n]`, to the `n` rows from `first` on.

        All rows share one copy: on a GPU, launching a copy per row takes longer than copying.
        """
        last = first + len(sources)
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor[first:last, :, begin:end] = tensor[:, :, begin:end][sources]

    def shift(self, rows: slice, begin: int, end: int, to: int) -> None:
        """Move columns `begin:end` of these rows, so that they start at column `to`."""
        for layer in self.layers:
            for tensor in layer.tensors():
                # clone: source and destination columns may overlap.
                tensor[rows, :, to : to + end - begin] = tensor[rows, :, begin:end].clone()


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self._shape = (rows, columns)
        self.window = (0, rows, 0, 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values with the heads, head size, dtype and device of these tensors."""
        rows, columns = self._shape
        self.keys, self.values = (
            torch.zeros(rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device)
            for like in (key_states, value_states)
        )
        self.is_initialized = True

    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys and values; empty before the first forward pass."""
        return (self.keys, self.values) if self.is_initialized else ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values to the cache; return the window's keys and values, followed by the new ones."""
        # Rotary embeddings under autocast give float32 keys, which attention would round again at every token.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, last, begin, end = self.window
        after = end + key_states.shape[2]
        self.keys[first:last, :, end:after] = key_states
        self.values[first:last, :, end:after] = value_states
        return self.keys[first:last, :, begin:after], self.values[first:last, :, begin:after]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the window's number of columns after the forward pass, and the offset of its first column."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the window's number of columns before the forward pass."""
        return self.window[3] - self.window[2]

    def get_max_length(self) -> int:
        """Return the number of allocated columns."""
        return self._shape[1]


def cache_layers(model: Any) -> int:
    """Return how many layers of `model` cache keys and values; 0 if one caches something else, e.g. recurrent state."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return len(layers) if plain else 0
