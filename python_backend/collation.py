"""Ragged rows as one padded batch.
Given: token rows. Returns: ids, attention mask and lengths as tensors on a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def collate(
    rows: Sequence[np.ndarray], device: torch.device | str, multiple_of: int = 1, *, max_width: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids `[n, S]`, padded on the right with 0, attention mask `[n, S]` and lengths `[n]` of n token rows.

    Args:
        rows: int64 `[length_i]` each.
        multiple_of: S is the longest row's length, rounded up to a multiple of this many tokens,
        max_width: but not above these (the model's positions).
    """
    lengths = torch.tensor([row.size for row in rows], dtype=torch.int64)
    ids = torch.zeros((len(rows), _padded_width(int(lengths.max()), multiple_of, max_width)), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.size] = torch.from_numpy(row)
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return ids.to(device), attention.to(device), lengths.to(device)


def _padded_width(longest: int, multiple_of: int, max_width: int | None) -> int:
    width = -(-longest // multiple_of) * multiple_of
    return width if max_width is None else max(longest, min(width, max_width))
