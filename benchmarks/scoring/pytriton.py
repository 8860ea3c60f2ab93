"""A PyTriton server like that of the system that this project replaces: a reward model in small, padded micro-batches.

It follows PyTriton's documentation: dynamic batching, one callable per instance. The model is the project's own code.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.scoring.processes import load_contender
from benchmarks.support.children import HOST
from python_backend.wire.contract import REWARD_MODEL, REWARDS, SEQUENCE_LENGTHS, TOKENS

MICRO_BATCH_ROWS = 8
MAX_BATCH_ROWS = 16  # padded rows cost the same in any batch; larger ones would only leave the second instance idle
QUEUE_DELAY_US = 2000


def serve(ports: Sequence[int], checkpoint: str, threads: int, instances: int, strip_multiple: int) -> None:
    """Serve the reward model until SIGTERM, for requests padded to one common width; see `stripped_width`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up only after SIGINT
    http, grpc, metrics = ports
    config = TritonConfig(
        http_address=HOST, http_port=http, grpc_address=HOST, grpc_port=grpc, metrics_port=metrics, exit_timeout_secs=2
    )
    batcher = DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
    with Triton(config=config) as triton:
        triton.bind(
            REWARD_MODEL,
            [callable_of(load_contender(checkpoint, threads), strip_multiple) for _ in range(instances)],
            inputs=[
                Tensor(name=TOKENS, dtype=np.int64, shape=(-1,)),
                Tensor(name=SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,)),
            ],
            outputs=[Tensor(name=REWARDS, dtype=np.float32, shape=(1,))],
            config=ModelConfig(max_batch_size=MAX_BATCH_ROWS, batcher=batcher),
        )
        triton.serve()


def stripped_width(longest: int, multiple: int, width: int) -> int:
    """Return the width to compute: `longest` rounded up to `multiple`, at most `width`; `width` if `multiple` is 0."""
    return min(width, -(-longest // multiple) * multiple) if multiple else width


def callable_of(score: Callable[..., np.ndarray], multiple: int) -> Callable[..., dict[str, np.ndarray]]:
    """Return the PyTriton callable for a merged batch: `tokens` [B, S] and `sequence_lengths` [B, 1]."""

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        tokens, lengths = inputs[TOKENS], inputs[SEQUENCE_LENGTHS][:, 0]
        scores = []
        for start in range(0, len(tokens), MICRO_BATCH_ROWS):
            part = slice(start, start + MICRO_BATCH_ROWS)
            rows = [row[:length] for row, length in zip(tokens[part], lengths[part], strict=True)]
            scores.append(score(rows, stripped_width(int(lengths[part].max()), multiple, tokens.shape[1])))
        return {REWARDS: np.concatenate(scores)}

    return infer
