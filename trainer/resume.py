"""Restores a state from checkpoints and journal; damaged parts that can be replaced are skipped and logged."""

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
    """What a run's checkpoints must agree with, or may differ from only with a warning."""

    run_id: str
    base_sha256: str  # of version 0's weights
    settings: dict[str, Any]  # that decide the result; another value is a warning
    seed: int  # of torch's random state before the first step


def load_newest(
    update: CriticUpdate,
    checkpoints: CheckpointFolder,
    journal: Journal,
    origin: Origin,
    *,
    at_most: int | None,
) -> CheckpointState | None:
    """Put the newest checkpoint up to `at_most` that is intact into `update`; None: version 0 is all there is.

    Raises:
        CheckpointError: it is another run's; or a newer one is damaged and the journal does not lead there.
    """
    torch.manual_seed(origin.seed)
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
    """Say which settings are not those that a checkpoint was trained under; going on is legitimate."""
    if state.fingerprint != fingerprint(settings):
        logger.warning(
            "the critic was trained up to step %d under other settings (%s); the new ones hold from here on",
            state.step,
            "; ".join(changes(state.settings, settings)) or "settings that are no more",
        )


def replay(update: CriticUpdate, journal: Journal, progress: SidecarProgress, *, start: int, end: int) -> int:
    """Train `update` on the journal's steps after `start`, up to `end`; returns the last one that was there.

    Raises DamagedEntry if one that changed the weights cannot be read.
    """
    for entry in journal.entries():
        if entry.kind == "train" and entry.step == start + 1 <= end:
            with progress.working(f"reading step {entry.step}"):
                payload = _payload(journal, entry)
            if payload is not None:
                with contextlib.suppress(NotFinite):  # its caller was told then, and training went on
                    update.train(payload, lambda n: progress.beat("replaying", n))
            start = entry.step
    return start


def give_up(journal: Journal, entry: Entry, damage: DamagedEntry) -> str:
    """Set a damaged training entry aside; returns what its caller is told.

    Raises CheckpointError if it was trained and answered before: the weights could not become the same.
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
    """What to train on again; None where the step changed nothing, because it was damaged even then."""
    try:
        return journal.load(entry)[0]
    except DamagedEntry:
        result = journal.result(entry)
        if result is None or result.loss_mean is not None:
            raise
        return None


def _first_missing(journal: Journal, start: int, end: int) -> int | None:
    """The first step after `start`, up to `end`, that the journal cannot train again."""
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
