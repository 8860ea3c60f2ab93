"""Sends tensors between ranks through their store: unlike in a collective, no rank waits for another."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor


class Mailbox:
    """Messages between this rank and the others; each is read once, in the order of sending."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank = rank
        self._store = store
        self._sent = Counter[int]()
        self._received = Counter[int]()

    def send(self, to: int, tensors: Mapping[str, Tensor]) -> None:
        """Send CPU tensors to rank `to`."""
        self._store.set(f"{self._rank} to {to}: {self._sent[to]}", save(dict(tensors)))
        self._sent[to] += 1

    def receive(self, sender: int) -> dict[str, Tensor] | None:
        """Return the next message of rank `sender`, or None if there is none yet."""
        key = f"{sender} to {self._rank}: {self._received[sender]}"
        if not self._store.check([key]):
            return None
        tensors = load(self._store.get(key))
        self._store.delete_key(key)
        self._received[sender] += 1
        return tensors


def as_tensor(value: Any) -> Tensor:
    """Encode a value as JSON in a uint8 tensor; dataclasses become objects, arrays lists, and other types text."""

    def plain(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return part.tolist()
        return vars(part) if dataclasses.is_dataclass(part) else str(part)

    return torch.frombuffer(bytearray(json.dumps(value, default=plain).encode()), dtype=torch.uint8)


def value_of(tensor: Tensor) -> Any:
    """Decode a tensor that `as_tensor` returned."""
    return json.loads(tensor.numpy().tobytes())
