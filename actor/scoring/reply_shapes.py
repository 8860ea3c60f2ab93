"""Shapes of servers' replies: a proxy, or a server that is none of ours, may have answered."""

import numpy as np

from rlhf_triton.client.errors import RequestFailed


def check_shape(name: str, output: np.ndarray, rows: int, width: int, *, is_padded: bool = False) -> None:
    """Check that an output has the shape `[rows, width]`; with `is_padded` it may be wider. Raises RequestFailed."""
    shape = [*output.shape]
    if is_padded and len(shape) == 2:
        shape[1] = min(shape[1], width)
    if shape != [rows, width]:
        raise RequestFailed(
            f"the server returned {name} of shape {[*output.shape]}, but {[rows, width]} is expected; check that "
            "Triton itself answers, without a proxy that changes replies"
        )
