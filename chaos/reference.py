"""The crash test's reference: trains the same batches in a plain loop, without journal, server or kills.

`python -m chaos.reference` does the training, on as many ranks as in the configuration: it writes a version after each
step, the losses, and a checkpoint of the last step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from chaos.traffic import batch, probes
from python_backend.config import RunConfig, load_config
from python_backend.models.batching import padded_rows
from python_backend.store.weights import WeightsStore
from python_backend.wire.training_payload import train_payload

if TYPE_CHECKING:
    from trainer.critic_update import CriticUpdate


@dataclass(frozen=True)
class ReferenceStep:
    """The critic after a number of updates."""

    loss: float | None
    """Loss of the last update; None for version 0."""
    digest: str
    """Digest of the critic's weights, as in a version's manifest."""
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
        folder: of the training's results.
    """
    from python_backend.models.modeling import load_critic, quiet_transformers  # torch: not for --help
    from trainer.publish import reward_loader

    quiet_transformers()
    folder.mkdir(parents=True, exist_ok=True)
    module = [sys.executable, "-m", "chaos.reference", str(path), str(seed), str(num_steps), str(folder)]
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
        # Each row in its own forward pass, then padded as in the server's answers.
        alone = [[values([row])[0] for row in rows] for rows in requests]
        padded = [padded_rows(rows, width=max(row.size for row in rows)) for rows in alone]
        steps.append(ReferenceStep(loss, manifest.digest, padded))
    reward = reward_loader(config.reward)(config.reward.model)
    rewards = [np.concatenate([reward.score([row]).ravel() for row in rows]) for rows in requests]
    return Reference(steps, rewards, folder / "checkpoint" / str(num_steps))


def main() -> int:
    """Train on this rank; the arguments are the run's YAML, seed, number of steps and the folder of the results."""
    import torch

    from python_backend.models.modeling import load_critic, quiet_transformers
    from python_backend.models.placement import own_device
    from python_backend.training.launch import ended, launch_ranks
    from python_backend.training.ranks import Ranks
    from trainer.critic_update import CriticUpdate, follow_rank_0, load_update

    path, seed, num_steps, out = sys.argv[1:]
    config = load_config(Path(path))
    settings, origin = config.trainer, WeightsStore(config.run.weights_dir).folder(0)
    launch_ranks(settings.ranks, "chaos.reference", sys.argv[1:], key="trainer.ranks")
    quiet_transformers()
    torch.set_num_threads(settings.threads)
    if settings.ranks == 1:
        update = CriticUpdate(load_critic(origin), settings)
        torch.manual_seed(config.run.seed)  # as the sidecar does when it starts
        _train(update, int(seed), int(num_steps), Path(out))
        return 0
    with Ranks.joined(own_device(settings.device)) as ranks:
        if ranks.rank:
            follow_rank_0(settings, config.run.seed, ranks)
        else:
            update = load_update(origin, settings, seed=config.run.seed, ranks=ranks)
            _train(update, int(seed), int(num_steps), Path(out))
    return ended(0)


def _train(update: CriticUpdate, seed: int, num_steps: int, out: Path) -> None:
    from trainer.checkpoint import CheckpointFolder, CheckpointState

    store = WeightsStore(out)
    losses: list[float | None] = [None]
    for step in range(num_steps + 1):
        if step:
            payload = train_payload(batch(seed, step), update.critic.limits)
            losses.append(update.train(payload, lambda _: None).loss_mean)
        store.add(update.critic.write, run_id="reference", step=step, parent=None, epoch=0)
    state = CheckpointState("reference", num_steps, update.optimizer_step, -1, 0, True, {}, "", "", [])
    CheckpointFolder(out / "checkpoint").save(update, state)
    (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(main())
