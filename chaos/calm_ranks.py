"""The crash test's reference on several ranks, which `chaos.reference` starts.

Writes a version after each step, the losses, and a checkpoint of the last step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from chaos.system import shape_of
from chaos.traffic import batch
from python_backend.config import RunConfig, load_config
from python_backend.models.modeling import quiet_transformers
from python_backend.parallel.launch import ended, launch_ranks
from python_backend.parallel.ranks import Ranks
from python_backend.store.weights import WeightsStore
from python_backend.wire.training_payload import train_payload
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.sharded.update import ShardedUpdate, follow_rank_0

LOSSES_FILE = "losses.json"


def main() -> int:
    """Train on this rank; the arguments are the run's YAML, seed, number of steps and the folder of the results."""
    path, seed, num_steps, out = sys.argv[1:]
    config = load_config(Path(path))
    launch_ranks(config.trainer.ranks, "chaos.calm_ranks", sys.argv[1:], key="trainer.ranks")
    quiet_transformers()
    torch.set_num_threads(config.trainer.threads)
    with Ranks.joined(config.trainer.device) as ranks:
        if ranks.rank:
            follow_rank_0(config.trainer, config.run.seed, ranks)
        else:
            _train(config, ranks, int(seed), int(num_steps), Path(out))
    return ended(0)


def _train(config: RunConfig, ranks: Ranks, seed: int, num_steps: int, out: Path) -> None:
    store, shape = WeightsStore(out), shape_of(config)
    origin = WeightsStore(config.run.weights_dir).folder(0)
    update = ShardedUpdate(config.trainer, config.run.seed, ranks, origin)
    losses: list[float | None] = []
    for step in range(num_steps + 1):
        loss = None
        if step:
            payload = train_payload(dict(batch(seed, step, shape)), update.critic.limits)
            loss = update.train(payload, lambda _: None).loss_mean
        losses.append(loss)
        store.add(update.critic.write, run_id="reference", step=step, parent=None, epoch=0)
    state = CheckpointState("reference", num_steps, update.optimizer_step, -1, 0, True, {}, "", "", [])
    CheckpointFolder(out / "checkpoint").save(update, state)
    (out / LOSSES_FILE).write_text(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(main())
