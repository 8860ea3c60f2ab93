"""The sidecar's checkpoints: written atomically, in safetensors and JSON only; training resumes bit-identically.

    <root>/<step>/{shard-...safetensors, state.json}    trained weights and optimizer, one file per rank
    <root>/<step>.set-aside/       a damaged checkpoint, kept for inspection
    <root>/keep_steps.json         the steps whose checkpoints the actor still needs, if it has sent a list

state.json contains the position in the schedule (`optimizer_step`), the settings that affect training, and the digests
of all files and of its own content.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_triton.store import durable
from rlhf_triton.store.sealed_folder import (
    ASIDE_SUFFIX,
    DIGEST,
    DamagedCheckpoint,
    read_state,
    replace_state,
    saved_steps,
    set_aside,
    write_sealed,
)
from rlhf_triton.trainer.critic_update import CriticUpdate

KEEP_SET_ASIDE = 3  # number of newest damaged checkpoints, and of newest folders of entries that a rewind removed
KEEP_FILE = "keep_steps.json"
ASIDE = (f"*{ASIDE_SUFFIX}", "damaged-*")  # 0.1.0 named them damaged-<step>


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """The content of a checkpoint's state.json."""

    run_id: str
    step: int  # number of critic updates trained
    optimizer_step: int  # position in the learning-rate schedule
    version: int  # weights version served when the checkpoint was written
    epoch: int  # journal epoch of the sidecar process that wrote the checkpoint
    requested: bool  # requested by critic_save or a rewind, so an actor's checkpoint may refer to it
    settings: dict[str, Any]  # settings that affect training, see `TrainedModel.settings`
    base_digest: str  # digest of version 0's weights, from which training started
    results: list[dict[str, Any]]  # results of the last steps, with digests and losses


class CheckpointFolder:
    """The folder with all checkpoints of a critic."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return saved_steps(self.root)

    def requested_steps(self) -> list[int]:
        """Return the steps whose checkpoint critic_save or a rewind requested, or is damaged."""
        return [step for step in self.steps() if self._is_requested(step)]

    def latest(self) -> int | None:
        """Return the newest step that has a checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def save(self, update: CriticUpdate, state: CheckpointState) -> Path:
        """Write a checkpoint and return its folder.

        If the step already has a checkpoint, its weights are the same, so only state.json is replaced.
        """
        final = self.root / str(state.step)
        try:  # a folder cannot be replaced atomically: after a crash in between, the step would have no checkpoint
            replace_state(final, asdict(state))
        except DamagedCheckpoint:  # also raised for a missing checkpoint
            if final.exists():
                self.set_aside(state.step)
            write_sealed(final, asdict(state), update.trained.save)
        return final

    def state(self, step: int) -> CheckpointState:
        """Return the state of the checkpoint of `step`. Raises DamagedCheckpoint if it is missing or damaged."""
        data = read_state(self.root / str(step))
        if "asked" in data:  # as 0.1.0 wrote it
            data["requested"] = data.pop("asked")
        return CheckpointState(**{name: value for name, value in data.items() if name not in ("files", DIGEST)})

    def load(self, step: int, update: CriticUpdate) -> CheckpointState:
        """Load weights and optimizer of `step` into `update`; return the saved state.

        Raises:
            DamagedCheckpoint: a file is missing or does not match its digest; `update` is unchanged.
            CheckpointError: it was saved with another value of a `Resume.FIXED` setting; `update` is unchanged.
        """
        state = self.state(step)
        folder = self.root / str(step)
        update.trained.check_fixed(state.settings, folder)
        update.trained.verify(folder)
        update.trained.load(folder, state.optimizer_step)
        return state

    def mark_requested(self, step: int) -> None:
        """Mark a checkpoint, which the sidecar wrote on its own, as requested by the actor.

        Raises DamagedCheckpoint if it is missing or damaged.
        """
        state = self.state(step)
        if not state.requested:
            replace_state(self.root / str(step), asdict(replace(state, requested=True)))

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint to `<step>.set-aside`, replacing an older one; return the new path."""
        return set_aside(self.root / str(step))

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints after `step`, which a rewind has invalidated, and their steps in keep_steps.json."""
        keep_steps = self._keep_steps()
        if keep_steps is not None:
            durable.write_json(self.root / KEEP_FILE, {"steps": [needed for needed in keep_steps if needed <= step]})
        for newer in self.steps():
            if newer > step:
                durable.remove_folder(self.root / str(newer))

    def keep_only(self, keep_steps: Sequence[int], *, step: int) -> None:
        """Record durably that only `keep_steps` and `step` are needed of the checkpoints up to `step`."""
        later = [needed for needed in self._keep_steps() or [] if needed > step]
        durable.make_folder(self.root)
        durable.write_json(self.root / KEEP_FILE, {"steps": sorted({*keep_steps, step, *later})})

    def prune(self, *, keep: int, keep_damaged: int = 0) -> None:
        """Delete checkpoints that are no longer needed.

        Keeps the steps in keep_steps.json, the newest `keep` requested checkpoints after those, the newest checkpoint
        of all, and the newest `keep_damaged` damaged ones.
        """
        steps = self.steps()
        needed = self._keep_steps() or []
        requested = [step for step in self.requested_steps() if step > max(needed, default=-1)]
        for step in set(steps[:-1]) - set(needed) - set(requested[-keep:]):
            durable.remove_folder(self.root / str(step))
        damaged = [folder for pattern in ASIDE for folder in self.root.glob(pattern)]
        damaged.sort(key=lambda path: path.stat().st_ctime_ns, reverse=True)
        for folder in damaged[keep_damaged:]:
            durable.remove_folder(folder)
        durable.sweep(self.root)

    def _keep_steps(self) -> list[int] | None:
        return (durable.read_json(self.root / KEEP_FILE) or {}).get("steps")

    def _is_requested(self, step: int) -> bool:
        try:
            return self.state(step).requested
        except DamagedCheckpoint:  # unknown: keep it, to be safe
            return True
