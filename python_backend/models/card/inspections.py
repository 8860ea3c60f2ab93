"""Keeps transformers from inspecting the inputs of a forward pass without a mask: the host would wait for the card."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, masking_utils


def skip_inspections(model: Any) -> None:
    """Skip the search for packed rows, of which there are none here, and for padding; only if the model is on a card.

    Both are of the whole process, and change no result. On a CPU they cost next to nothing.
    """
    if model.device.type != "cpu":
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
