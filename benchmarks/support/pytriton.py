"""PyTriton servers like those of the system that this project replaces: a reward model and a critic.

Both follow PyTriton's documentation: dynamic batching, one callable per instance, small micro-batches. Inference and
training of the critic share one lock. Model and update are the project's own code.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.support.children import HOST
from benchmarks.support.forward import CountedReward
from python_backend.config import TrainerSection
from python_backend.models.modeling import load_critic, quiet_transformers
from python_backend.wire import contract
from python_backend.wire.contract import RETURNS, REWARDS, SEQUENCE_LENGTHS, TOKENS, VALUES, WEIGHTS_VERSION
from python_backend.wire.training_payload import train_payload
from trainer.critic_update import CriticUpdate

MICRO_BATCH_ROWS = 8
MAX_BATCH_ROWS = 16  # padded rows cost the same in any batch; larger ones would only leave the second instance idle
QUEUE_DELAY_US = 2000
PAYLOAD = (TOKENS, SEQUENCE_LENGTHS, RETURNS, contract.PREV_VALUES, contract.MASK)


def serve_reward(
    ports: Sequence[int], checkpoint: str, counters: str, threads: int, instances: int, strip_multiple: int
) -> None:
    """Serve the reward model for requests padded to one common width; `strip_multiple`: see `stripped_width`."""
    with serving(ports) as triton:
        models = [CountedReward(checkpoint, counters, threads=threads) for _ in range(instances)]
        callables = [make_callable(model, strip_multiple) for model in models]
        bind_batched(triton, contract.REWARD_MODEL, callables, [Tensor(name=REWARDS, dtype=np.float32, shape=(1,))])


def serve_critic(ports: Sequence[int], critic: str, trainer: Mapping[str, Any]) -> None:
    """Serve `critic_infer` and `critic_train`; `critic`: folder of the weights, `trainer`: the trainer's section."""
    with serving(ports) as triton:
        locked = LockedCritic(Path(critic), TrainerSection.model_validate(trainer))
        bind_batched(
            triton,
            contract.CRITIC_INFER,
            infer_callable(locked),
            [
                Tensor(name=VALUES, dtype=np.float32, shape=(-1,)),
                _int64(WEIGHTS_VERSION, 1),
            ],
        )
        triton.bind(
            contract.CRITIC_TRAIN,
            train_callable(locked),
            inputs=[
                _int64(TOKENS, -1, -1),
                _int64(SEQUENCE_LENGTHS, -1, -1),
                *(Tensor(name=name, dtype=np.float32, shape=(1, -1)) for name in PAYLOAD[2:]),
                Tensor(name=contract.RUN_ID, dtype=np.bytes_, shape=(1,)),
                _int64(contract.STEP, 1),
            ],
            outputs=[Tensor(name=contract.LOSS_MEAN, dtype=np.float32, shape=(1,)), _int64(WEIGHTS_VERSION, 1)],
            config=ModelConfig(batching=False),
        )


@contextlib.contextmanager
def serving(ports: Sequence[int]) -> Iterator[Triton]:
    """Serve the models that the block binds until SIGTERM; `ports` are those for HTTP, gRPC and metrics."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up only after SIGINT
    http, grpc, metrics = ports
    config = TritonConfig(
        http_address=HOST, http_port=http, grpc_address=HOST, grpc_port=grpc, metrics_port=metrics, exit_timeout_secs=2
    )
    with Triton(config=config) as triton:
        yield triton
        triton.serve()


def bind_batched(triton: Triton, model: str, function: Any, outputs: list[Tensor]) -> None:
    """Bind a model that scores token rows in dynamic batches."""
    batcher = DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
    config = ModelConfig(max_batch_size=MAX_BATCH_ROWS, batcher=batcher)
    inputs = [_int64(TOKENS, -1), _int64(SEQUENCE_LENGTHS, 1)]
    triton.bind(model, function, inputs=inputs, outputs=outputs, config=config)


def _int64(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, dtype=np.int64, shape=shape)


def stripped_width(longest: int, multiple: int, width: int) -> int:
    """Return the width to compute: `longest` rounded up to `multiple`, at most `width`; `width` if `multiple` is 0."""
    return min(width, -(-longest // multiple) * multiple) if multiple else width


def make_callable(model: CountedReward, multiple: int) -> Callable[..., dict[str, np.ndarray]]:
    """Return the PyTriton callable for a merged batch: `tokens` [B, S] and `sequence_lengths` [B, 1]."""

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        tokens, lengths = inputs[TOKENS], inputs[SEQUENCE_LENGTHS][:, 0]
        scores = []
        for start in range(0, len(tokens), MICRO_BATCH_ROWS):
            part = slice(start, start + MICRO_BATCH_ROWS)
            width = stripped_width(int(lengths[part].max()), multiple, tokens.shape[1])
            scores.append(model.score_padded(tokens[part, :width], lengths[part]))
        return {REWARDS: np.concatenate(scores)}

    return infer


class LockedCritic:
    """A critic whose inference and training share one lock; training changes the weights in place."""

    def __init__(self, folder: Path, settings: TrainerSection) -> None:
        quiet_transformers()
        torch.set_num_threads(settings.threads)
        self._critic = load_critic(folder)
        self._update = CriticUpdate(self._critic, settings)
        self._lock = threading.Lock()
        self._version = 0

    def values(self, rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, int]:
        """Return the rows' values (float32 `[B, width]`) and the weights version; wait while an update is running."""
        with self._lock:
            padded = np.zeros((len(rows), width), np.float32)
            for i, values in enumerate(self._critic.values(rows, width)):
                padded[i, : values.size] = values
            return padded, self._version

    def train(self, arrays: Mapping[str, np.ndarray]) -> tuple[float, int]:
        """Train on one payload; return the loss and the new weights version."""
        with self._lock:
            report = self._update.train(train_payload(arrays, self._critic.limits), lambda done: None)
            self._version += 1
            return report.loss_mean, self._version


def infer_callable(critic: LockedCritic) -> Callable[..., dict[str, np.ndarray]]:
    """Return the PyTriton callable that returns values."""

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        torch.set_num_threads(1)  # torch keeps a part of this setting per thread
        tokens, lengths = inputs[TOKENS], inputs[SEQUENCE_LENGTHS][:, 0]
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        values, version = critic.values(rows, tokens.shape[1])
        return {VALUES: values, WEIGHTS_VERSION: np.full((len(rows), 1), version, np.int64)}

    return infer


def train_callable(critic: LockedCritic) -> Callable[[list[Any]], list[dict[str, np.ndarray]]]:
    """Return the PyTriton callable that trains the critic."""

    def train(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        torch.set_num_threads(1)
        done = [critic.train({name: request[name] for name in PAYLOAD}) for request in requests]
        return [
            {contract.LOSS_MEAN: np.asarray([loss], np.float32), WEIGHTS_VERSION: np.asarray([version], np.int64)}
            for loss, version in done
        ]

    return train
