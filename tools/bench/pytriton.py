"""A PyTriton server of the reward model, as users of the system being replaced have it; a process of its own.
Given: a checkpoint, ports, how to cut widths. Returns: `rewards` for requests of one common padded length.
Written as PyTriton's documentation advises: dynamic batching, one callable per instance, micro-batches of 8 rows.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from python_backend.contract import REWARD_MODEL, REWARDS, SEQUENCE_LENGTHS, TOKENS
from tools.bench.forward import CountedReward

MICRO_BATCH_ROWS = 8
MAX_BATCH_ROWS = 16  # padded rows cost the same in any batch; larger merges only leave the second instance idle
QUEUE_DELAY_US = 2000


def stripped_width(longest: int, multiple: int, width: int) -> int:
    """Positions to compute: `longest` rounded up to `multiple`, at most `width`; all of `width` if multiple is 0."""
    return min(width, -(-longest // multiple) * multiple) if multiple else width


def make_callable(model: CountedReward, multiple: int) -> Callable[..., dict[str, np.ndarray]]:
    """What PyTriton calls with a merged batch: `tokens` [B, S] and `sequence_lengths` [B, 1]."""

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


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_pytriton")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--counters", type=Path, required=True)
    parser.add_argument("--ports", type=int, nargs=3, required=True, help="HTTP, gRPC, metrics")
    parser.add_argument("--instances", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tuned", type=int, required=True)
    parser.add_argument("--strip-multiple", type=int, required=True, help="0: compute the width that was sent")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # PyTriton cleans up after SIGINT alone

    def load() -> Callable[..., Any]:
        model = CountedReward(args.checkpoint, args.counters, threads=args.threads, tuned=bool(args.tuned))
        return make_callable(model, args.strip_multiple)

    http, grpc, metrics = args.ports
    host = "127.0.0.1"
    config = TritonConfig(
        http_address=host, http_port=http, grpc_address=host, grpc_port=grpc, metrics_port=metrics, exit_timeout_secs=2
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=REWARD_MODEL,
            infer_func=[load() for _ in range(args.instances)],
            inputs=[
                Tensor(name=TOKENS, dtype=np.int64, shape=(-1,)),
                Tensor(name=SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,)),
            ],
            outputs=[Tensor(name=REWARDS, dtype=np.float32, shape=(1,))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH_ROWS, batcher=DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main()
