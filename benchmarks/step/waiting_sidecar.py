"""A sidecar that sleeps instead of training; its journal, weights and reloads are real."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from python_backend.config import load_config
from python_backend.stop_signal import stop_event
from python_backend.wire.training_payload import TrainPayload
from trainer.critic_update import CriticUpdate, UpdateReport
from trainer.sidecar import follow


def run(config: str, seconds_per_token: float) -> None:
    """Run the sidecar with the YAML file `config` until SIGINT or SIGTERM; use a process of its own."""

    def wait(
        update: CriticUpdate, payload: TrainPayload, progress: Callable[[int], None], skip: object
    ) -> UpdateReport:
        """Sleep in proportion to the tokens, and change one weight a little."""
        start = time.monotonic()
        time.sleep(seconds_per_token * float(payload.lengths.sum()))
        with torch.no_grad():
            list(update.critic.model.parameters())[-1].add_(1e-6)
        progress(1)
        return UpdateReport(0.0, 0.0, 0.0, 1, 0, time.monotonic() - start)

    CriticUpdate.train = wait  # type: ignore[assignment, method-assign]
    follow(load_config(Path(config), []), stop_event(signal.SIGINT, signal.SIGTERM))
