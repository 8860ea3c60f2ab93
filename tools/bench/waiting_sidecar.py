"""`python -m tools.bench.waiting_sidecar --config YAML --seconds-per-token S`: a sidecar that waits, not trains.
Given: seconds per token, measured on the real update. Returns: as the sidecar; journal, weights and reloads are real.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

import trainer.sidecar
from python_backend.config import load_config
from python_backend.stop_signal import stop_event
from python_backend.training_payload import TrainPayload
from trainer.critic_update import CriticUpdate, UpdateReport


class WaitingUpdate(CriticUpdate):
    """An update that takes its time and changes one weight a little."""

    seconds_per_token = 0.0

    def train(self, payload: TrainPayload, progress: Callable[[int], None]) -> UpdateReport:
        start = time.monotonic()
        time.sleep(self.seconds_per_token * float(payload.lengths.sum()))
        with torch.no_grad():
            list(self.critic.model.parameters())[-1].add_(1e-6)
        progress(1)
        return UpdateReport(0.0, 0.0, 0.0, 1, 0, time.monotonic() - start)


def main() -> None:
    """The sidecar, until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="bench_waiting_sidecar")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--seconds-per-token", type=float, required=True)
    args = parser.parse_args()
    stop = stop_event(signal.SIGINT, signal.SIGTERM)
    WaitingUpdate.seconds_per_token = args.seconds_per_token
    trainer.sidecar.CriticUpdate = WaitingUpdate  # type: ignore[misc]
    trainer.sidecar.Sidecar(load_config(args.config, [])).run(stop)


if __name__ == "__main__":
    main()
