"""Collates token rows of different lengths into one padded batch, unless padding changes a model's outputs.

Convolutions (ConvBERT), Fourier transforms (FNet), a summary of the last position (XLNet) and hashed attention (YOSO)
mix padding into the tokens. A row's outputs would then depend on the rows that share its forward pass.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.row_length import num_positions, stable_length
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.gpu import Array, to_device
from rlhf_triton.wire.contract import Limits

logger = logging.getLogger(__name__)
ModelForward = Callable[..., Tensor]
# tokens of the two probe rows
SHORT = 3
LONG = 9
WIDE = 72  # a width above the 64 tokens of a chunk of attention, as in Reformer
SAME_SHAPE = 1e-5  # relative to the largest output: forward passes of equal shape, with different padding ids
ANOTHER_SHAPE = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
}  # rounding depends on the shape of a forward pass


def collate(
    rows: Sequence[np.ndarray], device: torch.device | str, width: int | None = None, *others: Array
) -> tuple[Tensor, ...]:
    """Copy rows to the device; return token ids `[n, S]`, right-padded with 0, attention mask `[n, S]`, lengths `[n]`.

    Args:
        rows: n rows of token ids, each int64 `[length_i]`.
        width: S in tokens; default: the length of the longest row.
        others: further arrays to copy to the device; returned after the three tensors.
    """
    lengths = torch.tensor([row.size for row in rows], dtype=torch.int64)
    ids = torch.from_numpy(padded_rows(rows, width or int(lengths.max()), np.int64))
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return to_device(torch.device(device), ids, attention, lengths, *others)


def limits_of(model: Any) -> Limits:
    """Return the limits of a Hugging Face model: vocabulary size and maximum row length in tokens.

    The maximum length is at most `stable_length`: a longer row would change the outputs of other rows.
    """
    positions = num_positions(lambda name: getattr(model.config, name, None))  # it knows further names for the first
    for name, module in model.named_modules():  # RoBERTa's position ids start after its padding index
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    limits = positions, stable_length(model.config.to_dict())
    positive = [int(limit) for limit in limits if limit and limit > 0]
    return Limits(model.get_input_embeddings().num_embeddings, min(positive, default=None))


@torch.no_grad()
def depends_on_padding(model: Any, forward: ModelForward, *, is_masked: bool = True) -> bool:
    """Return whether the outputs of `forward` for a row depend on its padding; if so, log by how much.

    Compares the outputs of a short row alone, next to a longer row, with another padding id, and in a wider batch.

    Args:
        forward: maps ids and attention mask `[B, S]` to outputs `[B, S, H]` or `[B, A]`.
        is_masked: `forward` uses the mask. Without it, padding is computed like tokens; in a mixture of experts, the
            padding's experts then change the shapes in which other rows are computed.

    Raises:
        CheckpointError: the forward pass draws random numbers (Reformer), so outputs are not reproducible.
    """
    random_state = _random_state(model.device)
    limits = limits_of(model)
    longest = min(LONG, limits.max_length or LONG)
    long = torch.arange(1, 1 + longest, device=model.device) % limits.vocab_size
    short = long[-SHORT:]

    def outputs(rows: list[Tensor], width: int, padding: int = 0) -> list[Tensor]:
        ids = torch.stack([F.pad(row, (0, width - len(row)), value=padding) for row in rows])
        attention = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
        padded = forward(ids, attention).float()
        return [
            row_outputs[: len(row)] if padded.ndim == 3 else row_outputs
            for row_outputs, row in zip(padded, rows, strict=True)
        ]

    (alone,) = outputs([short], len(short))
    (beside, longer) = outputs([short, long], longest)
    (changed, _) = outputs([short, long], longest, padding=1)
    behind = outputs([long, short], min(WIDE, limits.max_length or WIDE))

    def difference(*pairs: tuple[Tensor, Tensor]) -> float:
        return max(float((a - b).abs().max()) / (float(b.abs().max()) or 1.0) for a, b in pairs)

    if not torch.equal(random_state, _random_state(model.device)):
        raise CheckpointError(
            f"{type(model).__name__} draws random numbers in each forward pass, so its outputs cannot be "
            "reproduced; use another architecture"
        )
    by_content = difference((changed, beside))
    by_shape = difference((beside, alone), (behind[0], longer), (behind[1], alone))
    tolerance = ANOTHER_SHAPE[model.dtype]
    if by_content <= (SAME_SHAPE if is_masked else tolerance) and by_shape <= tolerance:
        return False
    logger.warning(
        "%s: padding changes the outputs of a row by %.2g of the largest output, so each row runs in a separate "
        "forward pass",
        type(model).__name__,
        max(by_content, by_shape),
    )
    return True


def one_by_one(forward: ModelForward, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
    """Run `forward` on each row separately, without its padding; return the outputs of all rows.

    Token outputs `[B, S, A]` are 0 at padding; pooled outputs are `[B, A]`. Waits for the device once.
    """
    outputs = []
    for i, length in enumerate(attention.sum(1).tolist()):
        row = {name: each[i : i + 1, :length] for name, each in types.items()}
        output = forward(ids[i : i + 1, :length], attention[i : i + 1, :length], **row)[0]
        outputs.append(F.pad(output, (0, 0, 0, ids.shape[1] - length)) if output.ndim == 2 else output)
    return torch.stack(outputs)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
