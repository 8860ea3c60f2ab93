"""Keeps transformers from inspecting the inputs of a forward pass, which would make the host wait for the GPU."""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils


def avoid_host_waits(model: Any) -> None:
    """Disable transformers' searches for packed rows, which never occur here, and for padding; only on a GPU.

    Affects the whole process. Changes no result beyond rounding: an encoder's attention then uses its mask even if no
    row has padding. On a CPU, the searches cost next to nothing.
    """
    if model.device.type != "cpu":
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        masking_utils._ignore_bidirectional_mask_sdpa = lambda padding, length, local=None: (
            padding is None and (local is None or length < local)
        )
        PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
        module: Any = sys.modules[type(model).__module__]
        if hasattr(module, "make_log_bucket_position"):  # DeBERTa's
            module.make_log_bucket_position = _log_buckets


def _log_buckets(relative: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Return the bucket of each relative position like transformers, but without copying a number to the GPU."""
    mid = bucket_size // 2
    far = relative.abs().clamp(min=mid - 1)
    logs = (far / mid).log() / torch.tensor((max_position - 1) / mid).log() * (mid - 1)
    return torch.where(far <= mid, relative.type_as(logs), (logs.ceil() + mid) * relative.sign())
