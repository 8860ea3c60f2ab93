"""One rank of a served model other than rank 0.

Runs as `python -m <this module> FD PARENT RANK SIZE THREADS DEVICE RENDEZVOUS`. Rank 0, the model's own process, sends
one message per load and per forward pass over the socket `FD`. Between messages, this process does not wait in a
collective, which would time out while the model is idle. Ends when rank 0 ends.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_triton.models.gpu import staging
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.models.out_of_memory import RankOutOfMemory, on_rank
from rlhf_triton.models.tensor_parallel import RankGroup, release
from rlhf_triton.process import die_with_parent, keep_freed_memory
from rlhf_triton.python_backend.serving.loaders import Model, load_model

logger = logging.getLogger(__name__)


def load_part(group: RankGroup, loader: str, folder: Path, served: Model | None, options: Mapping[str, Any]) -> Any:
    """Load this rank's part of a model. Every rank must call this at the same time. Arguments as in `load_model`.

    Raises:
        CheckpointError: the model cannot be loaded on this rank or on another one.
        RankFailed: another rank has ended.
    """
    model: Any = None
    try:
        with group.run_on_all_ranks(), staging(group.device):  # a new thread would start on the first GPU
            model = load_model(loader, folder, served, {**options, "group": group, "device": str(group.device)})
    except Exception:
        if model is not None:
            release(model.model)
        raise
    return model


class Rank:
    """Executes rank 0's messages in order; loads run in background threads."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._models: dict[int, Model] = {}
        self._loaded = threading.Condition()
        self._loading = threading.Lock()  # rank 0 may start the next load while a failed one is still ending here

    def execute(self, message: dict[str, Any], payload: Callable[[], bytes]) -> None:
        """Execute one message. Raises if this rank is then out of sync with the others.

        `payload`: reads the tokens of all rows, int64, which follow a forward-pass message.
        """
        for key in message["unused"]:
            model = self._models.pop(key, None)
            if model is not None:  # None: the load failed on this rank
                release(model.model)
        if message["op"] == "load":
            threading.Thread(target=self._load, args=(message,), name="load", daemon=True).start()
        else:
            rows = np.split(np.frombuffer(payload(), np.int64), np.cumsum(message["lengths"])[:-1])
            self._model(message["key"]).launch(
                rows, message["width"]
            )()  # outputs are discarded: rank 0 has them as well

    def _load(self, message: dict[str, Any]) -> None:
        served = None if message["served"] is None else self._model(message["served"])
        try:
            with self._loading:
                model = load_part(self._group, message["loader"], Path(message["folder"]), served, message["options"])
        except Exception as error:  # thread edge: rank 0 gets the same error, and no message will name this model
            logger.warning("rank %d: %s", torch.distributed.get_rank(), error)
            return
        with self._loaded:
            self._models[message["key"]] = model
            self._loaded.notify_all()

    def _model(self, key: int) -> Model:
        with self._loaded:  # rank 0 may use a model before the thread that loaded it here has stored it
            self._loaded.wait_for(lambda: key in self._models)
        return self._models[key]


def main() -> None:
    """Follow rank 0 until it closes the socket."""
    fd, parent, number, size, threads = map(int, sys.argv[1:6])
    device, rendezvous = sys.argv[6:]
    if not die_with_parent(parent):  # end with rank 0, even when stuck in a collective
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # tritonserver's threads block signals, and the mask is inherited
    quiet_transformers()
    keep_freed_memory()
    torch.set_num_threads(threads)
    connection = Connection(fd)
    rank = Rank(RankGroup(number, size, device, Path(rendezvous)))
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            with on_rank(number, device, "token_budget"):
                rank.execute(message, connection.recv_bytes)
        except RankOutOfMemory as error:
            connection.send_bytes(str(error).encode())  # rank 0 reports it
            os._exit(1)  # at once: leaving the process group would wait for the other ranks


if __name__ == "__main__":
    main()
