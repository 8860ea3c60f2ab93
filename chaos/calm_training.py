"""The training of the crash test's reference, which `chaos.reference` starts in a process of its own.

Writes a version after each step, the losses, and a checkpoint of the last step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from chaos.traffic import batch
from python_backend.config import load_config
from python_backend.models.card.placement import own_device
from python_backend.models.modeling import load_critic, quiet_transformers
from python_backend.store.weights import WeightsStore
from python_backend.training.launch import ended, launch_ranks
from python_backend.training.ranks import Ranks
from python_backend.wire.training_payload import train_payload
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.critic_update import CriticUpdate, follow_rank_0, load_update


def main() -> int:
    """Train on this rank; the arguments are the run's YAML, seed, number of steps and the folder of the results."""
    path, seed, num_steps, out = sys.argv[1:]
    config = load_config(Path(path))
    settings, origin = config.trainer, WeightsStore(config.run.weights_dir).folder(0)
    launch_ranks(settings.ranks, "chaos.calm_training", sys.argv[1:], key="trainer.ranks")
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
