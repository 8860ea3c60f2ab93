"""The crash test's reference: trains the same batches in a plain loop, without journal, server or kills."""

from __future__ import annotations

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
    """SHA-256 of the critic's model.safetensors."""
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


def run_reference(config: RunConfig, seed: int, shape: Shape, num_steps: int, folder: Path) -> Reference:
    """Train `num_steps` batches from the store's version 0 in this process; score the probe requests after each."""
    import torch

    from python_backend.config.sections import constants_of
    from python_backend.models.modeling import load_critic, load_reward, quiet_transformers, save_critic
    from python_backend.wire.training_payload import train_payload
    from trainer.checkpoint import CheckpointFolder, CheckpointState
    from trainer.critic_update import CriticUpdate

    quiet_transformers()
    torch.set_num_threads(config.trainer.threads)
    requests = probes(seed, shape)
    critic = load_critic(WeightsStore(config.run.weights_dir).folder(0))
    update = CriticUpdate(critic, config.trainer)
    torch.manual_seed(config.run.seed)  # as the sidecar does when it starts
    folder.mkdir(parents=True, exist_ok=True)
    steps = []
    for step in range(num_steps + 1):
        loss = None
        if step:
            payload = train_payload(dict(batch(seed, step, shape)), critic.limits)
            loss = update.train(payload, lambda _: None).loss_mean
        save_critic(critic, folder)
        steps.append(ReferenceStep(loss, sha256_of(folder / WEIGHTS_FILE), _padded_each(requests, critic.values)))
    state = CheckpointState("reference", num_steps, update.optimizer_step, -1, 0, True, {}, "", "", [])
    checkpoint = CheckpointFolder(folder / "checkpoint").save(update, state)
    section = config.reward
    reward = load_reward(
        section.checkpoint, pooling=section.pooling, attribute_weights=section.attribute_weights,
        standardization=constants_of(section.standardization),
    )  # fmt: skip
    rewards = [np.concatenate([reward.score([row]).ravel() for row in rows]) for rows in requests]
    return Reference(steps, rewards, checkpoint)


def _padded_each(
    requests: list[list[np.ndarray]], values: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> list[np.ndarray]:
    """Score each row in its own forward pass; return the values of each request, padded as in the server's answers."""
    return [padded_rows([values([row])[0] for row in rows], width=max(row.size for row in rows)) for rows in requests]
