"""The crash test's reference: trains the same batches in a plain loop, without journal, server or kills."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chaos.traffic import Shape, batch, probes
from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.config import RunConfig
from python_backend.models.batching import padded_rows
from python_backend.store.weights import WeightsStore, sha256_of


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


def run_reference(
    config: RunConfig, path: Path, seed: int, shape: Shape, num_steps: int, folder: Path
) -> Reference:  # fmt: skip
    """Train `num_steps` batches from the store's version 0; score the probe requests after each.

    Args:
        path: the YAML of `config`, for the ranks of a trainer with several.
    """
    import torch

    from python_backend.config.sections import constants_of
    from python_backend.models.modeling import load_reward, quiet_transformers

    quiet_transformers()
    torch.set_num_threads(config.trainer.threads)
    requests = probes(seed, shape)
    folder.mkdir(parents=True, exist_ok=True)
    if config.trainer.ranks == 1:
        steps, checkpoint = _alone(config, seed, shape, num_steps, folder, requests)
    else:
        steps, checkpoint = _on_ranks(config, path, seed, num_steps, folder, requests)
    section = config.reward
    reward = load_reward(
        section.checkpoint, pooling=section.pooling, attribute_weights=section.attribute_weights,
        standardization=constants_of(section.standardization),
    )  # fmt: skip
    rewards = [np.concatenate([reward.score([row]).ravel() for row in rows]) for rows in requests]
    return Reference(steps, rewards, checkpoint)


def _on_ranks(
    config: RunConfig, path: Path, seed: int, num_steps: int, folder: Path, requests: list[list[np.ndarray]]
) -> tuple[list[ReferenceStep], Path]:
    from python_backend.models.modeling import load_critic

    module = [sys.executable, "-m", "chaos.calm_ranks", str(path), str(seed), str(num_steps), str(folder)]
    with (folder / "ranks.log").open("wb") as log:
        subprocess.run(module, stdout=log, stderr=log, check=True)
    losses, store = json.loads((folder / "losses.json").read_text()), WeightsStore(folder)
    critic = load_critic(WeightsStore(config.run.weights_dir).folder(0))
    steps = []
    for step, loss in enumerate(losses):
        values = _padded_each(requests, critic.with_weights(store.folder(step)).values)
        # One process wrote the run's version 0, to a single file.
        origin = store if step else WeightsStore(config.run.weights_dir)
        steps.append(ReferenceStep(loss, origin.manifest(step).sha256, values))
    return steps, folder / "checkpoint" / str(num_steps)


def _alone(
    config: RunConfig, seed: int, shape: Shape, num_steps: int, folder: Path, requests: list[list[np.ndarray]]
) -> tuple[list[ReferenceStep], Path]:
    import torch

    from python_backend.models.modeling import load_critic, save_critic
    from python_backend.wire.training_payload import train_payload
    from trainer.checkpoint import CheckpointFolder, CheckpointState
    from trainer.critic_update import CriticUpdate

    critic = load_critic(WeightsStore(config.run.weights_dir).folder(0))
    update = CriticUpdate(critic, config.trainer)
    torch.manual_seed(config.run.seed)  # as the sidecar does when it starts
    steps = []
    for step in range(num_steps + 1):
        loss = None
        if step:
            payload = train_payload(dict(batch(seed, step, shape)), critic.limits)
            loss = update.train(payload, lambda _: None).loss_mean
        save_critic(critic, folder)
        steps.append(ReferenceStep(loss, sha256_of(folder / WEIGHTS_FILE), _padded_each(requests, critic.values)))
    state = CheckpointState("reference", num_steps, update.optimizer_step, -1, 0, True, {}, "", "", [])
    return steps, CheckpointFolder(folder / "checkpoint").save(update, state)


def _padded_each(
    requests: list[list[np.ndarray]], values: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[np.ndarray]:
    """Score each row in its own forward pass; return the values of each request, padded as in the server's answers."""
    return [padded_rows([values([row])[0] for row in rows], width=max(row.size for row in rows)) for rows in requests]
