"""Restores training state from checkpoints and journal; damage that can be repaired by replay is logged and skipped."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import torch

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.errors import NotFinite
from python_backend.store.journal import Journal
from python_backend.store.journal_entry import DamagedEntry, Entry
from python_backend.wire.training_payload import TrainPayload
from trainer.checkpoint import CheckpointFolder, CheckpointState, DamagedCheckpoint
from trainer.critic_update import CriticUpdate
from trainer.fingerprint import changes, fingerprint
from trainer.progress import SidecarProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """Identity of a run, which its checkpoints must match; different settings only cause a warning."""

    run_id: str
    base_sha256: str  # of version 0's weights
    settings: dict[str, Any]  # settings that determine the result, see trainer.fingerprint
    seed: int  # seed of torch's random state before the first step


def load_newest(
    update: CriticUpdate,
    checkpoints: CheckpointFolder,
    journal: Journal,
    origin: Origin,
    *,
    at_most: int | None,
) -> CheckpointState | None:
    """Load the newest intact checkpoint up to `at_most` into `update`; return its state, None without a checkpoint.

    Damaged newer checkpoints are set aside if the journal can replay the steps up to them.

    Raises:
        CheckpointError: the checkpoint belongs to another run; or a newer one is damaged and the journal lacks a step
            up to it.
    """
    torch.manual_seed(origin.seed)  # for a start from version 0; a checkpoint restores its own random state
    damaged: list[tuple[int, DamagedCheckpoint]] = []
    found = None
    for step in reversed([step for step in checkpoints.steps() if at_most is None or step <= at_most]):
        try:
            _check_origin(checkpoints.state(step), origin)
            found = checkpoints.load(step, update)
            break
        except DamagedCheckpoint as error:
            damaged.append((step, error))
    start = found.step if found else 0
    for step, damage in damaged:
        missing = _first_missing(journal, start, step)
        if missing is not None:
            raise CheckpointError(
                f"{damage}; it cannot be made up for from step {start}, because the journal no longer has step "
                f"{missing}: put the file back, or begin a new run"
            ) from damage
    for step, damage in damaged:
        aside = checkpoints.set_aside(step)
        logger.warning("%s; training is repeated from step %d; it lies in %s now", damage, start, aside)
    return found


def warn_of_changes(state: CheckpointState, settings: dict[str, Any]) -> None:
    """Log which settings differ from those the checkpoint was trained with; changing them between runs is allowed."""
    if state.fingerprint != fingerprint(settings):
        logger.warning(
            "the critic was trained up to step %d under other settings (%s); the new ones hold from here on",
            state.step,
            "; ".join(changes(state.settings, settings)) or "settings that are no more",
        )


def replay(update: CriticUpdate, journal: Journal, progress: SidecarProgress, *, start: int, end: int) -> int:
    """Train `update` on the journal's steps after `start`, up to `end`; returns the last one that was there.

    Raises:
        DamagedEntry: an entry that changed the weights cannot be read.
    """
    for entry in journal.entries():
        if entry.kind == "train" and entry.step == start + 1 <= end:
            with progress.working(f"reading step {entry.step}"):
                payload = _payload(journal, entry)
            if payload is not None:
                with contextlib.suppress(NotFinite):  # the original training failed the same way, and went on
                    update.train(payload, lambda n: progress.beat("replaying", n))
            start = entry.step
    return start


def give_up(journal: Journal, entry: Entry, damage: DamagedEntry) -> str:
    """Skip a damaged training entry and keep a copy of its file; return the error message for its caller.

    Raises:
        CheckpointError: the step was trained and answered before, so that its weights cannot be reproduced.
    """
    result = journal.result(entry)
    if result is None:
        journal.set_aside_damaged(entry)
    elif result.loss_mean is not None:
        raise CheckpointError(
            f"{damage}; step {entry.step} was trained and answered before, and without it the weights cannot become "
            "the same again: put the file back, or begin a new run"
        ) from damage
    return f"step {entry.step} was not trained, training goes on with the next step: {damage}"


def _payload(journal: Journal, entry: Entry) -> TrainPayload | None:
    """Load an entry for replay; None if it is damaged and was so originally, so that its step changed no weights."""
    try:
        return journal.load(entry)[0]
    except DamagedEntry:
        result = journal.result(entry)
        if result is None or result.loss_mean is not None:
            raise
        return None


def _first_missing(journal: Journal, start: int, end: int) -> int | None:
    """Return the first step after `start`, up to `end`, that the journal cannot replay; None if there is none."""
    entries = {entry.step: entry for entry in journal.entries() if entry.kind == "train"}
    for step in range(start + 1, end + 1):
        try:
            _payload(journal, entries[step])
        except (KeyError, DamagedEntry):
            return step
    return None


def _check_origin(state: CheckpointState, origin: Origin) -> None:
    if state.run_id != origin.run_id:
        raise CheckpointError(
            f"run.run_id: {origin.run_id!r}, but the checkpoint of step {state.step} belongs to run {state.run_id!r}: "
            "give the run its old run_id, or a folder of its own (run.dir)"
        )
    if state.base_sha256 != origin.base_sha256:
        raise CheckpointError(
            f"the checkpoint of step {state.step} was trained from a version 0 with sha256 {state.base_sha256[:12]}…, "
            f"the weights store's has {origin.base_sha256[:12]}…: put that store back, or begin a new run (run.dir)"
        )
