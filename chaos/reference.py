"""The crash test's reference: trains the same batches in a plain loop, without journal, server or kills."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chaos.traffic import probes
from python_backend.config import RunConfig
from python_backend.models.batching import padded_rows
from python_backend.store.weights import WeightsStore


@dataclass(frozen=True)
class ReferenceStep:
    """The critic after a number of updates."""

    loss: float | None
    """Loss of the last update; None for version 0."""
    sha256: str
    """SHA-256 of the critic's weights, as in a version's manifest."""
    values: list[np.ndarray]
    """Values of each probe request, float32 `[n, S]`, padded with 0."""


@dataclass(frozen=True)
class Reference:
    """Results of a run without faults."""

    steps: list[ReferenceStep]
    """Indexed by the number of critic updates."""
    rewards: list[np.ndarray]
    """Rewards of each probe request, float32 `[n]`."""
    checkpoint: Path
    """Expected content of the sidecar's checkpoint of the last step."""


def run_reference(config: RunConfig, path: Path, seed: int, num_steps: int, folder: Path) -> Reference:
    """Train `num_steps` batches from the store's version 0; score the probe requests after each.

    Args:
        path: the YAML of `config`.
        folder: of the training, on as many ranks as in `config`, which `chaos.calm_training` runs.
    """
    from python_backend.models.modeling import load_critic, quiet_transformers
    from trainer.publish import reward_loader  # torch: not for --help

    quiet_transformers()
    folder.mkdir(parents=True, exist_ok=True)
    module = [sys.executable, "-m", "chaos.calm_training", str(path), str(seed), str(num_steps), str(folder)]
    with (folder / "training.log").open("wb") as log:
        subprocess.run(module, stdout=log, stderr=log, check=True)
    requests, losses = probes(seed), json.loads((folder / "losses.json").read_text())
    origin, store = WeightsStore(config.run.weights_dir), WeightsStore(folder)
    critic = load_critic(origin.folder(0))
    steps = []
    for step, loss in enumerate(losses):
        values = critic.with_weights(store.folder(step)).values
        # One process wrote the run's version 0, to a single file, also if several ranks train.
        manifest = (store if step or config.trainer.ranks == 1 else origin).manifest(step)
        steps.append(ReferenceStep(loss, manifest.sha256, [_padded_each(rows, values) for rows in requests]))
    reward = reward_loader(config.reward)(config.reward.checkpoint)
    rewards = [np.concatenate([reward.score([row]).ravel() for row in rows]) for rows in requests]
    return Reference(steps, rewards, folder / "checkpoint" / str(num_steps))


def _padded_each(rows: list[np.ndarray], values: Callable[[list[np.ndarray]], list[np.ndarray]]) -> np.ndarray:
    """Score each row in its own forward pass; return the values, padded as in the server's answers."""
    return padded_rows([values([row])[0] for row in rows], width=max(row.size for row in rows))
