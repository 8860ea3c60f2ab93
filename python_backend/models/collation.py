"""Collates token rows of different lengths into one padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def collate(
    rows: Sequence[np.ndarray], device: torch.device | str, width: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids `[n, S]` padded on the right with 0, their attention mask `[n, S]`, and the row lengths `[n]`.

    Args:
        rows: n rows of token ids, each int64 `[length_i]`.
        width: S in tokens, at least the length of the longest row, which is the default.
    """
    lengths = torch.tensor([row.size for row in rows], dtype=torch.int64)
    ids = torch.zeros((len(rows), width or int(lengths.max())), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.size] = torch.from_numpy(row)
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return ids.to(device), attention.to(device), lengths.to(device)
