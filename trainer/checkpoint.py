"""The sidecar's checkpoints, from which training resumes bit for bit: complete or absent, safetensors and JSON only.

    <root>/<step>/{model.safetensors, config.json, optimizer.safetensors, state.json}
    <root>/damaged-<step>/         what was found damaged and could be made up for
    <root>/keep_steps.json         steps that the actor needs still, once it has said so

optimizer.safetensors holds AdamW's moments and torch's random state; state.json the position in the schedule
(`optimizer_step`), the settings' fingerprint and the sha256 of each file, its own content included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.models.adamw import load_state, state_tensors
from python_backend.models.modeling import save_critic
from python_backend.store import durable
from python_backend.store.sealed_folder import STATE_FILE, DamagedCheckpoint, read_state, seal, sealed, verify_folder
from trainer.critic_update import CriticUpdate

OPTIMIZER_FILE = "optimizer.safetensors"
KEEP_FILE = "keep_steps.json"
RANDOM_STATE = "random_state/cpu"
DAMAGED_PREFIX = "damaged-"


@dataclass(frozen=True)
class CheckpointState:
    """Where a checkpoint stands."""

    run_id: str
    step: int  # critic updates trained
    optimizer_step: int  # position in the schedule
    version: int  # weights version published last
    epoch: int  # of the sidecar that wrote it
    asked: bool  # by critic_save, so an actor's checkpoint may name it
    settings: dict[str, Any]  # that decide the result
    fingerprint: str  # of the settings
    base_sha256: str  # of version 0's weights, which training began with
    results: list[dict[str, Any]]  # digests and losses of the last steps


class CheckpointFolder:
    """All checkpoints of one critic."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return [step for step in durable.numbers_in(self.root) if (self.root / str(step) / STATE_FILE).is_file()]

    def asked_steps(self) -> list[int]:
        """Of those, the ones that critic_save or a rewind asked for; one that is damaged counts, too."""
        return [step for step in self.steps() if self._is_asked(step)]

    def latest(self, *, at_most: int | None = None) -> int | None:
        """The newest step, not above `at_most`; None if there is none."""
        return max((step for step in self.steps() if at_most is None or step <= at_most), default=None)

    def save(self, update: CriticUpdate, state: CheckpointState) -> Path:
        """Write a checkpoint; where the step has one already, the weights are the same and only its state is new."""
        final = self.root / str(state.step)
        try:  # replacing the folder would leave a moment without either
            durable.write_json(final / STATE_FILE, sealed(asdict(state), self._read_state(state.step)["files"]))
            return final
        except DamagedCheckpoint:  # or none there
            if final.exists():
                self.set_aside(state.step)

        def fill(folder: Path) -> None:
            save_critic(update.critic, folder)
            tensors = {RANDOM_STATE: torch.get_rng_state(), **state_tensors(update.optimizer, update.parameters)}
            save_file(tensors, folder / OPTIMIZER_FILE)
            (folder / STATE_FILE).write_text(json.dumps(seal(asdict(state), folder)))

        durable.write_folder(final, fill)
        return final

    def state(self, step: int) -> CheckpointState:
        """Where the checkpoint of `step` stands. Raises DamagedCheckpoint."""
        data = self._read_state(step)
        return CheckpointState(**{name: value for name, value in data.items() if name not in ("files", "sha256")})

    def verify(self, step: int) -> CheckpointState:
        """Compare each file with the sha256 in state.json. Raises DamagedCheckpoint."""
        verify_folder(self.root / str(step))
        return self.state(step)

    def load(self, step: int, update: CriticUpdate) -> CheckpointState:
        """Put weights, optimizer and random state of `step` into `update`. Raises DamagedCheckpoint."""
        state = self.verify(step)
        folder = self.root / str(step)
        update.critic.model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        tensors = load_file(folder / OPTIMIZER_FILE)
        torch.set_rng_state(tensors.pop(RANDOM_STATE))
        load_state(update.optimizer, update.parameters, tensors)
        update.optimizer_step = state.optimizer_step
        return state

    def mark_asked(self, step: int) -> None:
        """Say of a checkpoint that came by itself that an actor's belongs to it."""
        state = self.state(step)
        if not state.asked:
            files = self._read_state(step)["files"]
            durable.write_json(self.root / str(step) / STATE_FILE, sealed(asdict(replace(state, asked=True)), files))

    def set_aside(self, step: int) -> Path:
        """Take a damaged checkpoint out of the way; returns where it lies then."""
        aside = self.root / f"{DAMAGED_PREFIX}{step}"
        if aside.exists():
            durable.remove_folder(aside)
        (self.root / str(step)).rename(aside)
        durable.sync_directory(self.root)
        return aside

    def drop_after(self, step: int) -> None:
        """Delete checkpoints above `step` (a rewind took their steps out), and forget that they were needed."""
        told = self._told()
        if told is not None:
            durable.write_json(self.root / KEEP_FILE, {"steps": [needed for needed in told if needed <= step]})
        for newer in self.steps():
            if newer > step:
                durable.remove_folder(self.root / str(newer))

    def keep_only(self, keep_steps: Sequence[int], *, step: int) -> None:
        """Remember, durably, that of the checkpoints up to `step` only these are needed, and that of `step` itself."""
        later = [told for told in self._told() or [] if told > step]
        durable.make_folder(self.root)
        durable.write_json(self.root / KEEP_FILE, {"steps": sorted({*keep_steps, step, *later})})

    def prune(self, *, keep: int, keep_damaged: int = 0) -> None:
        """Keep what the actor said it needs, the newest `keep` that were asked for since, and the newest of all.

        Of those set aside as damaged the newest `keep_damaged` stay.
        """
        steps = self.steps()
        told = self._told() or []
        asked = [step for step in self.asked_steps() if step > max(told, default=-1)]
        for step in set(steps[:-1]) - set(told) - set(asked[-keep:]):
            durable.remove_folder(self.root / str(step))
        damaged = sorted(self.root.glob(f"{DAMAGED_PREFIX}*"), key=lambda path: path.stat().st_ctime_ns, reverse=True)
        for folder in damaged[keep_damaged:]:
            durable.remove_folder(folder)
        durable.sweep(self.root)

    def _told(self) -> list[int] | None:
        data = durable.read_json(self.root / KEEP_FILE)
        return None if data is None else data["steps"]

    def _is_asked(self, step: int) -> bool:
        try:
            return self.state(step).asked
        except DamagedCheckpoint:  # nobody can tell any more, so it stays
            return True

    def _read_state(self, step: int) -> dict[str, Any]:
        return read_state(self.root / str(step))
