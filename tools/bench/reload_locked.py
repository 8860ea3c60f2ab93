"""A critic server with one lock over inference and training, as the replaced system had it; a process of its own.
Given: a critic's folder, the trainer's settings, ports. Returns: `critic_infer` and `critic_train` through PyTriton.
Model and update are the project's own code: what differs is the lock, and weights that change in place.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from python_backend.config import TrainerSection
from python_backend.contract import (
    CRITIC_INFER,
    CRITIC_TRAIN,
    LOSS_MEAN,
    MASK,
    PREV_VALUES,
    RETURNS,
    RUN_ID,
    SEQUENCE_LENGTHS,
    STEP,
    TOKENS,
    VALUES,
    WEIGHTS_VERSION,
)
from python_backend.modeling import load_critic, quiet_transformers
from python_backend.training_payload import train_payload
from trainer.critic_update import CriticUpdate

PAYLOAD = (TOKENS, SEQUENCE_LENGTHS, RETURNS, PREV_VALUES, MASK)


class LockedCritic:
    """One critic, one lock."""

    def __init__(self, folder: Path, settings: TrainerSection) -> None:
        quiet_transformers()
        torch.set_num_threads(settings.threads)
        self._critic = load_critic(folder)
        self._update = CriticUpdate(self._critic, settings)
        self._lock = threading.Lock()
        self._version = 0

    def values(self, rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, int]:
        """Values float32 `[B, width]` of the rows, and the version; waits while an update is under way."""
        with self._lock:
            padded = np.zeros((len(rows), width), np.float32)
            for i, values in enumerate(self._critic.values(rows, width)):
                padded[i, : values.size] = values
            return padded, self._version

    def train(self, arrays: Mapping[str, np.ndarray]) -> tuple[float, int]:
        """One update; its loss and the new version."""
        with self._lock:
            payload = train_payload(arrays, self._critic.limits)
            report = self._update.train(payload, lambda done: None)
            self._version += 1
            return report.loss_mean, self._version


def bind(triton: Triton, critic: LockedCritic) -> None:
    """Serve it under the names of the contract."""

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        torch.set_num_threads(1)  # torch keeps a part of this setting per thread
        tokens, lengths = inputs[TOKENS], inputs[SEQUENCE_LENGTHS][:, 0]
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        values, version = critic.values(rows, tokens.shape[1])
        return {VALUES: values, WEIGHTS_VERSION: np.full((len(rows), 1), version, np.int64)}

    def train(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        torch.set_num_threads(1)
        answers = [critic.train({name: request[name] for name in PAYLOAD}) for request in requests]
        return [
            {LOSS_MEAN: np.asarray([loss], np.float32), WEIGHTS_VERSION: np.asarray([version], np.int64)}
            for loss, version in answers
        ]

    integers, floats = (-1, -1), (1, -1)
    triton.bind(
        CRITIC_INFER,
        infer,
        inputs=[
            Tensor(name=TOKENS, dtype=np.int64, shape=(-1,)),
            Tensor(name=SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,)),
        ],
        outputs=[
            Tensor(name=VALUES, dtype=np.float32, shape=(-1,)),
            Tensor(name=WEIGHTS_VERSION, dtype=np.int64, shape=(1,)),
        ],
        config=ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=2000)),
    )
    triton.bind(
        CRITIC_TRAIN,
        train,
        inputs=[
            *(Tensor(name=name, dtype=np.int64, shape=integers) for name in (TOKENS, SEQUENCE_LENGTHS)),
            *(Tensor(name=name, dtype=np.float32, shape=floats) for name in (RETURNS, PREV_VALUES, MASK)),
            Tensor(name=RUN_ID, dtype=np.bytes_, shape=(1,)),
            Tensor(name=STEP, dtype=np.int64, shape=(1,)),
        ],
        outputs=[
            Tensor(name=LOSS_MEAN, dtype=np.float32, shape=(1,)),
            Tensor(name=WEIGHTS_VERSION, dtype=np.int64, shape=(1,)),
        ],
        config=ModelConfig(batching=False),
    )


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_reload_locked")
    parser.add_argument("--critic", type=Path, required=True, help="folder of the weights to begin with")
    parser.add_argument("--trainer", required=True, help="the trainer's settings, as JSON")
    parser.add_argument("--ports", type=int, nargs=3, required=True, help="HTTP, gRPC, metrics")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up after SIGINT alone
    http, grpc, metrics = args.ports
    host = "127.0.0.1"
    config = TritonConfig(
        http_address=host, http_port=http, grpc_address=host, grpc_port=grpc, metrics_port=metrics, exit_timeout_secs=2
    )
    with Triton(config=config) as triton:
        bind(triton, LockedCritic(args.critic, TrainerSection.model_validate_json(args.trainer)))
        triton.serve()


if __name__ == "__main__":
    main()
