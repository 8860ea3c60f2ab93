"""The sidecar's checkpoints: weights, optimizer and where in the journal they stand; whole or not there at all.
Given: the checkpoints' folder. Returns: the state that training resumes from, bit for bit. safetensors and JSON only.

    <root>/<step>/{model.safetensors, config.json, optimizer.safetensors, state.json}
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from python_backend.durable import remove_folder, sweep, sync_directory, sync_file, write_json
from python_backend.modeling import save_critic
from python_backend.weights import WEIGHTS_FILE
from trainer.critic_update import CriticUpdate

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class CheckpointState:
    """Where a checkpoint stands."""

    run_id: str
    step: int  # critic updates trained
    optimizer_step: int
    version: int  # weights version published last
    epoch: int  # of the sidecar that wrote it
    asked: bool  # by critic_save, so an actor's checkpoint may name it
    settings: dict[str, Any]  # the trainer section it was trained under
    results: list[dict[str, Any]]  # digests and losses of the last steps


class CheckpointFolder:
    """All checkpoints of one critic."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.root.is_dir():
            return []
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit() and (p / STATE_FILE).is_file())

    def latest(self, *, at_most: int | None = None) -> int | None:
        """The newest step, not above `at_most`; None if there is none."""
        return max((step for step in self.steps() if at_most is None or step <= at_most), default=None)

    def save(self, update: CriticUpdate, state: CheckpointState) -> Path:
        """Write a checkpoint; where the step has one already, the weights are the same and only its state is new."""
        final = self.root / str(state.step)
        if (final / STATE_FILE).is_file():  # replacing the folder would leave a moment without either
            write_json(final / STATE_FILE, asdict(state))
            return final
        self.root.mkdir(parents=True, exist_ok=True)
        staging = self.root / f".staging-{uuid.uuid4().hex}"
        staging.mkdir()
        try:
            save_critic(update.critic, staging)
            save_file(_optimizer_tensors(update), staging / OPTIMIZER_FILE)
            (staging / STATE_FILE).write_text(json.dumps(asdict(state)))
            for path in staging.iterdir():
                sync_file(path)
            staging.rename(final)
            sync_directory(self.root)
            return final
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def state(self, step: int) -> CheckpointState:
        """Where the checkpoint of `step` stands."""
        return CheckpointState(**json.loads((self.root / str(step) / STATE_FILE).read_text()))

    def load(self, step: int, update: CriticUpdate) -> CheckpointState:
        """Put weights and optimizer of `step` into `update`."""
        folder = self.root / str(step)
        state = self.state(step)
        update.critic.model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        _restore_optimizer(update, load_file(folder / OPTIMIZER_FILE))
        update.optimizer_step = state.optimizer_step
        return state

    def drop_after(self, step: int) -> None:
        """Delete checkpoints above `step` (a rewind took their steps out)."""
        for newer in self.steps():
            if newer > step:
                remove_folder(self.root / str(newer))

    def prune(self, *, keep: int) -> None:
        """Keep the newest `keep` that critic_save asked for, and the newest of all."""
        steps = self.steps()
        asked = [step for step in steps if self.state(step).asked]
        for step in set(steps[:-1]) - set(asked[-keep:]):
            remove_folder(self.root / str(step))
        sweep(self.root)


def _optimizer_tensors(update: CriticUpdate) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in update.parameters.items():
        for key, value in update.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _restore_optimizer(update: CriticUpdate, tensors: dict[str, torch.Tensor]) -> None:
    update.optimizer.state.clear()
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        parameter = update.parameters[name]
        device = "cpu" if key == "step" else parameter.device
        update.optimizer.state[parameter][key] = tensor.to(device)
