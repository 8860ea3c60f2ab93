"""Tensors that ranks send one another through their store: unlike a collective, no rank waits for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from python_backend.errors import RlhfError
from python_backend.training.ranks import RankFailed

ERROR = "error"


class Mailbox:
    """The messages between this rank and the others; each is read once, in the order in which it was sent."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank, self._store = rank, store
        self._sent, self._received = Counter[int](), Counter[int]()

    def send(self, to: int, tensors: Mapping[str, Tensor]) -> None:
        """Send CPU tensors to rank `to`."""
        self._store.set(f"{self._rank} to {to}: {self._sent[to]}", save(dict(tensors)))
        self._sent[to] += 1

    def send_error(self, to: int, error: RlhfError | OSError) -> None:
        """Make the next `receive` of rank `to` raise RankFailed."""
        text = f"rank {self._rank}: {error}".encode()
        self.send(to, {ERROR: torch.frombuffer(bytearray(text), dtype=torch.uint8)})

    def receive(self, sender: int) -> dict[str, Tensor] | None:
        """Return the next message of rank `sender`, or None if there is none yet. Raises RankFailed."""
        key = f"{sender} to {self._rank}: {self._received[sender]}"
        if not self._store.check([key]):
            return None
        tensors = load(self._store.get(key))
        self._store.delete_key(key)
        self._received[sender] += 1
        if ERROR in tensors:
            raise RankFailed(bytes(tensors[ERROR].tolist()).decode())
        return tensors
